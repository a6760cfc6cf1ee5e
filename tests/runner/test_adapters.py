"""Adapters in a real engine: requests of many share steps with each other and with the model alone, and each is
answered as by a model with the adapter merged into its weights."""

import itertools
import queue
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hex_llm.build import adapters_of, build_engine, find_model
from hex_llm.config import Config
from hex_llm.engine.admission import new_request
from hex_llm.engine.carrier import AdapterLost, FromCarrier
from hex_llm.engine.sampling import SamplingParams
from hex_llm.errors import AdapterNotAllowed, RequestError
from hex_llm.llm import LLM
from hex_llm.lora.adapter import open_adapter
from hex_llm.lora.open_store import open_store
from hex_llm.runner import adapter_carrier
from hex_llm.runner.packed_adapter import PackedAdapter
from tests.checkpoints import write_llama
from tests.lora.adapters import peft_config, random_pairs, tensors_of, write_adapter
from tests.runner.engines import SMALL, make_engine, run, tokens

NUM_ADAPTERS, NUM_SLOTS, MAX_RANK = 7, 3, 8
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[5 + number, 9, 7, 11 * number + 4, 6] * (1 + number % 3) for number in range(4)]


class Engines:
    """An engine with adapters, and what brings them."""

    def __init__(self, folder: Path, sources: dict[str, str], **flags):
        modules = ",".join(f"{name}={source}" for name, source in sources.items())
        self.config = Config(
            model=str(folder),
            enable_lora=True,
            max_lora_rank=MAX_RANK,
            max_num_mem_cached_lora=NUM_SLOTS,
            lora_modules=modules,
            **SMALL | flags,
        )
        self.inbox: queue.SimpleQueue[FromCarrier] = queue.SimpleQueue()
        self.engine = build_engine(self.config, find_model(self.config), hear=self.inbox.put)
        self.store = open_store(self.config)
        self.lost: list[AdapterLost] = []

    def run(self, *asked: tuple[list[int], str]) -> list[list[int]]:
        """The tokens of requests that are under way together: prompts, and the sources of their adapters."""
        engine, found = self.engine, {}
        for number, (prompt, source) in enumerate(asked):
            adapter = self.store.identify(source) if source else ""
            request = new_request(
                f"{number}", prompt, GREEDY, engine.limits, end_ids=(), adapter=adapter, adapter_source=source
            )
            engine.add(request)
            found[request.id] = []
        while not engine.is_idle:
            for output in engine.step() if engine.has_work else ():
                found[output.request_id] += output.tokens
            while engine.is_stuck or not self.inbox.empty():
                message = self.inbox.get(timeout=30)
                engine.hear(message)
                self.lost += [message] if isinstance(message, AdapterLost) else []
                engine.is_stuck = False
        engine.check()
        return list(found.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def sources(folder, tmp_path_factory) -> dict[str, str]:
    """Of ranks from 1 on, each of some of the modules."""
    home, modules = tmp_path_factory.mktemp("adapters"), adapters_of(find_model(Config(model=str(folder), **SMALL)))
    made = {}
    for number in range(NUM_ADAPTERS):
        rank = 1 + number
        pairs = random_pairs(*list(modules)[number:], rank=rank, modules=modules, seed=number)
        small = {name: (0.3 * a, 0.3 * b) for name, (a, b) in pairs.items()}
        config = peft_config(r=rank, lora_alpha=2 * rank)
        made[f"a{number}"] = str(write_adapter(home / f"a{number}", config, tensors_of(small)))
    return made


def merged(folder: Path, source: str, target: Path) -> Path:
    """The model with an adapter in its weights."""
    shutil.copytree(folder, target)
    weights, pairs = load_file(folder / "model.safetensors"), load_file(Path(source) / "adapter_model.safetensors")
    for name, a in pairs.items():
        if ".lora_A." in name:
            own = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[own] = (weights[own] + 2 * pairs[name.replace("lora_A", "lora_B")] @ a).astype(np.float32)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture(scope="module")
def engines(folder, sources) -> Engines:
    return Engines(folder, sources, dtype="float32", enable_chunked_prefill=True, enable_prefix_cache_hbm=True)


@pytest.fixture(scope="module")
def alone(folder, sources, tmp_path_factory) -> dict[str, list[list[int]]]:
    """What engines of merged models answer, by source."""
    home, found = tmp_path_factory.mktemp("merged"), {}
    for name, source in {"": "", **sources}.items():
        own = merged(folder, source, home / name) if source else folder
        asked = [(prompt, GREEDY) for prompt in PROMPTS]
        found[source] = [tokens(each) for each in run(make_engine(own, dtype="float32"), *asked)]
    return found


def test_adapters_and_the_model_alone_share_steps_and_are_answered_as_if_merged(engines, sources, alone):
    """More adapters than slots, so that some wait for others to end, twice over."""
    assert len({str(each) for each in alone.values()}) == NUM_ADAPTERS + 1, "adapters that change nothing test nothing"
    asked = [(prompt, source, place) for place, prompt in enumerate(PROMPTS) for source in ("", *sources.values())]
    for _ in range(2):
        found = engines.run(*((prompt, source) for prompt, source, _ in asked))
        assert found == [alone[source][place] for _, source, place in asked]
    stats = engines.engine.stats()
    assert stats.total_adapter_loads >= NUM_ADAPTERS
    assert stats.total_adapter_evictions >= NUM_ADAPTERS - NUM_SLOTS


def test_steps_without_adapters_run_the_programs_without(engines):
    runner, ran = engines.engine._runner, []
    get = runner._compiler.get
    runner._compiler.get = lambda program: ran.append(program) or get(program)
    try:
        engines.run((PROMPTS[0], ""))
        assert ran
        assert not any(getattr(program, "adapted", False) for program in ran)
    finally:
        runner._compiler.get = get


def test_an_adapter_is_sent_to_the_device_when_the_one_before_is_in_its_place(engines, monkeypatch):
    """As the memory plan has it, however slow the device is."""
    runner, sent = engines.engine._runner, []

    def in_place() -> bool:
        return all(array.is_ready() for array in jax.tree.leaves(runner._pairs))

    @jax.jit
    def slowly(array: jax.Array) -> jax.Array:
        one = jnp.eye(512, dtype=array.dtype)
        late = jax.lax.fori_loop(0, 50, lambda _, each: each @ one, one)
        return array * late[0, 0]

    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *given: sent.append(in_place()) or put(*given))
    runner._pairs = jax.tree.map(slowly, runner._pairs)
    assert not in_place()
    nothing = runner._compiler.programs.adapter
    runner.load_adapter(1, PackedAdapter(np.zeros(nothing.shape, nothing.dtype)))
    assert sent == [True]


def test_an_adapter_that_is_gone_costs_its_own_requests_only(folder, sources, alone, tmp_path):
    bad = tmp_path / "bad"
    shutil.copytree(sources["a1"], bad)
    engines = Engines(folder, sources | {"bad": str(bad)}, dtype="float32")
    identity = engines.store.identify(str(bad))
    (bad / "adapter_config.json").write_text("{}")
    engines.store.identify = lambda source, ask=engines.store.identify: identity if source == str(bad) else ask(source)
    found = engines.run((PROMPTS[0], sources["a2"]), (PROMPTS[1], str(bad)), (PROMPTS[2], ""))
    assert found == [alone[sources["a2"]][0], [], alone[""][2]]
    (lost,) = engines.lost
    assert (lost.identity, lost.status) == (identity, 503)
    assert "another adapter" in lost.message


def test_answers_under_way_go_on_while_adapters_are_read(folder, sources, alone, monkeypatch):
    """Each takes two seconds here; no two tokens of others are as much as half of that apart."""
    engines = Engines(folder, sources, dtype="float32")
    engine, limits = engines.engine, engines.engine.limits

    def load_beside_another(*adapters: str) -> list[float]:
        """When that one's tokens came, of one answer after the other."""
        named = [
            new_request(each, PROMPTS[0], GREEDY, limits, adapter=engines.store.identify(each), adapter_source=each)
            for each in adapters
        ]
        times = []
        while not all(request.finish_reason for request in named):
            base = new_request("base", PROMPTS[1], GREEDY, limits)
            engine.add(base)
            while base.finish_reason is None:
                times += [time.monotonic() for output in engine.step() if output.request_id == base.id]
                while not engines.inbox.empty():
                    engine.hear(engines.inbox.get())
                if len(times) == 2:
                    for request in named:
                        engine.add(request)
        assert [request.output for request in named] == [alone[request.adapter_source][0] for request in named]
        return times

    first, second, third, *_ = sources.values()
    load_beside_another(first)  # by which all is compiled
    monkeypatch.setattr(adapter_carrier, "open_adapter", lambda *given: time.sleep(2) or open_adapter(*given))
    times = load_beside_another(second, third)
    assert times[-1] - times[0] > 2
    assert max(after - before for before, after in itertools.pairwise(times)) < 1


@pytest.mark.parametrize("flags", [{"kv_cache_dtype": "int8"}, {"async_scheduling": False}, {"quantization": "int8"}])
def test_other_settings_make_no_difference_between_alone_and_together(folder, sources, flags):
    engines = Engines(folder, sources, **{"dtype": "float32"} | flags)
    asked = [(prompt, source) for prompt in PROMPTS[:2] for source in ("", *sources.values())]
    together = engines.run(*asked)
    assert together == [answer for each in asked for answer in engines.run(each)]
    assert len({str(each) for each in together}) > NUM_ADAPTERS


def test_without_a_server_prompts_name_adapters_too(folder, sources, alone):
    flags = SMALL | {"dtype": "float32", "max_lora_rank": MAX_RANK, "lora_modules": f"named={sources['a1']}"}
    llm = LLM(str(folder), enable_lora=True, **flags)
    results = llm.generate(PROMPTS[:2], GREEDY, adapter=["named", ""])
    assert [each.outputs[0].token_ids for each in results] == [alone[sources["a1"]][0], alone[""][1]]
    with pytest.raises(AdapterNotAllowed, match="neither an adapter that the server was started with"):
        llm.generate(PROMPTS[0], GREEDY, adapter=sources["a2"])
    with pytest.raises(RequestError, match="There are 2 prompts and 1 adapters"):
        llm.generate(PROMPTS[:2], GREEDY, adapter=["named"])
    plain = LLM(str(folder), dtype="float32", **SMALL)
    with pytest.raises(RequestError, match="adapter='named' needs enable_lora=True"):
        plain.generate(PROMPTS[0], GREEDY, adapter="named")


def test_an_engine_that_nobody_brings_adapters_serves_the_model_and_refuses_the_rest(folder, alone):
    engine = make_engine(folder, dtype="float32", enable_lora=True, max_num_mem_cached_lora=NUM_SLOTS)
    (found,) = run(engine, (PROMPTS[0], GREEDY))
    assert tokens(found) == alone[""][0]
    with pytest.raises(RequestError, match="adapters are not served here"):
        new_request("x", PROMPTS[0], GREEDY, engine.limits, end_ids=(), adapter="a", adapter_source="gs://a/b")
