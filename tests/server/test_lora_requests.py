"""Adapters as clients meet them: by which names, with which errors, and what the engine is told."""

import asyncio
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hex_llm.config import Config
from hex_llm.errors import AdapterNotFound, AdapterUnavailable, ConfigError
from hex_llm.server.adapters import AT_A_TIME, Adapters
from hex_llm.server.docs import describe_api
from tests.checkpoints import write_llama
from tests.engine.fakes import alone
from tests.lora.adapters import MODULES, Q0, peft_config, random_pairs, tensors_of, write_adapter, write_good
from tests.server.in_process import Front, WatchedStore, running_front
from tests.server.serving import wait_until

KEYS = ("dynamic-lora", "dynamic_lora", "lora_id", "lora_path")
GREEDY = {"temperature": 0, "seed": 1, "ignore_eos": True, "max_tokens": 6}
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"messages": MESSAGES, **GREEDY}
COMPLETION = {"prompt": [5, 6, 7], **GREEDY}
INSTANCE = {"prompt": "hi", **GREEDY}
CHAT_INSTANCE = {"@requestFormat": "chatCompletions", **CHAT}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/generate": INSTANCE}
FAILED_LOADS = 10


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


class Shelf:
    """Folders with adapters, all of which a store takes: `good` and `other` have names as well."""

    def __init__(self, folder: Path):
        self.good, self.other = (str(write_good(folder / name, seed)) for seed, name in enumerate(("good", "other")))
        self.bad = str(write_good(folder / "bad", rank=32))
        tensors = tensors_of(random_pairs(Q0))
        next(iter(tensors.values()))[0, 0] = np.nan
        self.nan = str(write_adapter(folder / "nan", peft_config(), tensors))
        self.many = [str(folder / f"many-{number}") for number in range(3 * AT_A_TIME)]
        for each in self.many:
            shutil.copytree(self.good, each)
        self.missing = str(folder / "missing")
        self.named = f"good={self.good},other={self.other}"
        self.store = WatchedStore(
            folder / "store", ["gs://bucket/"], [self.good, self.other, self.bad, self.nan, self.missing, *self.many]
        )


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@pytest.fixture
def server(shelf: Shelf, tokenizer: Path) -> Iterator[Front]:
    config = Config(enable_lora=True, lora_modules=shelf.named, max_num_mem_cached_lora=3, served_model_name="base,b")
    with running_front(config, tokenizer, shelf.store, ["a-key", "another-key"]) as running:
        yield running


def answer(server: Front, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(server: Front, path: str, body: dict[str, Any], status: int, *, key: str | None = None) -> dict[str, Any]:
    """What the client is told; the engine hears nothing."""
    before = len(server.requests)
    response = server.post(path, body, key=key)
    assert response.status_code == status, response.text
    assert len(server.requests) == before
    return response.json()["error"]


def test_an_engine_tells_callers_apart_by_their_keys(server: Front) -> None:
    for key in ("a-key", "another-key", "a-key"):
        for path, body in BODIES.items():
            assert server.post(path, body, key=key).status_code == 200
    first, other, last = [each.caller for each in server.requests[:: len(BODIES)]]
    assert first == last != other
    assert all(each.caller for each in server.requests)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_model_may_be_an_adapter(server: Front, shelf: Shelf, path: str) -> None:
    body = BODIES[path] | {"return_token_ids": True}
    answers = {name: answer(server, path, body | {"model": name}) for name in ("b", "good", "other")}
    assert [each["model"] for each in answers.values()] == ["b", "good", "other"]
    tokens = [each["choices"][0]["token_ids"] for each in answers.values()]
    assert tokens == [alone(request) for request in server.requests]
    assert len({*map(tuple, tokens)}) == 3
    assert [request.adapter_source for request in server.requests] == ["", shelf.good, shelf.other]
    sources = (shelf.good, shelf.other)
    assert [request.adapter for request in server.requests] == ["", *map(shelf.store.identify, sources)]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("key", KEYS)
def test_every_key_names_an_adapter_or_where_it_lies(server: Front, shelf: Shelf, path: str, key: str) -> None:
    for value in ("good", shelf.good, "", None):
        told = answer(server, path, BODIES[path] | {key: value})
        if path != "/generate":
            assert told["model"] == (value or "base")
    assert [each.adapter_source for each in server.requests] == [shelf.good, shelf.good, "", ""]
    assert len({each.adapter for each in server.requests}) == 2


def test_instances_have_adapters_of_their_own(server: Front, shelf: Shelf) -> None:
    body = {
        "instances": [INSTANCE, INSTANCE | {"lora_id": "", "dynamic-lora": "other"}, INSTANCE | {"dynamic-lora": ""}],
        "parameters": {"dynamic-lora": "good"},
    }
    assert len({*answer(server, "/generate", body)["predictions"]}) == 3
    assert [each.adapter_source for each in server.requests] == [shelf.good, shelf.other, ""]


def test_an_instance_has_its_own_adapter_or_none_whatever_it_calls_the_key(server: Front, shelf: Shelf) -> None:
    own = [{"lora_id": ""}, {"dynamic_lora": "other"}, {"lora_path": None}, {"model": "good"}]
    instances = [INSTANCE | each for each in own]
    answer(server, "/generate", {"instances": instances, "parameters": {"dynamic-lora": "good"}})
    assert [each.adapter_source for each in server.requests] == ["", shelf.other, shelf.good, shelf.good]


def test_chats_in_instances_have_adapters_too(server: Front, shelf: Shelf) -> None:
    instances = [CHAT_INSTANCE | {"lora_path": "good"}, CHAT_INSTANCE | {"model": "other"}, CHAT_INSTANCE]
    predictions = answer(server, "/generate", {"instances": instances})["predictions"]
    assert [each["model"] for each in predictions] == ["good", "other", "base"]
    assert [each.adapter_source for each in server.requests] == [shelf.good, shelf.other, ""]
    one = answer(server, "/generate", {"instances": instances[:1]})["predictions"]
    assert (one["model"], one["choices"]) == ("good", predictions[0]["choices"])


@pytest.mark.parametrize("path", BODIES)
def test_a_request_has_one_adapter(server: Front, shelf: Shelf, path: str) -> None:
    for name in ("good", shelf.good):
        answer(server, path, BODIES[path] | {"model": "good", "dynamic-lora": name})
    answer(server, path, BODIES[path] | {"model": "base", "dynamic-lora": "good"})
    assert {each.adapter_source for each in server.requests} == {shelf.good}
    for fields in ({"model": "good", "lora_id": "other"}, {"dynamic-lora": "other", "lora_id": "good"}):
        error = refusal(server, path, BODIES[path] | fields, 400)
        assert "'good'" in error["message"]
        assert "'other'" in error["message"]


def test_what_is_no_name_is_refused(server: Front) -> None:
    for value in (7, ["good"], {"name": "good"}, "x" * 1025):
        error = refusal(server, "/v1/completions", COMPLETION | {"dynamic-lora": value}, 400)
        assert error["param"] == "dynamic-lora"
    error = refusal(server, "/v1/completions", COMPLETION | {"model": "nobody"}, 404)
    assert error["code"] == "model_not_found"
    assert "base, b, good, other" in error["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("key", KEYS)
def test_without_the_flag_an_adapter_is_refused(shelf: Shelf, tokenizer: Path, path: str, key: str) -> None:
    with running_front(Config(), tokenizer, shelf.store) as server:
        error = refusal(server, path, BODIES[path] | {key: "good"}, 400)
        assert "--enable_lora" in error["message"]
        assert (error["param"], error["code"]) == (key, "unsupported_parameter")
        answer(server, path, BODIES[path] | {key: ""})
        assert not any("lora_" in name and "lora_loads" not in name for name in server.metrics())


@pytest.mark.parametrize("path", BODIES)
def test_errors_say_whose_fault_it_is(server: Front, shelf: Shelf, path: str) -> None:
    shelf.store.errors |= {
        "gs://bucket/none": AdapterNotFound("gs://bucket/none is not there."),
        "gs://bucket/slow": AdapterUnavailable("gs://bucket/slow does not answer."),
    }
    for source, status, code, says in (
        (shelf.bad, 400, "adapter_invalid", "16"),
        (shelf.nan, 400, "adapter_invalid", "NaN"),
        ("gs://others/x", 403, "adapter_not_allowed", "'gs://others/x'"),
        ("../../etc", 403, "adapter_not_allowed", "'../../etc'"),
        ("gs://bucket/\0", 403, "adapter_not_allowed", "\\x00"),
        ("gs://bucket/none", 404, "adapter_not_found", "gs://bucket/none"),
        (shelf.missing, 404, "adapter_not_found", shelf.missing),
        ("gs://bucket/slow", 503, "adapter_unavailable", "gs://bucket/slow"),
    ):
        error = refusal(server, path, BODIES[path] | {"dynamic-lora": source}, status)
        assert (error["code"], says in error["message"]) == (code, True), error
    told = server.metrics()
    assert told[f'requests_total{{outcome="rejected",route="{path}"}}'] == 7
    assert told[f'requests_total{{outcome="failed",route="{path}"}}'] == 1
    assert told['lora_loads_total{result="adapter_not_allowed"}'] == 3
    assert told['lora_loads_total{result="adapter_invalid"}'] == 2


def test_of_several_instances_the_bad_one_is_told(server: Front, shelf: Shelf) -> None:
    for instance in (INSTANCE, CHAT_INSTANCE):
        body = {"instances": [instance | {"lora_id": "good"}, instance | {"lora_id": shelf.bad}]}
        error = refusal(server, "/generate", body, 400)
        assert error["message"].startswith(f"instances[1]: The adapter '{shelf.bad[:100]}")
        assert error["param"] == "instances[1]"


def test_what_the_engine_finds_wrong_is_told_as_well(server: Front, shelf: Shelf) -> None:
    server.carrier.bad.add(shelf.store.identify(shelf.good))
    response = server.post("/v1/completions", COMPLETION | {"model": "good"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "adapter_invalid")
    answer(server, "/v1/completions", COMPLETION)


def test_who_fails_too_often_waits_and_nobody_else_does(server: Front, shelf: Shelf) -> None:
    answer(server, "/v1/completions", COMPLETION | {"model": "good"})
    for number in range(FAILED_LOADS):
        refusal(server, "/v1/completions", COMPLETION | {"lora_id": f"gs://others/{number}"}, 403)
    for source in ("gs://others/x", shelf.many[0]):
        error = refusal(server, "/v1/completions", COMPLETION | {"lora_id": source}, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "server_overloaded")
        assert f"{FAILED_LOADS} adapters" in error["message"]
    asked = shelf.store.num_identified[shelf.good]
    wait_until(lambda: answer(server, "/v1/completions", COMPLETION | {"model": "good"})
               and shelf.store.num_identified[shelf.good] > asked)  # fmt: skip
    refusal(server, "/v1/completions", COMPLETION | {"lora_id": "gs://others/x"}, 403, key="another-key")
    answered = server.post("/v1/completions", COMPLETION | {"lora_id": shelf.many[0]}, key="another-key")
    assert answered.status_code == 200


def test_requests_that_come_together_share_what_is_fetched(server: Front, shelf: Shelf) -> None:
    shelf.store.gate.clear()
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(answer, server, "/v1/completions", COMPLETION | {"model": "good"}) for _ in range(12)]
        wait_until(lambda: server.server.num_open == 12)
        answer(server, "/v1/completions", COMPLETION)  # which nothing of that holds up
        shelf.store.gate.set()
        texts = {each.result()["choices"][0]["text"] for each in asked}
    assert len(texts) == 1
    assert shelf.store.num_fetched == {shelf.good: 1}
    assert server.metrics()['lora_loads_total{result="loaded"}'] == 1


def test_not_all_are_fetched_at_a_time(server: Front, shelf: Shelf) -> None:
    shelf.store.gate.clear()
    bodies = [COMPLETION | {"dynamic-lora": source} for source in shelf.many]
    with ThreadPoolExecutor(len(bodies)) as pool:
        asked = [pool.submit(answer, server, "/v1/completions", body) for body in bodies]
        wait_until(lambda: server.server.num_open == len(bodies))
        wait_until(lambda: shelf.store.num_at_once == AT_A_TIME)
        shelf.store.gate.set()
        for each in asked:
            each.result()
    assert shelf.store.most_at_once == AT_A_TIME
    assert shelf.store.num_fetched == dict.fromkeys(shelf.many, 1)
    assert len({each.adapter for each in server.requests}) == len(bodies)


def test_who_goes_away_meanwhile_is_counted_and_the_rest_goes_on(server: Front, shelf: Shelf) -> None:
    shelf.store.gate.clear()
    with pytest.raises(httpx.ReadTimeout):
        server.post("/v1/completions", COMPLETION | {"model": "good"}, timeout=0.3)
    cancelled = 'requests_total{outcome="cancelled",route="/v1/completions"}'
    wait_until(lambda: server.metrics().get(cancelled) == 1)
    assert server.server.admission.sequences == 0
    shelf.store.gate.set()
    answer(server, "/v1/completions", COMPLETION | {"model": "good"})
    assert shelf.store.num_fetched[shelf.good] == 1


def test_who_goes_away_while_others_are_fetched_has_nothing_fetched(server: Front, shelf: Shelf) -> None:
    shelf.store.gate.clear()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        asked = [
            pool.submit(answer, server, "/v1/completions", COMPLETION | {"dynamic-lora": source})
            for source in shelf.many[:AT_A_TIME]
        ]
        wait_until(lambda: shelf.store.num_at_once == AT_A_TIME)
        with pytest.raises(httpx.ReadTimeout):
            server.post("/v1/completions", COMPLETION | {"model": "good"}, timeout=0.3)
        shelf.store.gate.set()
        for each in asked:
            each.result()
    assert shelf.store.num_fetched[shelf.good] == 0


def test_a_limit_on_time_holds_for_what_is_fetched(shelf: Shelf, tokenizer: Path) -> None:
    config = Config(enable_lora=True, lora_modules=shelf.named, request_timeout_s=0.2)
    with running_front(config, tokenizer, shelf.store) as server:
        shelf.store.gate.clear()
        error = refusal(server, "/v1/completions", COMPLETION | {"model": "good"}, 408)
        assert error["code"] == "request_timeout"


def test_an_adapter_is_looked_at_once_and_again_where_it_is_another(server: Front, shelf: Shelf) -> None:
    for _ in range(5):
        answer(server, "/v1/completions", COMPLETION | {"model": "good"})
    asked = shelf.store.num_identified[shelf.good]
    wait_until(lambda: answer(server, "/v1/completions", COMPLETION | {"model": "good"})
               and shelf.store.num_identified[shelf.good] > asked)  # fmt: skip
    assert shelf.store.num_fetched[shelf.good] == 1
    assert len({each.adapter for each in server.requests}) == 1
    write_good(Path(shelf.good), seed=7)
    wait_until(lambda: answer(server, "/v1/completions", COMPLETION | {"model": "good"})
               and server.requests[-1].adapter != server.requests[0].adapter)  # fmt: skip
    assert shelf.store.num_fetched[shelf.good] == 2
    (Path(shelf.good) / "adapter_config.json").write_text("{")
    wait_until(lambda: server.post("/v1/completions", COMPLETION | {"model": "good"}).status_code == 400)


def test_models_are_those_of_vllm(server: Front, shelf: Shelf) -> None:
    models = server.get("/v1/models").json()["data"]
    shown = [(model["id"], model["root"], model["parent"]) for model in models]
    assert shown == [("base", "base", None), ("b", "base", None), ("good", shelf.good, "base"),
                     ("other", shelf.other, "base")]  # fmt: skip
    for model in models:
        assert server.get(f"/v1/models/{model['id']}").json() == model
    assert server.get("/v1/models/third").status_code == 404


def test_places_on_the_device_are_told(server: Front, shelf: Shelf) -> None:
    for source in (shelf.good, *shelf.many[:3]):
        answer(server, "/v1/completions", COMPLETION | {"dynamic-lora": source})
    slots = {state: server.metrics()[f'lora_slots{{state="{state}"}}'] for state in ("free", "used", "cached")}
    assert slots == {"free": 0, "used": 0, "cached": 3}
    told = server.metrics()
    assert told['lora_slot_loads_total{model_name="base"}'] == 4
    assert told['lora_slot_evictions_total{model_name="base"}'] == 1
    assert told['num_loras_loading{model_name="base"}'] == 0


def test_the_log_tells_which_adapter_it_was(server: Front, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hex_llm.server.request_log"):
        instances = [INSTANCE | {"lora_id": name} for name in ("good", "other", "good", "")]
        answer(server, "/generate", {"instances": instances})
        answer(server, "/generate", INSTANCE)
        wait_until(lambda: len(caplog.messages) == 2)
    digits = [each.adapter[:12] for each in server.requests[:2]]
    assert f" adapter={','.join(digits)} " in caplog.messages[0]
    assert "adapter=" not in caplog.messages[1]


def test_adapters_that_have_names_are_looked_at_before_anybody_is_served(shelf: Shelf) -> None:
    def check(modules: str) -> None:
        config = Config(enable_lora=True, lora_modules=modules)

        async def run() -> None:
            await Adapters(config, shelf.store, MODULES, lambda result: None).check_named()

        asyncio.run(run())

    check(shelf.named)
    assert shelf.store.num_fetched == {shelf.good: 1, shelf.other: 1}
    for source, says in ((shelf.bad, "16"), (shelf.missing, "no folder"), ("gs://others/x", "prefixes")):
        with pytest.raises(ConfigError, match=f"^--lora_modules: it={source} cannot be served: .*{says}"):
            check(f"{shelf.named},it={source}")


def test_the_schema_has_the_keys() -> None:
    for config, values in (
        (Config(), {"enum": [""]}),
        (Config(enable_lora=True), {"type": "string", "minLength": 0, "maxLength": 1024}),
    ):
        paths = describe_api(config)["paths"]
        for path in ("/v1/chat/completions", "/v1/completions"):
            schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert all(schema["properties"][key]["anyOf"][0] == values for key in KEYS)
        _, instance, _ = paths["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]["anyOf"]
        assert all(instance["properties"][key]["anyOf"][0] == values for key in KEYS)
