"""Blocks that leave the KV cache and come into another, on one device; parity/test_moved_blocks.py has several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm import build
from hex_llm.config import Config
from hex_llm.engine.handover import PARTS_IN_FLIGHT
from hex_llm.engine.request import SamplingParams
from hex_llm.errors import ConfigError, OutOfMemory
from hex_llm.parallel.mesh import make_mesh
from hex_llm.runner.memory import Memory, Needs, Share, plan_blocks
from hex_llm.runner.pages import MOST_BLOCKS, part_counts
from hex_llm.runner.programs import CopyIn, CopyOut, all_programs
from tests.checkpoints import write_llama
from tests.runner.blocks_between import bits, fill, problems, random_cache
from tests.runner.engines import SMALL, make_copying_engine, make_engine, run, tokens

MIB = 2**20
INT8 = {"kv_cache_dtype": "int8"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runner(folder):
    return make_copying_engine(folder, dtype="float32")._runner


@pytest.mark.parametrize("flags", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, INT8])
def test_blocks_arrive_in_another_engine_as_they_were_and_the_others_stay(folder, flags):
    source, target = (make_copying_engine(folder, **flags)._runner for _ in range(2))
    assert problems(source, target) == []


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_a_request_goes_on_in_another_engine_from_the_blocks_of_the_first(folder, kv_cache_dtype):
    flags = {
        "kv_cache_dtype": kv_cache_dtype,
        "enable_chunked_prefill": True,
        "enable_prefix_cache_hbm": True,
        "max_prefill_seqs": 2,
    }
    first, second = (make_copying_engine(folder, **flags) for _ in range(2))
    prompt = np.random.default_rng(3).integers(3, 320, 41).tolist()  # five blocks, and a token to go on from
    asked = (prompt, SamplingParams(temperature=0, max_tokens=8))
    (expected,) = run(first, asked)
    pool = second._scheduler.pool
    keys, blocks = zip(*first._scheduler.pool._block.items(), strict=True)
    places = pool.allocate(len(blocks))[::-1]
    second._runner.copy_in(places, first._runner.copy_out(blocks))
    for place, key in zip(places, keys, strict=True):
        pool.remember(place, key)
    pool.release(places, after=0)
    pool.reclaim(0)
    (got,) = run(second, asked)
    assert second.stats().total_prefix_hits == 40
    assert tokens(got) == tokens(expected)


def test_a_block_that_a_request_has_no_longer_is_written_nowhere(runner):
    cache = random_cache(runner, np.random.default_rng(1))
    fill(runner, cache)
    runner.copy_in([0, 5, 0], runner.copy_out([7, 8, 9]))
    expected = cache[0].copy()
    expected[5] = cache[0][8]
    assert bits(runner._kv[0]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("blocks", [[65], [-1], [3, 10**6]])
def test_a_block_that_is_not_there_is_noticed_on_the_host(runner, blocks):
    with pytest.raises(AssertionError, match="pages"):
        runner.copy_out(blocks)
    with pytest.raises(AssertionError, match="pages"):
        runner.copy_in(blocks, runner.copy_out([1] * len(blocks)))


def test_two_blocks_for_one_place_are_noticed_on_the_host(runner):
    with pytest.raises(AssertionError, match="one place"):
        runner.copy_in([4, 4], runner.copy_out([1, 2]))


def test_a_copy_of_another_shape_is_noticed_on_the_host(runner):
    with pytest.raises(AssertionError, match="another model"):
        runner.copy_in([4, 5], runner.copy_out([1])[:, :, :, :2])


@pytest.mark.parametrize(
    ("block_bytes", "sequence_blocks", "counts"),
    [
        (4 * MIB, 4096, (1, 4, 16)),  # Llama 3.1 8B
        (1024 * MIB, 16, (1,)),  # more than a part should have, and yet there is no less than a block
        (1, 10**6, (1, 4, 16, 64, MOST_BLOCKS)),
        (1, 12, (1, 4, 16)),  # no sequence has more
        (1, 16, (1, 4, 16)),
        (1, 1, (1,)),
    ],
)
def test_copies_are_compiled_for_few_numbers_of_blocks(block_bytes, sequence_blocks, counts):
    assert part_counts(block_bytes, sequence_blocks) == counts


def test_copying_in_works_on_the_cache_where_it_is_and_copying_out_needs_no_more_than_the_copy(runner):
    kv = sum(pages.nbytes for pages in runner._kv)
    for count in runner.staging.counts:
        analysis = {each: runner._compiler.get(each(count)).memory_analysis() for each in (CopyIn, CopyOut)}
        part = runner.copy_out(range(count)).nbytes
        assert analysis[CopyIn].alias_size_in_bytes == kv
        assert analysis[CopyIn].temp_size_in_bytes < part + 4096
        assert analysis[CopyOut].alias_size_in_bytes == 0
        assert analysis[CopyOut].temp_size_in_bytes < part + 4096


def test_after_warm_up_nothing_is_compiled_to_copy_blocks(folder):
    runner = make_copying_engine(folder, warmup=True, dtype="float32")._runner
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    jax.jit(lambda x: x + 2)(jnp.ones(11, jnp.float32))
    assert compiled, "the listener hears of compilations"
    compiled.clear()
    for size in range(1, runner.part_blocks + 1):
        blocks = list(range(1, 1 + size))
        copy = runner.copy_out(blocks)
        runner.copy_in(blocks, copy)
        runner.copy_in(blocks, np.asarray(copy))
    assert not compiled


def test_every_copying_program_is_rehearsed_and_leaves_no_trace(runner, monkeypatch):
    cache = random_cache(runner, np.random.default_rng(2))
    fill(runner, cache)
    buckets, get, ran = runner._packer._buckets, runner._compiler.get, []
    monkeypatch.setattr(runner._compiler, "get", lambda each: (ran.append(each), get(each))[1])
    runner.rehearse(buckets)
    assert {*ran} == {*all_programs(buckets, runner.staging.counts)}
    assert {CopyOut(16), CopyIn(16)} <= {*ran}
    assert bits(runner._kv[0])[1:].tobytes() == cache[0][1:].tobytes()


def test_an_engine_that_hands_nothing_over_copies_nothing(folder):
    runner = make_engine(folder)._runner
    assert runner.part_blocks == 0
    assert not any(isinstance(each, CopyOut | CopyIn) for each in all_programs(runner._packer._buckets))


def test_memory_is_planned_for_parts_on_their_way_out_and_in(folder):
    def needs(topology: str | None) -> Needs:
        config = Config(model=str(folder), **SMALL)
        object.__setattr__(config, "disagg_topo", topology)
        model, mesh = build.find_model(config), make_mesh(1)
        buckets = build.make_buckets(config, model, mesh)
        return build.plan_memory(config, model, mesh, buckets, Memory(2**30, 0)).needs

    plain, copying = needs(None), needs("1,1")
    assert plain.staging == 0
    assert copying.staging == 2 * PARTS_IN_FLIGHT * 16 * copying.block  # 12 blocks are the longest sequence
    share = Share(of_free=1.0)
    room = Memory(copying.fixed + 14 * copying.block, 0)
    assert plan_blocks(room, copying, share, max_model_len=96, block_size=8) == 14
    with pytest.raises(OutOfMemory, match="copies of blocks on their way"):
        plan_blocks(Memory(room.total - 2 * copying.block, 0), copying, share, max_model_len=96, block_size=8)


def test_an_engine_of_several_hosts_is_refused(folder, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"--disagg_topo=1,1 .* 2"):
        make_copying_engine(folder)
