"""The choice of experts by Triton, against the reference, and shared experts with gates."""

from __future__ import annotations

import pytest
import torch
from interpreted import DEVICE, assert_near

from models.ops import expert_routing_ops
from models.ops.expert_routing_ops import Routing
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.operations import cuda_operations

OPERATIONS = cuda_operations(Card(90, 4))
RULES = {
    "softmax of all": Routing(experts=12, chosen=5),
    "not normalised": Routing(experts=33, chosen=4, normalised=False, factor=1.5),
    "one of two": Routing(experts=2, chosen=1),
    "all": Routing(experts=7, chosen=7, scores="sigmoid"),
    "sums of a group's two best": Routing(
        experts=12, chosen=3, scores="sigmoid", epsilon=1e-20, factor=2.5, groups=4, kept_groups=2
    ),
    "a group's best": Routing(experts=24, chosen=4, groups=8, kept_groups=3, summed_best=1, least_sum=0.9),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("given", ["all", "none"])
def test_choices_are_those_of_the_reference(rule: str, given: str) -> None:
    routing, count = RULES[rule], RULES[rule].experts
    x, weight = torch.randn(9, 40, device=DEVICE), torch.randn(count, 40, device=DEVICE) / 8
    bias, correction, factors = (torch.randn(count, device=DEVICE) / 4 for _ in range(3))
    others = (bias, correction, factors) if given == "all" else (None, None, None)
    arguments = (x, weight, *others[:2], routing, others[2])
    (ids, shares), (expected, exact) = OPERATIONS["route"](*arguments), expert_routing_ops.route(*arguments)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(shares, exact, atol=1e-6, rtol=1e-5)


def test_of_equal_scores_the_first_is_chosen() -> None:
    """Also where a correction is what is equal, and scores are below zero."""
    x, weight = torch.ones(2, 8, device=DEVICE), torch.zeros(16, 8, device=DEVICE)
    weight[[3, 9, 11]] = 1.0
    correction = torch.full((16,), -2.0, device=DEVICE)
    for routing in (
        Routing(experts=16, chosen=5),
        Routing(experts=16, chosen=5, scores="sigmoid", groups=4, kept_groups=3),
    ):
        for given in (None, correction):
            ids, _ = OPERATIONS["route"](x, weight, None, given, routing)
            assert torch.equal(ids, expert_routing_ops.route(x, weight, None, given, routing)[0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_row_that_is_not_finite_chooses_experts_that_are_there() -> None:
    """Its numbers lead to matrices, and what they make of it is nobody else's."""
    x = torch.randn(3, 8, device=DEVICE)
    x[1] = torch.nan
    weight, routing = torch.randn(6, 8, device=DEVICE), Routing(experts=6, chosen=3)
    ids, shares = OPERATIONS["route"](x, weight, None, None, routing)
    expected, exact = expert_routing_ops.route(x, weight, None, None, routing)
    assert torch.equal(ids[::2], expected[::2])
    torch.testing.assert_close(shares[::2], exact[::2])
    assert sorted(set(ids[1].tolist())) == ids[1].tolist()
    assert all(0 <= number < 6 for number in ids[1].tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_expert_is_added_by_its_gate(dtype: torch.dtype) -> None:
    x, rows, total = (torch.randn(4, 67).to(dtype).to(DEVICE) for _ in range(3))
    gate = torch.randn(67).to(dtype).to(DEVICE) / 8
    expected = expert_routing_ops.add_gated(*(each.double() for each in (x, rows, gate, total)))
    assert_near(OPERATIONS["add_gated"](x, rows, gate, total), expected)
