"""Servers with adapters: many in few places beside the model alone, each answered as if it were alone; bad ones are
refused and disturb nobody."""

import asyncio
import itertools
import json
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.checkpoints import write_llama
from tests.download.servers import RunningStandIn, running_emulator, running_stand_in
from tests.faults.accelerator import AS_ON_AN_ACCELERATOR, IN_WORDS
from tests.faults.clients import stream_for
from tests.faults.oracles import check_oracles
from tests.faults.pinging import share
from tests.faults.suite import record, sized
from tests.lora.adapters import peft_config, write_adapter
from tests.lora.for_model import Adapters
from tests.monitoring.page import check_metrics
from tests.server.load import COMPLETED, random_body, run_load
from tests.server.servers import RunningServer, checked, running_server

NUM_ADAPTERS, NUM_SLOTS, CONCURRENCY = 200, 16, 64
BESIDE, ROUNDS = sized((1000, 1), (10_000, 2))  # good requests, and how often each bad adapter is asked for meanwhile
STREAMS, AT_A_TIME, BYTES_A_SECOND = 4, 8, 10_000  # beside adapters, so many at a time, that come so slowly
WAVES, GAPS = sized((1, 100), (8, 2))  # how often, and how much longer: CI has other tests on its two cores
SETTINGS = (
    "--enable_lora",
    f"--max_num_mem_cached_lora={NUM_SLOTS}",
    "--max_lora_rank=4",
    "--dtype=float32",
    "--disable_log_requests",
    "--max_decode_seqs=64",
    "--num_blocks=2048",
)
KEYS = tuple(f"key-of-caller-{number}-{'x' * 32}" for number in range(8))
ALLOWED = "--lora_allowed_prefixes=gs://adapters/good/,gs://adapters/bad/,test/"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def stand_in(model, tmp_path_factory):
    """Of the hub and of Cloud Storage, with adapters."""
    adapters = Adapters(model)
    others = Adapters(write_llama(tmp_path_factory.mktemp("other"), num_key_value_heads=8))
    with running_stand_in(tmp_path_factory.mktemp("stand_in")) as running:
        for number in range(NUM_ADAPTERS):
            adapters.write(running.bucket(f"adapters/good/{number}"), number, rank=1 + number % 4)
        adapters.write(running.hub("test/adapter"), seed=1000)
        _write_bad(running, adapters)
        others.write(running.bucket("adapters/bad/other-base"), 1, base_model_name_or_path="somebody/other")
        yield running


@pytest.fixture(scope="module")
def server(model, stand_in, tmp_path_factory):
    named = f"--lora_modules=one=gs://adapters/good/1,local={_local(model, tmp_path_factory)}"
    log = tmp_path_factory.mktemp("server") / "log"
    environment = stand_in.environment | checked()
    with running_server(model, log, *SETTINGS, ALLOWED, named, keys=KEYS, **environment) as server:
        yield server


def _local(model: Path, tmp_path_factory) -> Path:
    return Adapters(model).write(tmp_path_factory.mktemp("local"), seed=2000)


def body(number: int, adapter: str = "") -> dict:
    prompt = [5 + number % 200, 9, 3 + number % 7] * (1 + number % 4)
    asked = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return asked | ({"dynamic-lora": adapter} if adapter else {})


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def texts(server: RunningServer, bodies: list[dict], concurrency: int) -> list[str]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda each: text_of(server.post("/v1/completions", each)), bodies))


def good(number: int) -> str:
    return f"gs://adapters/good/{number}"


def idle(server: RunningServer) -> None:
    """Nothing is left of any request, and no invariant broken."""
    check_oracles(server)
    assert server.metrics()['hexllm:lora_slots{state="used"}'] == 0


def test_200_adapters_in_16_places_are_answered_as_each_alone(server):
    """With others that are given up on the way (F24)."""
    numbers = [*range(NUM_ADAPTERS)]
    alone = texts(server, [body(number, good(number)) for number in numbers], concurrency=1)
    assert len(set(alone)) > NUM_ADAPTERS * 0.9, "adapters that change nothing test nothing"
    plain = texts(server, [body(number) for number in numbers[:20]], concurrency=1)
    bodies = [(alone[number], body(number, good(number))) for number in numbers * 2]
    bodies += [(plain[number], body(number)) for number in numbers[:20] * 4]
    random.Random(0).shuffle(bodies)
    with ThreadPoolExecutor(8) as pool:
        given_up = [pool.submit(_give_up, server, number) for number in range(60)]
        found = texts(server, [each for _, each in bodies], CONCURRENCY)
        assert all(each.result() is None for each in given_up)
    assert found == [expected for expected, _ in bodies]
    idle(server)
    alike = (
        f"{len(found)} of {len(bodies)} answers with {NUM_ADAPTERS} adapters in {NUM_SLOTS} places are as each alone"
    )
    record("F24", f"{alike}, beside {len(given_up)} requests that are given up")


def _give_up(server: RunningServer, number: int) -> None:
    asked = body(number, good((7 * number) % NUM_ADAPTERS)) | {"max_tokens": 200}
    try:
        seconds = 0.02 * (1 + number % 9)
        httpx.post(f"{server.url}/v1/completions", json=asked, headers=server.headers, timeout=seconds)
    except httpx.TimeoutException:
        return


def test_names_sources_and_instances_find_the_same_adapter(server, stand_in):
    by_source = text_of(server.post("/v1/completions", body(3, good(1))))
    assert text_of(server.post("/v1/completions", body(3) | {"model": "one"})) == by_source
    plain = text_of(server.post("/v1/completions", body(3)))
    others = [text_of(server.post("/v1/completions", body(3) | more)) for more in (
        {"model": "local"}, {"dynamic_lora": "test/adapter"}, {"lora_id": "hf:test/adapter"}
    )]  # fmt: skip
    assert others[1] == others[2]
    assert len({plain, by_source, *others}) == 4
    ids = [each["id"] for each in server.get("/v1/models").json()["data"]]
    assert ids[1:] == ["one", "local"]
    chats = [{"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
             for name in (ids[0], "one")]  # fmt: skip
    answers = [server.post("/v1/chat/completions", each).json() for each in chats]
    assert answers[1]["model"] == "one"
    assert answers[0]["choices"][0]["message"] != answers[1]["choices"][0]["message"]
    adapters = ({}, {"dynamic-lora": good(1)}, {"dynamic-lora": "test/adapter"}, {"dynamic-lora": ""})
    instances = [{"prompt": "hello there", "max_tokens": 8, "temperature": 0} | each for each in adapters]
    predictions = server.post("/generate", {"instances": instances}).json()["predictions"]
    assert predictions[0] == predictions[3]
    assert len({str(each) for each in predictions}) == 3


BAD: dict[str, tuple[int, str]] = {
    "rank-5": (400, "adapter_invalid"),
    "rank-0": (400, "adapter_invalid"),
    "rank-8-below-0": (400, "adapter_invalid"),
    "other-size": (400, "adapter_invalid"),
    "other-base": (400, "adapter_invalid"),
    "unknown-target": (400, "adapter_invalid"),
    "dora": (400, "adapter_invalid"),
    "modules-to-save": (400, "adapter_invalid"),
    "bias": (400, "adapter_invalid"),
    "fan-in": (400, "adapter_invalid"),
    "nan": (400, "adapter_invalid"),
    "bin-only": (400, "adapter_invalid"),
    "5-gigabytes": (400, "adapter_invalid"),
    "no-config": (400, "adapter_invalid"),
    "not-json": (400, "adapter_invalid"),
    "cut-short": (400, "adapter_invalid"),
    "not-there": (404, "adapter_not_found"),
}
FORBIDDEN = [
    "gs://adapters/secret/1",
    "gs://other/good/1",
    "gs://adapters/good/../secret/1",
    "gs://adapters/good/%2e%2e/secret/1",
    "gs://adapters/goodness/1",
    "somebody/else",
    "/etc",
    "../etc",
    "file:///etc",
    "http://127.0.0.1/adapter",
    "one two",
    "\u0000",
    "x" * 500,
]


def _write_bad(stand_in: RunningStandIn, adapters: Adapters) -> None:
    def folder(name: str) -> Path:
        return stand_in.bucket(f"adapters/bad/{name}")

    adapters.write(folder("rank-5"), 1, rank=5)
    adapters.write(folder("rank-0"), 1, r=0)
    adapters.write(folder("rank-8-below-0"), 1, r=-8)
    for name, fields in {
        "dora": {"use_dora": True},
        "modules-to-save": {"modules_to_save": ["lm_head"]},
        "bias": {"bias": "all"},
        "fan-in": {"fan_in_fan_out": True},
    }.items():
        adapters.write(folder(name), 1, **fields)
    config, first = peft_config(r=2, lora_alpha=4), next(iter(adapters.modules))
    write_adapter(folder("other-size"), config, {
        name: np.zeros((each.shape[0], each.shape[1] + 8), np.float32) for name, each in adapters.tensors(1).items()
    })  # fmt: skip
    unknown = {name.replace("layers.0", "layers.7"): each for name, each in adapters.tensors(1, names=(first,)).items()}
    write_adapter(folder("unknown-target"), config, unknown)
    poisoned = adapters.tensors(1)
    next(iter(poisoned.values()))[0, 0] = np.nan
    write_adapter(folder("nan"), config, poisoned)
    for name in ("bin-only", "no-config", "not-json", "cut-short"):
        shutil.copytree(stand_in.bucket("adapters/good/1"), folder(name), dirs_exist_ok=True)
    (folder("bin-only") / "adapter_model.safetensors").rename(folder("bin-only") / "adapter_model.bin")
    (folder("no-config") / "adapter_config.json").unlink()
    (folder("not-json") / "adapter_config.json").write_text("{,")
    weights = folder("cut-short") / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])


def _announced(name: str, sizes: dict[str, int]) -> dict:
    """What the stand-in says of objects that nobody has written."""
    objects = [
        {"name": f"bad/{name}/{file}", "size": str(size), "generation": "1", "crc32c": "AAAAAA=="}
        for file, size in sizes.items()
    ]
    return {"match": f"prefix=bad%2F{name}%2F", "body": json.dumps({"items": objects}), "times": 1000}


def test_bad_adapters_are_refused_while_others_run_undisturbed(server, stand_in):
    """F23. Those that run are of the model alone and of good adapters."""
    sizes = {"adapter_config.json": 1000, "adapter_model.safetensors": 5 * 10**9}
    stand_in.set_faults(_announced("5-gigabytes", sizes))
    rng = random.Random(1)
    bodies = [random_body(rng, 128, 320, 24) for _ in range(BESIDE)]
    for each in bodies:
        if rng.random() < 0.5:
            each["dynamic-lora"] = good(rng.randrange(40))
    before = texts(server, [body(number, good(number)) for number in range(8)], concurrency=8)

    async def both():
        running = asyncio.create_task(run_load(server.url, bodies, concurrency=32, headers=server.headers))
        refused = await asyncio.to_thread(_ask_for_bad, server)
        return await running, refused

    ledger, refused = asyncio.run(both())
    assert ledger.outcomes == {COMPLETED: BESIDE}, ledger.complaints
    expected = [(name, *BAD[name]) for name in BAD] + [(name, 403, "adapter_not_allowed") for name in FORBIDDEN]
    assert refused == expected * ROUNDS
    assert stand_in.asked_for("prefix=bad%2F5-gigabytes")
    assert not stand_in.asked_for("5-gigabytes%2Fadapter_")
    assert texts(server, [body(number, good(number)) for number in range(8)], concurrency=8) == before
    idle(server)
    served = f"{ledger.total} of {len(bodies)} requests beside them are served"
    record(
        "F23", f"{len(refused)} of {len(expected) * ROUNDS} bad adapters are answered with 400, 403 or 404; {served}"
    )


def _ask_for_bad(server: RunningServer) -> list[tuple[str, int, str]]:
    """By several callers: one who fails too often is told to wait."""
    asked = [*((name, f"gs://adapters/bad/{name}") for name in BAD), *((name, name) for name in FORBIDDEN)] * ROUNDS
    found = []
    for number, (name, source) in enumerate(asked):
        headers = {"Authorization": f"Bearer {KEYS[1 + number % (len(KEYS) - 1)]}"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body(1, source), headers=headers, timeout=60)
        error = answer.json()["error"]
        found.append((name, answer.status_code, error["code"]))
        assert error["message"], name
        assert "choices" not in answer.json()
    return found


def test_metrics_are_those_of_the_page(server):
    check_metrics(server, "--enable_lora")


def test_an_adapter_that_is_replaced_is_another_one(server, stand_in, model):
    """From some seconds after on, and those who have the old one keep it."""
    folder = stand_in.bucket("adapters/good/replaced")
    Adapters(model).write(folder, seed=1)
    first = text_of(server.post("/v1/completions", body(5, good("replaced"))))
    assert first == text_of(server.post("/v1/completions", body(5, good("replaced"))))
    Adapters(model).write(folder, seed=4321)
    for _ in range(40):
        answer = server.post("/v1/completions", body(5, good("replaced")))
        if answer.status_code == 200 and text_of(answer) != first:
            record("F23", "an adapter that is replaced while it is served is another one from then on")
            return
        asyncio.run(asyncio.sleep(0.5))
    pytest.fail("the new one never came")


def test_streams_go_on_while_adapters_come_slowly(model, stand_in, tmp_path):
    """F25. The streams are of the model alone, beside requests that wait for adapters, and then run with them."""
    adapters, names = Adapters(model), [f"slow-{number}" for number in range(WAVES * AT_A_TIME)]
    for number, name in enumerate(names):
        adapters.write(stand_in.bucket(f"adapters/good/{name}"), number, rank=4)
    size = (stand_in.bucket("adapters/good/slow-0") / "adapter_model.safetensors").stat().st_size
    wave_s = size // BYTES_A_SECOND
    stand_in.set_faults({"match": "good%2Fslow-", "bytes_a_second": BYTES_A_SECOND, "times": 10**6})

    async def gaps_beside(bodies: list[dict]) -> list[float]:
        started = time.monotonic()
        (times, streams), loads = await asyncio.gather(
            stream_for(server, wave_s + 2, STREAMS), run_load(server.url, bodies, concurrency=AT_A_TIME)
        )
        assert streams.outcomes.keys() == {COMPLETED}
        assert loads.outcomes[COMPLETED] == loads.total == len(bodies), loads.complaints
        assert not bodies or loads.last_answer > started + wave_s > started, "they came faster than they were to"
        assert max(times.first_s + times.gaps_s) < wave_s, "who decodes has waited for a download"
        return times.gaps_s

    alone, beside = [], []
    environment = stand_in.environment | AS_ON_AN_ACCELERATOR
    with running_server(model, tmp_path / "log", *SETTINGS, ALLOWED, **environment) as server:
        for wave in itertools.batched(enumerate(names), AT_A_TIME):  # by turns: others may use the machine
            alone += asyncio.run(gaps_beside([]))
            beside += asyncio.run(gaps_beside([body(number, good(name)) for number, name in wave]))
        idle(server)
    gap, gap_alone = share(beside, 0.99), share(alone, 0.99)
    assert gap < GAPS * gap_alone
    record(
        "F25",
        f"{len(names)} adapters that come at {BYTES_A_SECOND // 1000} kB/s, {AT_A_TIME} at a time: {IN_WORDS}, gaps of"
        f" {STREAMS} streams p99 {1000 * gap:.0f} ms, {1000 * gap_alone:.0f} ms without",
    )


def test_an_adapter_from_a_real_emulator_of_cloud_storage(model, tmp_path, stand_in):
    folder = Adapters(model).write(tmp_path / "adapter", seed=77)
    (folder / "README.md").write_text("not wanted")
    with running_emulator("bucket", folder, "of/one/") as url:
        settings = [*SETTINGS, "--lora_allowed_prefixes=gs://bucket/of"]
        environment = stand_in.environment | {"STORAGE_EMULATOR_HOST": url, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        with running_server(model, tmp_path / "log", *settings, **environment) as server:
            found = text_of(server.post("/v1/completions", body(3, "gs://bucket/of/one")))
            assert found != text_of(server.post("/v1/completions", body(3)))
    named = [*SETTINGS, f"--lora_modules=it={folder}"]
    with running_server(model, tmp_path / "log", *named) as server:
        assert text_of(server.post("/v1/completions", body(3) | {"model": "it"})) == found


def test_without_the_flag_no_adapter_is_served(model, tmp_path):
    with running_server(model, tmp_path / "log", "--dtype=float32") as server:
        answer = server.post("/v1/completions", body(1, good(1)))
        assert answer.status_code == 400
        assert "--enable_lora" in answer.json()["error"]["message"]


def test_a_named_adapter_that_cannot_be_served_ends_the_start(model, tmp_path):
    folder = Adapters(model).write(tmp_path / "adapter", seed=1)
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(r=99)))
    with running_server(model, tmp_path / "log", *SETTINGS, f"--lora_modules=a={folder}", ready=False) as server:
        assert server.process.wait(120) == 2
    assert "99" in (tmp_path / "log").read_text()
