"""Two replicas find nearly as much in their caches as one that has the memory of both."""

import pytest

from benchmarks.dp_affinity import Workload, compare


@pytest.mark.parametrize(
    "workload",
    [
        Workload(),
        Workload(concurrency=64, blocks=500, seed=1),  # where memory is short
        Workload(conversations=32, concurrency=4, systems=1, system_tokens=1024, seed=2),  # where replicas idle
    ],
    ids=["as it comes", "short of memory", "idle"],
)
def test_two_replicas_keep_nine_tenths_of_the_hit_rate_of_one_with_the_memory_of_both(workload):
    one, _, two, by_turns = compare(workload)
    assert two.hit_rate >= 0.9 * one.hit_rate
    assert by_turns.hit_rate < two.hit_rate
    assert sum(two.requests) == sum(one.requests) == workload.conversations * workload.turns
