"""The programs that copy blocks and seat requests, compiled for TPUs."""

import pytest

from hex_llm.parallel.collectives import collectives

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"  # 8 heads of keys and values, and 4 MiB a block
PART = 16 * 4 * 2**20
PAGES = 1024


@pytest.mark.parametrize(("topology", "count"), [("v5e:2x2", 4), ("v5e:4x4", 16), ("v5e:2x4", 3)])
@pytest.mark.parametrize("name", ["copy_out", "copy_in"])
def test_blocks_are_copied_without_a_copy_of_the_cache(compiler, name, topology, count):
    compiled = compiler.compile(
        "tests.tpu.programs.hand_over", topology, name=name, model=LLAMA, count=count, num_pages=PAGES
    )
    heads = -(-8 // count)  # of a device
    cache, even = PAGES * 4 * 2**20 * heads // 8, 8 % count == 0
    if name == "copy_in":
        assert compiled.alias_bytes == cache
    else:
        assert compiled.alias_bytes == 0
        assert compiled.output_bytes == pytest.approx(PART // count if even else PART, rel=0.01)
    # Heads that devices send each other come with those that fill up, and are put in order then.
    assert compiled.temp_bytes < (2**20 if even or name == "copy_in" else 1.25 * PART)
    assert [each.kind for each in collectives(compiled.text)] == ([] if even or name == "copy_in" else ["all-gather"])


def test_a_seat_is_written_in_place(compiler):
    compiled = compiler.compile(
        "tests.tpu.programs.hand_over", "v5e:2x2", name="seat", model=LLAMA, count=4, num_pages=PAGES
    )
    assert compiled.temp_bytes < 2**20
    assert compiled.alias_bytes >= 257 * 4096 * 4
