"""What a server tells of its replicas."""

import json
from types import SimpleNamespace
from typing import Any, cast

from hex_llm.engine.output import Stats
from hex_llm.engine.wire import Alive
from hex_llm.server import health
from hex_llm.server.metrics import Metrics
from hex_llm.server.state import Phase
from tests.engine.fake_replicas import add, connected, routed


def values(text: bytes) -> dict[str, float]:
    """By name and labels."""
    lines = [line for line in text.decode().splitlines() if line.startswith("hexllm:")]
    return {name.removeprefix("hexllm:"): float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


class Exchange:
    async def reply(self, status: int, body: bytes, *, headers: Any = ()) -> None:
        self.said = status, json.loads(body)


async def ping(router, *roles: str) -> tuple[int, dict[str, Any]]:
    exchange = Exchange()
    server = SimpleNamespace(phase=Phase.READY, engine=router, roles=roles or ("",) * len(router.replicas))
    await health.ping(cast(Any, server), cast(Any, exchange))
    return exchange.said


@routed(2)
async def test_metrics_tell_what_each_replica_got_and_has_to_do_and_what_moved(router):
    replicas = connected(router)
    metrics = Metrics("model")
    router.on_send = metrics.count_sent
    for _ in range(3):
        add(router, [1, 2], 10)
    told = values(metrics.render(router, dict))
    assert {name: told[f'replica_requests_total{{replica="{name}"}}'] for name in "01"} == {"0": 2, "1": 1}
    assert {name: told[f'replica_outstanding_tokens{{replica="{name}"}}'] for name in "01"} == {"0": 24, "1": 12}
    assert {name: told[f'replica_up{{replica="{name}"}}'] for name in "01"} == {"0": 1, "1": 1}
    assert told["replays_total"] == 0
    replicas[0].die()
    told = values(metrics.render(router, dict))
    assert {name: told[f'replica_requests_total{{replica="{name}"}}'] for name in "01"} == {"0": 2, "1": 3}
    assert {name: told[f'replica_outstanding_tokens{{replica="{name}"}}'] for name in "01"} == {"0": 0, "1": 36}
    assert {name: told[f'replica_up{{replica="{name}"}}'] for name in "01"} == {"0": 0, "1": 1}
    assert told["replays_total"] == 2


@routed(2)
async def test_ping_tells_how_many_replicas_are_up(router):
    replicas = connected(router)
    assert await ping(router) == (200, {"status": "ready", "replicas": 2, "replicas_up": 2})
    replicas[1].die()
    assert await ping(router) == (200, {"status": "ready", "replicas": 2, "replicas_up": 1})


@routed(1)
async def test_ping_of_a_server_of_one_engine_does_not_speak_of_replicas(router):
    connected(router)
    assert await ping(router) == (200, {"status": "ready"})


@routed(3)
async def test_ping_tells_how_many_engines_of_either_kind_are_up(router):
    replicas = connected(router)
    roles = ("prefill", "prefill", "decode")
    both = {"status": "ready", "replicas": 3, "prefill": 2, "decode": 1}
    assert await ping(router, *roles) == (200, both | {"replicas_up": 3, "prefill_up": 2, "decode_up": 1})
    replicas[1].die()
    assert await ping(router, *roles) == (200, both | {"replicas_up": 2, "prefill_up": 1, "decode_up": 1})


def stats(**changes: float) -> Stats:
    quiet = dict.fromkeys(("running", "waiting", "total_steps", "total_preemptions"), 0)
    prefixes = dict.fromkeys(("total_prefix_queries", "total_prefix_hits"), 0)
    return Stats(**quiet | prefixes | {"blocks": 100, "blocks_used": 30, "blocks_cached": 20} | changes)


@routed(2)
async def test_metrics_tell_what_went_from_one_engine_to_another(router):
    prompts, answers = connected(router)
    prompts.say(Alive(stats(blocks_held=12), 0))
    there = stats(
        coming=2, total_received=3, total_received_bytes=4096, total_transfer_seconds=1.5, total_exposed_seconds=0.25,
        total_transfers_lost=1,
    )  # fmt: skip
    answers.say(Alive(there, 0))
    told = values(Metrics("m", ("prefill", "decode")).render(router, dict))
    assert told['replica_role{replica="0",role="prefill"}'] == told['replica_role{replica="1",role="decode"}'] == 1
    assert {name: told[f'{name}{{model_name="m"}}'] for name in told_names(told, "kv_transfer")} == {
        "kv_transfers_total": 3,
        "kv_transfer_bytes_total": 4096,
        "kv_transfer_seconds_total": 1.5,
        "kv_transfer_exposed_seconds_total": 0.25,
        "kv_transfer_failures_total": 1,
    }
    assert told['num_requests_waiting_for_kv{model_name="m"}'] == 2
    blocks = {state: told[f'kv_blocks{{state="{state}"}}'] for state in ("free", "used", "cached", "held")}
    assert blocks == {"free": 100, "used": 48, "cached": 40, "held": 12}


@routed(2)
async def test_metrics_of_engines_that_all_do_all_do_not_speak_of_transfers(router):
    for each in connected(router):
        each.say(Alive(stats(), 0))
    told = values(Metrics("m", ("", "")).render(router, dict))
    assert not told_names(told, "kv_transfer", "replica_role", "num_requests_waiting_for_kv")
    assert [name for name in told if name.startswith("kv_blocks")] == [
        'kv_blocks{state="free"}', 'kv_blocks{state="used"}', 'kv_blocks{state="cached"}'
    ]  # fmt: skip


def told_names(told: dict[str, float], *beginnings: str) -> list[str]:
    return [name.partition("{")[0] for name in told if name.startswith(beginnings)]
