"""What `benchmarks/h200_plans.py` and `h200_quant_parts.py` can show without an H200: that every plan is timed, by a
name of its own, and that what is to be left out is."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.h200_plans import CODINGS, SHAPES, Case, said
from benchmarks.h200_quant import as_taken, new_weight
from benchmarks.h200_quant_parts import REPLACED, left_out
from hex_llm.kernels.quant_matmul import gpu
from hex_llm.kernels.quant_matmul.gpu_plan import Plan
from tests.kernels.test_gpu_lowering import lowered


@pytest.mark.parametrize("tokens", [1, 64, 128, 512, 8192])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("coding", CODINGS)
def test_every_plan_has_a_name_and_the_chosen_one_is_among_them(coding, name, tokens):
    case = Case(coding, name, tokens)
    plans = case.plans()
    assert case.chosen() in plans
    assert len({said(plan) for plan in plans}) == len(plans) > 1


@pytest.mark.parametrize("coding", REPLACED)
def test_every_part_of_a_product_can_be_left_out(coding):
    """Or what is left out would be named for ever, when it has another name."""
    plan = Plan(workers=2, stack=2)
    weight = jax.eval_shape(lambda: new_weight(coding, 128, (256, 512), 0))
    x = jax.eval_shape(as_taken, jax.ShapeDtypeStruct((64, 512), jnp.bfloat16), weight)
    texts = set()
    for part in ["", *REPLACED[coding]]:
        with left_out(coding, part):
            texts.add(lowered(lambda x, weight: gpu.parts(x, weight, plan=plan), x, weight))
    assert len(texts) == 1 + len(REPLACED[coding])
