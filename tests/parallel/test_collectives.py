"""Lines as XLA writes them for CPUs, GPUs and TPUs, shortened."""

import pytest

from hex_llm.parallel.collectives import Collective, collectives

NAME = 'metadata={op_name="jit(step)/jit(layer)/psum" stack_frame_id=7}'


def only(line):
    (found,) = collectives(f"HloModule step\n\nENTRY %main (a: f32[2]) -> f32[2] {{\n{line}\n}}\n")
    return found


def test_an_all_reduce_says_what_is_summed_on_every_device_and_by_which_function():
    line = "  %psum.4 = bf16[256,4096]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.5), channel_id=1, "
    line += "replica_groups=mesh['tp'=4] {'tp'}, use_global_device_ids=true, to_apply=%region_3.4, " + NAME
    assert only(line) == Collective("all-reduce", 2 * 256 * 4096, "bf16", 4, "jit(step)/jit(layer)/psum")


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3,4,5,6,7}}", 8),
        ("{{0,2},{1,3}}", 2),
        ("[1,16]<=[16]", 16),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['dp'=2,'tp'=4] {'tp'}", 4),
        ("mesh['dp'=2,'tp'=4] {'dp','tp'}", 8),
    ],
)
def test_groups_of_devices_are_read_in_every_way_they_are_written(groups, size):
    assert only(f"  ROOT %r = f32[8]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add").group == size


def test_groups_written_in_an_unknown_way_are_an_error_and_no_guess():
    with pytest.raises(ValueError, match="how many devices"):
        only("  %r = f32[8]{0} all-reduce(%x), replica_groups=everyone, to_apply=%add")


def test_several_arrays_that_are_summed_at_once_are_one():
    line = "  %all-reduce = (f32[16,8]{1,0}, /*index=1*/bf16[16,8]{1,0}, f32[]) all-reduce(%a, %b, %c), "
    assert only(line + "replica_groups={{0,1}}") == Collective("all-reduce", 4 * 128 + 2 * 128 + 4, "f32+bf16", 2, "")


@pytest.mark.parametrize(
    ("line", "kind", "size", "sent"),
    [
        ("%r = f32[32]{0} all-reduce(%x)", "all-reduce", 128, 192),
        ("%r = f32[32]{0} all-reduce-start(%x)", "all-reduce", 128, 192),
        ("%r = f32[32]{0} all-gather(%x)", "all-gather", 128, 96),
        ("%r = (f32[8]{0}, f32[32]{0}) all-gather-start(%x)", "all-gather", 128, 96),
        ("%r = ((f32[8], s8[8]), (f32[32], s8[32])) all-gather-start(%x, %y)", "all-gather", 160, 120),
        ("%r = f32[8]{0} reduce-scatter(%x)", "reduce-scatter", 128, 96),
        ("%r = (f32[8]{0}, f32[8]{0}, f32[8]{0}, f32[8]{0}) all-to-all(%a, %b, %c, %d)", "all-to-all", 128, 96),
        ("%r = pred[32]{0} all-gather(%x)", "all-gather", 32, 24),
        ("%r = s4[32]{0} all-gather(%x)", "all-gather", 16, 12),
        ("%r = f8e4m3fn[32]{0} all-gather(%x)", "all-gather", 32, 24),
    ],
)
def test_each_kind_has_the_bytes_of_its_whole_array_and_those_that_a_device_sends(line, kind, size, sent):
    found = only(f"  {line}, replica_groups={{{{0,1,2,3}}}}")
    assert (found.kind, found.bytes, found.sent) == (kind, size, sent)


def test_a_permutation_sends_the_array_once():
    arrays = "(bf16[16,8]{0,1:T(8,128)(2,1)}, bf16[16,8]{0,1:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, u32[]{:S(2)})"
    found = only(f"  %p = {arrays} collective-permute-start(%x), source_target_pairs={{{{0,1}},{{1,0}}}}")
    assert (found.kind, found.bytes, found.sent) == ("collective-permute", 256, 256)


def test_the_end_of_one_and_whatever_uses_its_result_are_not_counted():
    text = """
  %all-reduce-done.1 = f32[8]{0} all-reduce-done(%all-reduce-start.1)
  %all-reduce.3 = f32[8]{0} get-tuple-element(%all-reduce.2), index=0
  %fusion = f32[8]{0} fusion(%all-gather.1), calls=%f, metadata={op_name="a all-reduce(b"}
"""
    assert collectives(text) == []
