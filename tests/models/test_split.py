from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hex_llm.models.split import Split

HEAD = 4


@st.composite
def splits(draw) -> Split:
    kv_heads, group = draw(st.integers(1, 20)), draw(st.integers(1, 16))
    num_heads, mlp = kv_heads * group, draw(st.integers(1, 50))
    arch: Any = SimpleNamespace(
        num_heads=num_heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD,
        mlp_unit=draw(st.sampled_from([1, 2, 8])),
        sizes={"heads": num_heads * HEAD, "kv_heads": kv_heads * HEAD, "sinks": num_heads, "mlp": mlp, "embed": 7},
    )
    return Split(arch, draw(st.integers(1, 32)))


def rows(split: Split, dim: str, device: int) -> list[int | None]:
    """Which row of the model each row of a device's share is; None: zeros."""
    found: list[int | None] = [None] * split.shard(dim)
    for run in split.runs(dim, device):
        for i in range(run.stop - run.start):
            assert found[run.at + i] is None
            found[run.at + i] = run.start + i
    return found


@given(splits())
def test_every_head_of_queries_is_on_one_device_and_beside_its_keys(split):
    group = split.arch.num_heads // split.arch.num_kv_heads
    seen = []
    for device in range(split.num_devices):
        queries, keys = rows(split, "sinks", device), rows(split, "kv_heads", device)[::HEAD]
        for i, query in enumerate(queries):
            if query is not None:
                key = keys[i // (split.heads // split.kv_heads)]
                assert key is not None
                assert key // HEAD == query // group
                seen.append(query)
    assert sorted(seen) == list(range(split.arch.num_heads))


@given(splits())
def test_the_rows_of_a_head_stay_together(split):
    for device in range(split.num_devices):
        whole = [query if query is None else query * HEAD for query in rows(split, "sinks", device)]
        expected = [None if first is None else first + i for first in whole for i in range(HEAD)]
        assert rows(split, "heads", device) == expected


@given(splits())
def test_other_dimensions_are_cut_in_order_and_what_is_not_split_is_everywhere(split):
    cut = [row for device in range(split.num_devices) for row in rows(split, "mlp", device)]
    assert [row for row in cut if row is not None] == list(range(split.arch.sizes["mlp"]))
    assert len(cut) == split.size("mlp") < split.arch.sizes["mlp"] + split.num_devices * split.arch.mlp_unit
    assert split.shard("mlp") % split.arch.mlp_unit == 0
    assert all(rows(split, "embed", device) == list(range(7)) for device in range(split.num_devices))


def test_no_more_is_repeated_or_filled_up_than_must_be():
    def shares(num_heads: int, num_kv_heads: int, num_devices: int) -> tuple[int, int]:
        arch: Any = SimpleNamespace(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=HEAD)
        split = Split(arch, num_devices)
        return split.heads, split.kv_heads

    assert shares(32, 8, 4) == (8, 2)  # Llama-3.1-8B
    assert shares(64, 8, 16) == (4, 1)  # Llama-3.1-70B: two devices have the same head of keys
    assert shares(40, 8, 16) == (3, 1)  # Llama 4 Scout: groups of 5 are cut into 3 and 2
    assert shares(40, 10, 4) == (12, 3)  # phi-4: two of twelve heads of keys are zeros
    assert shares(8, 1, 4) == (2, 1)  # Gemma 2B
