"""What a server tells of its replicas."""

import json
from types import SimpleNamespace
from typing import Any, cast

from hex_llm.server import health
from hex_llm.server.metrics import Metrics
from hex_llm.server.state import Phase
from tests.engine.fake_replicas import add, connected, routed


def values(text: bytes) -> dict[str, float]:
    """By name and labels."""
    lines = [line for line in text.decode().splitlines() if line.startswith("hexllm:rep")]
    return {name.removeprefix("hexllm:"): float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


class Exchange:
    async def reply(self, status: int, body: bytes, *, headers: Any = ()) -> None:
        self.said = status, json.loads(body)


async def ping(router) -> tuple[int, dict[str, Any]]:
    exchange = Exchange()
    server = SimpleNamespace(phase=Phase.READY, engine=router)
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
