"""What `benchmarks/h200_plans.py` can show without an H200: that it times every plan, each by a name of its own."""

import pytest

from benchmarks.h200_plans import CODINGS, SHAPES, Case, said


@pytest.mark.parametrize("tokens", [1, 64, 128, 512, 8192])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("coding", CODINGS)
def test_every_plan_has_a_name_and_the_chosen_one_is_among_them(coding, name, tokens):
    case = Case(coding, name, tokens)
    plans = case.plans()
    assert case.chosen() in plans
    assert len({said(plan) for plan in plans}) == len(plans) > 1
