"""Paged attention for Hopper GPUs: sequences of one token by one kernel, the others by another."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.chain import chained, padded
from hex_llm.kernels.paged_attention import xla
from hex_llm.kernels.paged_attention.gpu_decode import DecodePlan, decode, plan_decode, refusal, tuning_for
from hex_llm.kernels.paged_attention.gpu_prefill import prefill
from hex_llm.kernels.paged_attention.gpu_prefill_plan import PrefillPlan, plan_prefill
from hex_llm.kernels.paged_attention.pages import Pages
from hex_llm.kernels.quant_matmul.rows import EightBits, Rows
from hex_llm.kernels.window import Window
from hex_llm.pytree import pytree

_ALL = Window(0)  # stands for no window where one has to be sorted


@pytree
class Plan:
    """How a step's work is dealt out to the multiprocessors. All layers of one window share it."""

    decode: DecodePlan | None
    prefill: PrefillPlan | None


def plans(batch: Batch, q: Any, pages: Any, windows: Iterable[Window | None]) -> dict[Window, Plan | None]:
    """A plan for each of the windows."""
    return {window or _ALL: plan(batch, q, pages, window) for window in windows}


def plan(batch: Batch, q: Any, pages: Any, window: Window | None) -> Plan | None:
    """For queries [T, N, H] and pages, or their shapes; None where the kernels do not do these."""
    if refusal(q.shape, pages.shape, q.dtype, pages.dtype):
        return None
    num_tokens, num_heads, head_dim = q.shape
    assert batch.cu_q is not None or num_tokens == batch.kv_len.shape[0], "a batch of decodes has a token a sequence"
    num_kv_heads = pages.shape[2]
    decode_plan = prefill_plan = None
    if batch.num_decode is not None:
        kv_len = batch.kv_len
        if batch.cu_q is not None:
            rows = _decode_rows(batch, num_tokens)
            kv_len = jnp.where(jnp.arange(rows) < batch.num_decode, kv_len[:rows], 0)
        tuning = tuning_for(head_dim, pages.dtype)
        decode_plan = plan_decode(kv_len, num_kv_heads=num_kv_heads, window=window, tuning=tuning)
    if batch.cu_q is not None:
        prefill_plan = plan_prefill(
            batch.cu_q,
            batch.kv_len,
            0 if batch.num_decode is None else batch.num_decode,
            batch.num_seqs,
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
        )
    return Plan(decode_plan, prefill_plan)


def attend(
    q: Array,  # [T, N, H]
    pages: Pages,  # [P, 2, K, page, H]
    batch: Batch,
    *,
    scale: float,
    window: Window | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    eight_bits: EightBits | None = None,
) -> Array | Rows:
    """As `reference.attend`; a batch of decodes may get more rows than it has, of zeros, and them in 8 bits."""
    shared = batch.plans[window or _ALL] if batch.plans else plan(batch, q, pages, window)
    if shared is None:
        return xla.attend(q, pages, batch, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    options: dict[str, Any] = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    num_tokens = q.shape[0]
    if shared.prefill is None:
        # What the product that comes next wants to have: padding it would be a kernel of its own.
        dtype = jnp.bfloat16 if eight_bits is None else eight_bits.dtype
        rows = padded(num_tokens, dtype) if chained(num_tokens) else num_tokens
        options |= {"out_rows": rows, "eight_bits": eight_bits}
        return decode(q, pages, batch.page_table, shared.decode, **options)
    out = prefill(q, pages, batch.page_table, shared.prefill, **options)
    if batch.num_decode is not None:
        rows = _decode_rows(batch, num_tokens)
        decoded = decode(q[:rows], pages, batch.page_table[:rows], shared.decode, **options)
        mine = jnp.arange(num_tokens) < batch.num_decode
        out = jnp.where(mine[:, None, None], jnp.pad(decoded, ((0, num_tokens - rows), (0, 0), (0, 0))), out)
    return out


def _decode_rows(batch: Batch, num_tokens: int) -> int:
    """A decode's token has the number of its sequence."""
    return min(num_tokens, batch.kv_len.shape[0])
