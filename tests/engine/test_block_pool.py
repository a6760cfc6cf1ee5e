"""The block pool, by itself."""

import pytest

from hex_llm.engine.block_pool import BlockPool, extend_keys
from tests.engine.fakes import make_request

KEYS = [bytes([i]) for i in range(9)]


def filled(num_blocks: int, count: int) -> tuple[BlockPool, list[int]]:
    """A pool in which `count` blocks hold the prefix KEYS[:count], and nobody owns them."""
    pool = BlockPool(num_blocks)
    blocks = pool.allocate(count)
    for block, key in zip(blocks, KEYS, strict=False):
        pool.remember(block, key)
    pool.release(blocks, after=0)
    pool.reclaim(0)
    return pool, blocks


def acquire(pool: BlockPool, keys: list[bytes], count: int) -> tuple[list[int], int]:
    """`count` blocks in all, and how many of them were found. Asserts that there is room."""
    found = pool.find(keys)
    blocks = pool.acquire(found, count - len(found), spare=0)
    assert blocks is not None
    return blocks, len(found)


def test_block_zero_is_never_given_out():
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.num_free == 0


def test_a_released_block_is_free_only_when_the_step_that_may_touch_it_was_read():
    pool = BlockPool(4)
    first, second = pool.allocate(1), pool.allocate(2)
    pool.release(first, after=6)
    pool.release(second, after=7)
    assert (pool.num_free, pool.num_retired) == (0, 3)
    pool.reclaim(6)
    assert (pool.num_free, pool.num_retired) == (1, 2)
    pool.reclaim(7)
    assert (pool.num_free, pool.num_retired) == (3, 0)
    pool.check([])


def test_a_shared_block_is_released_when_its_last_owner_leaves():
    pool, blocks = filled(4, 2)
    mine, yours = acquire(pool, KEYS[:2], 2), acquire(pool, KEYS[:2], 3)
    assert mine == (blocks, 2)
    assert yours == ([*blocks, 3], 2)
    pool.check([mine[0], yours[0]])
    pool.release(mine[0], after=0)
    pool.reclaim(0)
    assert pool.num_free == 0
    pool.check([yours[0]])


def test_the_longest_remembered_prefix_is_found():
    pool, blocks = filled(8, 3)
    assert acquire(pool, [KEYS[0], KEYS[1], KEYS[8], KEYS[2]], 4) == ([*blocks[:2], 4, 5], 2)


@pytest.mark.parametrize(
    ("lost", "reach", "expected"),
    [
        ([], 2, [0, 0, 0, 4, 5]),
        ([0, 1, 2], 2, [0, 0, 0, 4, 5]),
        ([3], 2, [0, 2, 3]),
        ([4], 3, [0, 2, 3, 4]),
        ([1, 4], 3, [1]),
        ([1, 4], 1, [0, 0, 0, 4]),
        ([0, 2, 4], 2, []),
        ([1, 3], 9, [1]),
        ([1, 3], None, [1]),
    ],
)
def test_within_reach_the_longest_prefix_is_found_whose_last_blocks_are_there(lost, reach, expected):
    pool, blocks = filled(6, 5)
    assert blocks == [1, 2, 3, 4, 5]
    pool.forget([KEYS[i] for i in lost])
    assert pool.find(KEYS[:5], reach) == expected
    taken = pool.acquire(expected, 0, spare=0)
    assert taken == expected
    pool.check([[block for block in expected if block]])


def test_the_end_of_a_prefix_is_evicted_first():
    pool, blocks = filled(4, 3)
    assert pool.allocate(1) == [blocks[2]]
    assert acquire(pool, KEYS[:3], 2) == (blocks[:2], 2)


def test_the_least_recently_used_prefix_is_evicted_first():
    pool = BlockPool(3)
    for key in KEYS[:2]:
        [block] = pool.allocate(1)
        pool.remember(block, key)
        pool.release([block], after=0)
        pool.reclaim(0)
    used, _ = acquire(pool, KEYS[:1], 1)
    pool.release(used, after=0)
    pool.reclaim(0)
    pool.release(pool.allocate(1), after=0)  # in place of KEYS[1]
    pool.reclaim(0)
    assert pool.num_cached == 1
    assert acquire(pool, KEYS[:1], 1) == (used, 1)


def test_a_prefix_that_waits_for_a_step_can_be_adopted():
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.remember(blocks[0], KEYS[0])
    pool.release(blocks, after=3)
    assert acquire(pool, KEYS[:1], 1) == (blocks, 1)
    pool.reclaim(3)
    pool.check([blocks])
    pool.release(blocks, after=4)
    pool.reclaim(3)
    assert pool.num_retired == 1
    pool.reclaim(4)
    pool.check([])


def test_what_does_not_fit_changes_nothing():
    pool, blocks = filled(5, 3)  # one block is empty
    found = pool.find(KEYS[:3])
    assert pool.acquire(found, 2, spare=0) is None
    assert pool.acquire(found, 1, spare=1) is None
    pool.check([])
    assert pool.acquire(found, 1, spare=0) == [*blocks, 4]


def test_of_equal_blocks_the_first_is_kept():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.remember(first, KEYS[0])
    pool.remember(second, KEYS[0])
    assert acquire(pool, KEYS[:1], 1) == ([first], 1)
    pool.check([[first, second], [first]])


def test_a_forgotten_prefix_is_not_found_again():
    pool, _ = filled(4, 2)
    pool.forget(KEYS)
    assert pool.num_cached == 0
    assert acquire(pool, KEYS[:2], 2)[1] == 0


@pytest.mark.parametrize("wrong", [[], [[1]], [[1, 2], [2]], [[1, 2, 3]], [[0, 1, 2]]])
def test_the_check_notices_owners_that_the_pool_does_not_know(wrong):
    pool = BlockPool(5)
    pool.check([pool.allocate(2)])
    with pytest.raises(AssertionError):
        pool.check(wrong)


def test_keys_depend_on_the_tokens_before_the_adapter_and_the_salt():
    requests = [
        make_request([1, 2, 3, 4]),
        make_request([9, 2, 3, 4]),
        make_request([1, 2, 3, 4], adapter="a"),
        make_request([1, 2, 3, 4], cache_salt="a"),
        make_request([1, 2, 3, 4], cache_salt="a', '"),
        make_request([1, 2, 3, 4], adapter="a', '"),
    ]
    keys = [extend_keys(request, 2, 2) for request in requests]
    assert len({pair[1] for pair in keys}) == len(requests)
    assert extend_keys(make_request([1, 2, 3, 4]), 2, 2) == keys[0]


def test_keys_run_on_from_the_prompt_into_the_output():
    request = make_request([1, 2, 3])
    extend_keys(request, 1, 2)
    request.output += [4, 5, 6]
    assert extend_keys(request, 3, 2) == extend_keys(make_request([1, 2, 3, 4, 5, 6]), 3, 2)
