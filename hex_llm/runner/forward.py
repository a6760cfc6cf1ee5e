"""The model's part of a step: from one upload to the logits of each sequence's last token."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.batch import Batch
from hex_llm.kernels.paged_attention.pages import Pages
from hex_llm.models import decoder
from hex_llm.models.adapters import adapted, whose
from hex_llm.models.arch import Arch
from hex_llm.pytree import pytree
from hex_llm.runner.layout import COLUMNS, LONG, Layout
from hex_llm.runner.state import Slots


@pytree
class Computed:
    """What the programs that follow in the step need of it."""

    logits: Array  # [R, V] float32; where devices share the vocabulary, each has its part
    rows: Array  # [R, C] int32: the field of the input
    hidden: Array | None  # [T, D]: of every token, where there can be prompts


def forward(
    params: Any, kv: tuple[Pages, ...], slots: Slots, blob: Array, pairs: Any = None, *, arch: Arch, layout: Layout
) -> tuple[tuple[Pages, ...], Slots, Computed]:
    """`pairs` of all slots for adapters, where the step has tokens of some."""
    fields = layout.cut(blob)
    slots = Slots(last_token=slots.last_token, page_table=_update_page_table(slots.page_table, fields))
    batch, owner, last = _batch(fields, slots, layout)
    if pairs is not None:
        own = fields["rows"][: layout.bucket.seqs, COLUMNS.index("adapter")][owner]
        # There before the first layer begins, as the batch is: `kernels.chain` says why.
        own, batch = jax.lax.optimization_barrier((own, batch))
        params = adapted(params, pairs, whose(own, layout.shapes.num_adapters))
    hidden, kv = decoder.forward(params, arch, kv, batch)
    last = jnp.pad(last, (0, layout.bucket.rows - layout.bucket.seqs))
    logits = decoder.own_logits(params, arch, hidden[last])
    return kv, slots, Computed(logits, fields["rows"], None if layout.bucket.decode else hidden)


def _update_page_table(page_table: Array, fields: dict[str, Array]) -> Array:
    if "fresh" in fields:
        page_table = page_table.at[fields["fresh"][:, 0]].set(fields["fresh"][:, 1:])
    slot, index, page = fields["gained"].T
    return page_table.at[slot, index].set(page)


def _batch(fields: dict[str, Array], slots: Slots, layout: Layout) -> tuple[Batch, Array, Array]:
    """The batch, of each token the sequence that it belongs to, and of each sequence the place of its last token."""
    bucket, page_size = layout.bucket, layout.shapes.page_size
    tokens = fields["tokens"]
    tokens = jnp.where(tokens < 0, slots.last_token[-1 - jnp.minimum(tokens, -1)], tokens)
    place = jnp.arange(bucket.tokens, dtype=jnp.int32)
    slot, kv_len, flags = (fields["rows"][: bucket.seqs, COLUMNS.index(name)] for name in ("slot", "kv_len", "flags"))
    table = slots.page_table[slot]
    if bucket.decode:
        cu_q, owner, last = None, place, place
        positions, real = jnp.maximum(kv_len - 1, 0), kv_len > 0
    else:
        cu_q = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(fields["length"], dtype=jnp.int32)])
        # Compared with all of them at once: a search would be a loop of small kernels.
        owner = jnp.searchsorted(cu_q[1:], place, side="right", method="compare_all").astype(jnp.int32)
        owner = jnp.minimum(owner, bucket.seqs - 1)
        last = jnp.maximum(cu_q[1:] - 1, 0)
        real = place < cu_q[-1]
        positions = jnp.where(real, kv_len[owner] - cu_q[owner + 1] + place, 0)
    batch = Batch(
        tokens=tokens,
        positions=positions,
        write_page=jnp.where(real, table[owner, positions // page_size], 0),
        write_offset=positions % page_size,
        cu_q=cu_q,
        kv_len=kv_len,
        page_table=table,
        num_decode=fields["counts"][0] if bucket.decode or bucket.tokens <= layout.shapes.mixed_tokens else None,
        num_seqs=fields["counts"][1],
        long=flags[owner] & LONG > 0 if layout.shapes.has_long else None,
    )
    return batch, owner, last
