"""Blocks copied from one engine's cache to another's, with what that should come to worked out here."""

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.kernels.paged_attention.pages import packed, unpacked
from hex_llm.models.split import Split
from hex_llm.runner.runner import DeviceRunner


def problems(source: DeviceRunner, target: DeviceRunner) -> list[str]:
    """What is wrong after random blocks of a random cache were copied to random places of another; empty if nothing."""
    rng = np.random.default_rng(0)
    there, here = random_cache(source, rng), random_cache(target, rng)
    fill(source, there)
    fill(target, here)
    found, num_pages = [], there.shape[1]
    for number, size in enumerate([*range(1, 6), source.part_blocks]):
        blocks, places = (rng.permutation(np.arange(1, num_pages))[:size].tolist() for _ in range(2))
        copy = source.copy_out(blocks)
        if copy.shape != source.staging.shape(source.staging.count(size)):
            found.append(f"a copy of {size} blocks has the shape {copy.shape}")
        if not copy.sharding.is_equivalent_to(source.staging.sharding, copy.ndim):
            found.append(f"a copy of {size} blocks is spread as {copy.sharding}")
        if bits(copy)[:, :size].tobytes() != there[:, blocks].tobytes():
            found.append(f"a copy of blocks {blocks} is not what they were")
        target.copy_in(places, np.asarray(copy) if number % 2 else copy)
        here[:, places] = there[:, blocks]
    for layer, pages in enumerate(target._kv):
        wrong = np.nonzero((bits(packed(pages)) != laid_out(target, here[layer])).any(axis=(1, 2, 3, 4)))[0]
        if len(wrong):
            found.append(f"pages {wrong.tolist()} of layer {layer} are not what they should be")
    for layer, pages in enumerate(source._kv):
        if bits(packed(pages)).tobytes() != laid_out(source, there[layer]).tobytes():
            found.append(f"copying blocks out changed layer {layer}")
    return found


def random_cache(runner: DeviceRunner, rng: np.random.Generator) -> np.ndarray:
    """[layers, pages, 2, the model's heads, page size, page width], as bits: of any numbers there are."""
    layers, *page = runner.staging.block
    size = np.dtype(runner.staging.dtype).itemsize
    shape = (layers, runner._shapes.num_pages, *page)
    cache = rng.integers(0, 2 ** (8 * size), shape, f"uint{8 * size}")
    cache[np.isnan(cache.view(runner.staging.dtype))] = 1  # of NaN XLA's CPU backend keeps no more than that it is one
    return cache


def fill(runner: DeviceRunner, cache: np.ndarray) -> None:
    """Gives a runner that cache."""
    dtype = runner.staging.dtype
    runner._kv = tuple(
        jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding),
            unpacked(jnp.asarray(laid_out(runner, pages).view(dtype))),
            before,
        )
        for pages, before in zip(cache, runner._kv, strict=True)
    )


def laid_out(runner: DeviceRunner, pages: np.ndarray) -> np.ndarray:
    """A layer's pages as the devices have them, which is as they have the weights that make them."""
    programs = runner._compiler.programs
    split, unit = Split.over(programs.arch, programs.mesh), programs.arch.head_dim
    count, two, _, *rest = pages.shape
    shares = np.zeros((split.num_devices, count, two, split.kv_heads, *rest), pages.dtype)
    for device in range(split.num_devices):
        for run in split.runs("kv_heads", device):
            heads = slice(run.start // unit, run.stop // unit)
            at = run.at // unit
            shares[device][:, :, at : at + heads.stop - heads.start] = pages[:, :, heads]
    return np.concatenate(shares, axis=2)


def bits(array: jax.Array) -> np.ndarray:
    numbers = np.asarray(array)
    return numbers.view(f"uint{8 * numbers.itemsize}")
