"""The reference of experts, compared with formulas written out, and routers with those of transformers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
from shape_files import read_shapes
from torch import Tensor, nn

from models import ops
from models.ops.expert_routing_ops import Routing

SIZE, ROWS = 16, 10_000


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(family: str) -> nn.Module:
    """A router of transformers with random weights and a correction that changes choices."""
    folder, given = family.partition(",")[0], ROUTERS[family]
    config = getattr(transformers, given["config"])(hidden_size=SIZE, **given["fields"])
    module = import_module(f"transformers.models.{folder}.modeling_{folder}")
    router = getattr(module, given["router"])(config)
    for number, tensor in enumerate([*router.parameters(), *router.buffers()]):
        tensor.data.copy_(drawn(*tensor.shape, seed=number) * 0.3)
    return router


def softmax(experts: int, chosen: int, **others: Any) -> Routing:
    return Routing(experts=experts, chosen=chosen, **others)


def sigmoid(experts: int, chosen: int, **others: Any) -> Routing:
    return Routing(experts=experts, chosen=chosen, scores="sigmoid", **others)


ROUTERS = read_shapes("routers")
"""Routers of transformers, each with the fields of its config, and the routing that is the same."""


@pytest.mark.parametrize("family", ROUTERS)
@torch.inference_mode()
def test_routers_choose_as_those_of_transformers(family: str) -> None:
    router, routing = made(family), Routing(**ROUTERS[family]["routing"])
    x = drawn(ROWS, SIZE, seed=9)
    correction = next(
        (tensor for name, tensor in router.state_dict().items() if "e_score_correction_bias" in name), None
    )
    if family == "minimax_m2":  # its correction lies beside the router
        correction = drawn(routing.experts, seed=5) * 0.3
        answers = router(x, correction)
    else:
        answers = router(x)
    # Versions of transformers differ in the order of numbers, weights and logits.
    chosen = next(answer for answer in answers if not answer.is_floating_point())
    theirs = next(answer for answer in answers if answer is not chosen and answer.shape == chosen.shape)
    correction = None if correction is None else correction.flatten()
    ids, weights = ops.route(x, router.weight, getattr(router, "bias", None), correction, routing)
    order = chosen.argsort(-1)
    same = (ids == chosen.gather(-1, order)).all(-1)
    assert same.sum() >= ROWS - 2  # scores may be a digit apart
    torch.testing.assert_close(weights[same], theirs.gather(-1, order)[same], rtol=1e-5, atol=1e-7)
    assert len(ids.unique()) == routing.experts


def test_ties_go_to_the_lower_expert() -> None:
    weight = drawn(4, SIZE).repeat(2, 1)  # each expert twice
    x = torch.cat([drawn(50, SIZE, seed=1), torch.zeros(1, SIZE)])
    for routing in (softmax(8, 3), sigmoid(8, 3), sigmoid(8, 3, groups=2, kept_groups=1)):
        ids, weights = ops.route(x, weight, None, None, routing)
        assert ids[-1].tolist() == [0, 1, 2]
        assert (ids.diff() > 0).all()
        for row in ids.tolist():
            assert all(number < 4 or number - 4 in row for number in row)
        torch.testing.assert_close(weights.sum(-1), torch.ones(51))


def test_a_router_says_what_cannot_be_chosen() -> None:
    for fields in (
        {"chosen": 9},
        {"chosen": 0},
        {"chosen": 2, "groups": 3},
        {"chosen": 5, "groups": 2, "kept_groups": 1},
        {"chosen": 2, "groups": 2, "kept_groups": 3},
    ):
        with pytest.raises(ValueError, match="cannot be chosen"):
            Routing(experts=8, **fields)
    with pytest.raises(ValueError, match="4097 experts are too many: 4096 are allowed"):
        Routing(experts=4097, chosen=2)


def test_what_an_expert_makes_of_others_tokens_is_not_used() -> None:
    x = torch.tensor([[1.0, 1.0], [float("nan"), 1.0]])
    gate_up, down = drawn(2, 4, 2), drawn(2, 2, 2)
    ids, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
    found = ops.experts(x, ids, weights, list(gate_up), list(down), "silu")
    assert found[0].isfinite().all()
    assert found[1].isnan().all()
