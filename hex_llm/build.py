"""From settings to a running engine: the only place that knows all the parts."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from hex_llm.catalog.entry import Entry, config_of
from hex_llm.config import DEFAULT_DECODE_PADDING, Config
from hex_llm.engine.carrier import FromCarrier
from hex_llm.engine.engine import Engine
from hex_llm.engine.handover import PARTS_IN_FLIGHT, Porter
from hex_llm.engine.limits import Limits, most_blocks
from hex_llm.engine.wire import Facts
from hex_llm.errors import ConfigError
from hex_llm.kernels.quant_matmul.weight import W4A8_COLUMNS
from hex_llm.kernels.window import Window
from hex_llm.loader.adapters import Pair, pack_adapter
from hex_llm.loader.config_json import ModelConfig, parse_config, read_config
from hex_llm.loader.contents import check_checkpoint
from hex_llm.loader.dummy import dummy
from hex_llm.loader.model_checkpoint import open_model
from hex_llm.loader.weights import load
from hex_llm.lora.open_store import open_store
from hex_llm.models.abstract import abstract, bytes_per_device
from hex_llm.models.adapters import Room, abstract_pairs, adaptable
from hex_llm.models.arch import Arch, Kind
from hex_llm.models.few_bits import Quantization, codings, in_units, kept
from hex_llm.models.registry import family
from hex_llm.models.split import Split
from hex_llm.models.weights import build, specs
from hex_llm.parallel.backend import backend
from hex_llm.parallel.hosts import least_of_hosts
from hex_llm.parallel.mesh import make_mesh
from hex_llm.quantization.method import Method
from hex_llm.quantization.narrow_tokens import NarrowTokens
from hex_llm.quantization.online import online
from hex_llm.runner.adapter_carrier import AdapterCarrier
from hex_llm.runner.buckets import SEPARATE, TOGETHER, Buckets
from hex_llm.runner.cache_folder import use_cache
from hex_llm.runner.compiler import Compiler, DoesNotFit
from hex_llm.runner.device_memory import asking, reach
from hex_llm.runner.followers import Followers
from hex_llm.runner.kernel_checks import check_attention, check_products
from hex_llm.runner.layout import Shapes
from hex_llm.runner.memory import Memory, Needs, Share, less_than_planned, plan_blocks
from hex_llm.runner.packed_adapter import PackedAdapter
from hex_llm.runner.pages import Staging
from hex_llm.runner.programs import (
    Program,
    Programs,
    ScorePrompt,
    all_programs,
    choosing_programs,
    copying_programs,
    forward_programs,
)
from hex_llm.runner.runner import DeviceRunner
from hex_llm.runner.xla_options import prepare_environment
from hex_llm.source import model_source, tokenizer_folder

if TYPE_CHECKING:
    from hex_llm.download.shards import Shards

logger = logging.getLogger(__name__)

# Told what is being done and the share of it that is, from any thread. The phases of a start, in order: DOWNLOADING,
# PLANNING, WEIGHTS, KV_CACHE, COMPILING. A step that has to be compiled later is COMPILING again, from 0 to 1.
type Report = Callable[[str, float], None]

DOWNLOADING = "downloading the model"
PLANNING = "planning memory"
WEIGHTS = "loading weights"
KV_CACHE = "allocating the KV cache"
COMPILING = "compiling"

# Tokens of a step with prompts, where no flag says: enough to fill a device, few enough to answer others in between.
CHUNKED_STEP_TOKENS = 2048
WHOLE_STEP_TOKENS = 8192
# The same where blocks go on to another engine, step by step: one is carried off while the next is computed.
HANDED_STEP_TOKENS = 1024
# The same of a GPU's step that also decodes: its answers come as fast as such steps do, and what prompts cost beside
# decodes, which read the weights anyway, is the least in small portions (docs/performance.md).
GPU_MIXED_TOKENS = 512
# Weights of a model so small that, on a CPU, a start waits longer for a bucket than all requests do for its lack.
SMALL_MODEL = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the settings want it: where its files are, and its numbers."""

    name: str
    files: "Path | Shards | None"  # None: it has none, and gets dummy weights
    arch: Arch
    dtype: Any
    max_model_len: int
    quantization: Quantization | None = None

    def abstract(self, mesh: jax.sharding.Mesh) -> Any:
        """Its weights, with shapes in place of arrays."""
        return abstract(family(self.arch).weights, self.arch, mesh, self.dtype, self.quantization)


def _tell_nobody(phase: str, share: float) -> None:
    pass


def find_model(config: Config, report: Report = _tell_nobody) -> Model:
    """Its files are on this machine then, or it is known that they come while they are loaded."""
    prepare_environment()
    source = model_source(config, partial(report, DOWNLOADING))
    if isinstance(source, Entry):
        logger.info(
            "%s has no files here: its numbers are the catalog's, its weights random, its tokenizer that of %s%s.",
            source.name,
            tokenizer_folder(config).name,
            "" if config.tokenizer else ", which has no text for most of the tokens",
        )
        found, files = parse_config(config_of(source), source.name), None
    else:
        found, files = read_config(source if isinstance(source, Path) else source.folder), source
    max_model_len = config.model_len(found.arch.max_position)
    quantization = _quantization(config, found)
    arch = _with_windows(found.arch, config.sliding_window, max_model_len)
    arch = in_units(arch, quantization, config.tensor_parallel_size)
    if config.quantization == "w4a8":
        _check_narrow(arch, config.tensor_parallel_size, found.quantization, quantization)
    return Model(_name(config, source), files, arch, _dtype(config, found), max_model_len, quantization)


def _name(config: Config, source: "Path | Shards | Entry") -> str:
    """That of its folder, unless it is elsewhere: that of the folder it is downloaded to says nothing."""
    if isinstance(source, Entry) or (isinstance(source, Path) and Path(config.model or source) == source):
        return source.name
    return str(config.model)


def _with_windows(arch: Arch, wanted: int | None, max_model_len: int) -> Arch:
    """The model with the window that a flag asks for, and without those that no sequence reaches the end of."""

    def window(kind: Kind) -> Window | None:
        own = kind.window if wanted is None else Window(wanted)
        return None if own is None or own.size >= max_model_len else own

    return dataclasses.replace(arch, kinds=tuple(dataclasses.replace(kind, window=window(kind)) for kind in arch.kinds))


def build_engine(
    config: Config,
    model: Model,
    report: Report = _tell_nobody,
    followers: Followers | None = None,
    make_porter: Callable[[Staging], Porter] | None = None,
    devices: Sequence[int] | None = None,
    hear: Callable[[FromCarrier], None] | None = None,
) -> Engine:
    """Other hosts, where there are any, are `followers`, and are told of every step; where there are other engines that
    requests are handed over to or taken over from, `make_porter` makes what carries them. `devices` are the engine's,
    by number, of all that this process sees; without them, it has the first ones. `hear` passes what brings adapters
    says on to the engine, from any thread; where nobody does, there are none.
    """
    runner, limits = build_runner(config, model, report, followers, devices)
    porter = make_porter(runner.staging) if make_porter is not None else None
    carrier = None
    if hear is None:
        limits = dataclasses.replace(limits, num_adapters=0)
    elif config.enable_lora:
        carrier = _carrier(config, model, runner, hear)
    in_flight = 1 if config.async_scheduling else 0
    rebuilds = config.oom_policy == "rebuild" and followers is None  # which are not told of it
    return Engine(runner, limits, max_in_flight=in_flight, rebuilds=rebuilds, porter=porter, carrier=carrier)


def _carrier(config: Config, model: Model, runner: DeviceRunner, hear: Callable[[FromCarrier], None]) -> AdapterCarrier:
    weights, room = family(model.arch).weights, adapter_room(config)

    def pack(pairs: Mapping[str, Pair]) -> PackedAdapter:
        size = config.tensor_parallel_size
        return runner.stage(pack_adapter(weights, model.arch, size, model.dtype, room, pairs))

    most = 2 * room.slots if config.enable_lora_cache else 0
    return AdapterCarrier(open_store(config), adapters_of(model), room.rank, pack, hear, kept=most)


def adapters_of(model: Model) -> dict[str, tuple[int, int]]:
    """The modules that adapters can change, with the numbers that go in and come out of each."""
    return adaptable(family(model.arch).weights, model.arch)


def facts_of(model: Model) -> Facts:
    """What a card of the model says. Weights are counted as the model has them, in however few bits they are kept."""
    way = model.quantization.name.removeprefix("--quantization=") if model.quantization else None
    whole = Split(model.arch, 1)
    sizes: list[int] = []
    build(family(model.arch).weights, model.arch, lambda spec: sizes.append(math.prod(spec.shape(whole))))
    return Facts(model.arch.architecture, sum(sizes), way)


def build_runner(
    config: Config,
    model: Model,
    report: Report = _tell_nobody,
    followers: Followers | None = None,
    devices: Sequence[int] | None = None,
) -> tuple[DeviceRunner, Limits]:
    """Plans memory, compiles, loads: whatever cannot work fails before anything large is allocated."""
    started = time.monotonic()
    if config.disagg_topo is not None and jax.process_count() > 1:
        raise ConfigError(
            f"--disagg_topo={config.disagg_topo} needs engines of one host each, and this one is on"
            f" {jax.process_count()}: the copying of blocks is not told to other hosts."
        )
    use_cache(config.compilation_cache, config.cache_folder)
    own = None if devices is None else [each for number, each in enumerate(jax.devices()) if number in devices]
    mesh = make_mesh(config.tensor_parallel_size, own)
    logger.info(
        "Loading %s: %s, %d layers, %s%s, on %s%s.",
        model.name,
        model.arch.architecture,
        model.arch.num_layers,
        model.dtype,
        "" if model.quantization is None else f" with {model.quantization.name}",
        f"{mesh.size} x " if mesh.size > 1 else "",
        mesh.devices.flat[0].device_kind,
    )
    load_weights = _weights(config, model, mesh, partial(report, WEIGHTS))
    buckets = make_buckets(config, model, mesh)
    memory = Memory.of(mesh.local_devices)
    plan = plan_memory(config, model, mesh, buckets, memory, report)
    compiler, needs = plan.compiler, plan.needs
    limits = _limits(config, model, compiler.programs.shapes.num_pages)
    # Made on the device, and at once: a GPU's compiler, which comes next, finds out there which matmul is the fastest.
    at_once = config.load_format == "dummy" and backend() == "gpu"
    weights = None
    if at_once:
        with _phase(f"Made {_size(needs.weights)} of random weights", partial(report, WEIGHTS)), plan.holding():
            weights = jax.block_until_ready(load_weights())
    else:
        report(WEIGHTS, 0.0)
    programs = all_programs(buckets, compiler.programs.staging.counts, adapters=config.enable_lora)
    with compiler.warm_up(programs) if config.warmup and config.enable_jit else nullcontext():
        with plan.holding():
            reach("device.weights")
            weights = weights or load_weights()
        report(WEIGHTS, 1.0)
        kept = f"the KV cache of {limits.kv_tokens} tokens in {compiler.programs.dtype}"
        with _phase(f"Allocated {kept}", partial(report, KV_CACHE)), plan.holding():
            reach("device.kv")
            runner = DeviceRunner(weights, buckets, compiler, followers)
    if config.warmup and config.enable_jit and backend() != "cpu":
        with plan.holding():
            runner.rehearse(buckets)
    logger.info(
        "Engine built in %.1f s: %s weights, KV cache of %d tokens (%.2f GiB)%s, room for %.1f sequences of %d tokens.",
        time.monotonic() - started,
        _size(needs.weights),
        limits.kv_tokens,
        limits.num_blocks * needs.block / 2**30,
        f", {_size(used)} of a device in use" if (used := Memory.of(mesh.local_devices).used) else "",
        (limits.num_blocks - 1) / limits.most_blocks,
        model.max_model_len,
    )
    return runner, limits


@contextmanager
def _phase(done: str, report: Callable[[float], None]) -> Iterator[None]:
    started = time.monotonic()
    report(0.0)
    yield
    report(1.0)
    logger.info("%s in %.1f s.", done, time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the devices' memory goes to."""

    compiler: Compiler  # of programs for as many KV blocks as there are to be
    memory: Memory
    needs: Needs
    measured: Compiler  # that has the largest programs compiled, where that was done

    def holding(self) -> AbstractContextManager[None]:
        """Refuses to go on where there is less memory than was planned with: others may have taken of it."""
        num_blocks = self.compiler.programs.shapes.num_pages
        return asking(lambda said: less_than_planned(self.memory, self.needs, num_blocks, said))


def plan_memory(
    config: Config,
    model: Model,
    mesh: jax.sharding.Mesh,
    buckets: Buckets,
    memory: Memory,
    report: Report = _tell_nobody,
) -> Plan:
    """How many KV blocks there are, which is a part of every compiled shape, and what the memory goes to."""
    params = model.abstract(mesh)
    lowered = config.cache_folder and config.cache_folder / "lowered"
    pairs = _pairs(config, model, mesh)

    def compiler_for(num_pages: int) -> Compiler:
        shapes, transfers = _shapes(config, model, buckets, num_pages), config.disagg_topo is not None
        programs = Programs(model.arch, shapes, params, _kv_dtype(config, model), mesh, transfers, pairs)
        return Compiler(programs, folder=lowered, jit=config.enable_jit, report=partial(report, COMPILING))

    def fill(needs: Needs) -> int:
        blocks = plan_blocks(
            memory,
            needs,
            Share(config.hbm_utilization_factor, config.gpu_memory_utilization),
            max_model_len=model.max_model_len,
            block_size=config.block_size,
            least_blocks=_sequence_blocks(config, model),
            most_blocks=_usable_blocks(config, model),
            num_blocks=config.num_blocks,
        )
        return least_of_hosts(blocks)  # all have the same shapes

    one_page = compiler_for(1).programs
    check_attention(one_page, max(bucket.tokens for bucket in buckets.largest()))
    check_products(one_page)
    needs = Needs(
        weights=bytes_per_device(params),
        state=_bytes((one_page.slots, one_page.history)),
        temporaries=0,
        block=_bytes(one_page.kv),
        adapters=_bytes((pairs, one_page.adapter)) if pairs is not None else 0,
        # At most: parts that are on their way out, and those copied before anybody asks. Fewer come in at a time.
        staging=2 * PARTS_IN_FLIGHT * max(_bytes(one_page.staged(n)) for n in (0, *one_page.staging.counts)),
    )
    compiler = measured = compiler_for(fill(needs))
    # Where the device's memory is its own, a step that does not fit must show now, warm-up or not.
    if config.enable_jit and (config.warmup or memory.kv_limit is None):
        with _phase("Planned memory, with the largest steps compiled,", partial(report, PLANNING)):
            try:
                temporaries = _temporaries(measured, buckets)
            except DoesNotFit:  # beside so many blocks, says a compiler that knows how large the device is
                measured = compiler_for(_sequence_blocks(config, model) + 1)
                temporaries = _temporaries(measured, buckets)
        needs = dataclasses.replace(needs, temporaries=temporaries)
        if fill(needs) != compiler.programs.shapes.num_pages:
            compiler = compiler_for(fill(needs))
    return Plan(compiler, memory, needs, measured)


def _temporaries(compiler: Compiler, buckets: Buckets) -> int:
    """One program runs at a time, beside what those before it in the step have left for it and for others. Copies of
    blocks are counted elsewhere."""
    steps = largest_programs(buckets, adapters=compiler.programs.pairs is not None)
    copies = [each for count in compiler.programs.staging.counts[-1:] for each in copying_programs(count)]
    with ThreadPoolExecutor() as pool:
        temporaries, results = zip(*pool.map(compiler.memory, [*steps, *copies]), strict=True)
    return max(temporaries) + sum(results[: len(steps)])


def _pairs(config: Config, model: Model, mesh: jax.sharding.Mesh) -> Any:
    """What the devices keep of adapters, with shapes in place of arrays; None where there are to be none."""
    if not config.enable_lora:
        return None
    return abstract_pairs(family(model.arch).weights, model.arch, mesh, model.dtype, adapter_room(config))


def adapter_room(config: Config) -> Room:
    return Room(config.max_num_mem_cached_lora, config.max_lora_rank)


def _weights(
    config: Config, model: Model, mesh: jax.sharding.Mesh, report: Callable[[float], None]
) -> Callable[[], Any]:
    """What makes the weights. A checkpoint that does not fit the model is refused now, before anything is compiled."""
    weights, how = family(model.arch).weights, model.quantization
    if model.files is None or config.load_format == "dummy":
        return lambda: dummy(weights, model.arch, mesh, model.dtype, seed=config.seed, quantization=how)
    checkpoint = open_model(model.files, family(model.arch))
    check_checkpoint(weights, model.arch, checkpoint, how)
    options: dict[str, Any] = {"quantization": how, "check": config.check_weights, "report": report}
    return lambda: load(weights, model.arch, checkpoint, mesh, model.dtype, **options)


def _quantization(config: Config, found: ModelConfig) -> Quantization | None:
    wanted, own = config.quantization, found.quantization
    if wanted is None:
        return own
    if own is None:
        return online(wanted)
    if wanted == "w4a8":
        return NarrowTokens(own)
    raise ConfigError(
        f"--quantization={wanted} is for weights of 16 or 32 bits, and the model's are in few bits already, as its"
        f" config.json says: {own.name}. Leave the flag out."
    )


def _check_narrow(arch: Arch, num_devices: int, own: Method | None, quantization: Quantization | None) -> None:
    """Refuses --quantization=w4a8 for a model of which no product would round its tokens."""
    weights = specs(family(arch).weights, arch)
    if "w4a8" in codings(weights, Split(arch, num_devices), quantization):
        return
    kinds = {numbers for spec in weights if (numbers := kept(spec, own).numbers) is not None}
    ways = [
        f"{each.coding}, {each.group or 'all'} columns with a scale" + ", sorted" * each.has_order for each in kinds
    ]
    raise ConfigError(
        "--quantization=w4a8 rounds tokens where a weight has whole numbers of 4 bits, and a multiple of"
        f" {W4A8_COLUMNS} columns with a scale that follow each other on a device. With --tensor_parallel_size"
        f"={num_devices} this model has no such weight"
        + (
            f"; as it is kept: {' and '.join(sorted(ways))}. Leave the flag out."
            if own
            else ": use --quantization=int4."
        )
    )


def _dtype(config: Config, found: ModelConfig) -> Any:
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    if backend() == "cpu" and found.dtype == "float32":
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.bfloat16)


def _kv_dtype(config: Config, model: Model) -> Any:
    match config.kv_cache_dtype:
        case "auto":
            return model.dtype
        case "fp8":
            return jnp.dtype(jnp.float8_e4m3fn)
        case "int8":
            return jnp.dtype(jnp.int8)


def _step_tokens(config: Config, model: Model) -> tuple[int, int | None]:
    """Most tokens of a step, and of one that also decodes where that is fewer."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens, None
    on_gpu = config.enable_chunked_prefill and backend() == "gpu"
    tokens = CHUNKED_STEP_TOKENS if config.enable_chunked_prefill and not on_gpu else WHOLE_STEP_TOKENS
    if config.topology is not None:
        tokens = HANDED_STEP_TOKENS
    tokens = max(min(tokens, model.max_model_len * config.prefill_seqs), config.max_decode_seqs)
    return tokens, min(max(GPU_MIXED_TOKENS, 2 * config.max_decode_seqs), tokens) if on_gpu else None


def make_buckets(config: Config, model: Model, mesh: jax.sharding.Mesh) -> Buckets:
    step_tokens, _ = _step_tokens(config, model)
    mixed_seqs = config.max_decode_seqs if config.enable_chunked_prefill else config.prefill_seqs
    on_cpu = backend() == "cpu"
    small = bytes_per_device(model.abstract(mesh)) < SMALL_MODEL
    return Buckets(
        decode_padding=min(config.decode_seqs_padding, config.max_decode_seqs),
        max_decodes=config.max_decode_seqs,
        mixed_padding=min(config.smallest_prefill, step_tokens),
        max_mixed_tokens=step_tokens,
        max_mixed_seqs=_padded(mixed_seqs, config.prefill_seqs_padding),
        growth=8 if on_cpu and small else 2,
        single=backend() == "gpu" and config.decode_seqs_padding <= DEFAULT_DECODE_PADDING,
        row_growth=2 if on_cpu else 8,
        variants=TOGETHER if on_cpu else SEPARATE,
    )


def largest_programs(buckets: Buckets, *, adapters: bool = False) -> list[Program]:
    """The programs that take the most memory."""
    largest = buckets.largest()
    rows = max(bucket.rows for bucket in largest)
    tokens = max(bucket.tokens for bucket in largest if not bucket.decode)
    forward = [each for bucket in largest for each in forward_programs(bucket, adapters=adapters)]
    return [*forward, *choosing_programs(rows, buckets.variants), ScorePrompt(tokens)]


def _shapes(config: Config, model: Model, buckets: Buckets, num_pages: int) -> Shapes:
    blocks = -(-model.max_model_len // config.block_size)
    step_tokens, mixed_tokens = _step_tokens(config, model)
    largest_mixed = buckets.choose(mixed_tokens or step_tokens, decode=False).tokens
    return Shapes(
        num_slots=config.max_decode_seqs,
        page_size=config.block_size,
        table_width=_padded(blocks, config.decode_blocks_padding),
        num_pages=num_pages,
        max_fresh=config.prefill_seqs,
        mixed_tokens=largest_mixed if config.enable_chunked_prefill else 0,
        max_model_len=model.max_model_len,
        vocab_size=model.arch.vocab_size,
        num_adapters=config.num_adapters,
        has_long=model.arch.rope_switch is not None,
    )


def _usable_blocks(config: Config, model: Model) -> int | None:
    """Without a prefix cache, no more blocks than those of all sequences that can run have a use."""
    if config.enable_prefix_cache_hbm:
        return None
    return config.max_decode_seqs * _sequence_blocks(config, model)


def _sequence_blocks(config: Config, model: Model) -> int:
    step_tokens, _ = _step_tokens(config, model)
    return most_blocks(model.max_model_len, config.block_size, reach=_reach(model), step_tokens=step_tokens)


def _reach(model: Model) -> int | None:
    """How many of the last tokens a token sees in any layer; None where that can be all."""
    reach = model.arch.reach
    return None if reach is None else max(reach, 2)


def _limits(config: Config, model: Model, num_pages: int) -> Limits:
    step_tokens, mixed_tokens = _step_tokens(config, model)
    return Limits(
        vocab_size=model.arch.vocab_size,
        max_model_len=model.max_model_len,
        num_blocks=num_pages,
        block_size=config.block_size,
        max_running=config.max_decode_seqs,
        max_prefills=config.prefill_seqs,
        step_tokens=step_tokens,
        mixed_tokens=mixed_tokens,
        chunked=config.enable_chunked_prefill,
        prefix_caching=config.enable_prefix_cache_hbm,
        prefix_unit=config.prefill_len_padding,
        reach=_reach(model),
        rope_switch=model.arch.rope_switch,
        num_adapters=config.num_adapters,
    )


def _padded(size: int, padding: int) -> int:
    return -(-size // padding) * padding


def _bytes(tree: Any) -> int:
    """On each device."""

    def shape(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)

    return sum(math.prod(shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
