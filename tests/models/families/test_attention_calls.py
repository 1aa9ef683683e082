"""Calls of attention by transformers' code: what a trial run finds, and what later runs are held to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drive import Driver
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models.families.attention_calls import NAME, AttentionCalls, UnsupportedModel

TOKENS = 3


class Caller(nn.Module):
    """A model that hands to attention whatever it is given."""

    def call(
        self, heads: int = 4, kv_heads: int = 2, width: int = 8, *, mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        query, key = torch.randn(1, heads, TOKENS, width), torch.randn(1, kv_heads, TOKENS, width)
        value = options.pop("value", key)
        return ALL_ATTENTION_FUNCTIONS[NAME](self, query, key, value, mask, **options)[0]


@pytest.fixture
def caller() -> Caller:
    torch.manual_seed(0)
    return Caller()


def test_each_call_gets_the_layer_that_it_asks_for(caller: Caller) -> None:
    calls = AttentionCalls()
    with calls.noted():
        out = caller.call(scaling=0.5, sliding_window=7, softcap=2.0)
        caller.call(8, 8, value=torch.randn(1, 8, TOKENS, 16))
    assert out.shape == (1, TOKENS, 4, 8)
    first, second = calls.layers
    assert (first.heads, first.kv_heads, first.head_dim) == (4, 2, 8)
    assert (first.scale, first.window, first.softcap) == (0.5, 7, 2.0)
    assert (second.heads, second.kv_heads, second.head_dim) == (8, 8, 16)
    assert (second.scale, second.window, second.softcap) == (8**-0.5, None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": torch.zeros(1, 1, TOKENS, TOKENS)}, "makes an attention mask of its own"),
        ({"is_causal": False}, "its attention looks ahead"),
        ({"s_aux": torch.zeros(2)}, r"sinks of the shape \(2,\)"),
        (
            {"position_bias": torch.zeros(4)},
            "asks attention for biases of positions",
        ),
        ({"block_indices": torch.zeros(4)}, "asks attention for block_indices"),
        ({"kv_heads": 3}, r"queries of the shape \(1, 4, 3, 8\), keys of \(1, 3, 3, 8\)"),
        ({"value": torch.zeros(1, 2, TOKENS + 1, 8)}, r"values of \(1, 2, 4, 8\)"),
        ({"value": torch.zeros(1, 4, TOKENS, 8)}, r"values of \(1, 4, 3, 8\)"),
    ],
)
def test_what_our_attention_cannot_do_is_refused(caller: Caller, options: Any, message: str) -> None:
    with AttentionCalls().noted(), pytest.raises(UnsupportedModel, match=message):
        caller.call(**options)


def test_options_without_effect_are_accepted(caller: Caller) -> None:
    with AttentionCalls().noted():
        caller.call(dropout=0.0, position_ids=torch.arange(TOKENS), use_cache=False, s_aux=None)


def test_a_module_that_looks_ahead_is_refused(caller: Caller) -> None:
    caller.is_causal = False
    with AttentionCalls().noted(), pytest.raises(UnsupportedModel, match="looks ahead"):
        caller.call()


def test_parameters_on_meta_give_zeros_and_all_else_has_values(caller: Caller) -> None:
    layer = nn.Linear(4, 5, device="meta")
    with AttentionCalls().noted(), torch.inference_mode():
        out = layer(torch.ones(2, 4)).sigmoid()
        moved = layer.weight.to(device="cpu", dtype=torch.float64)
        out += layer.bias
    assert out.tolist() == [[0.5] * 5] * 2
    assert (moved.shape, moved.dtype, moved.device.type) == ((5, 4), torch.float64, "cpu")
    assert layer.weight.is_meta


class Served(Caller):
    """Runs under a Driver: one call of attention a step for each of `widths`."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.calls = AttentionCalls()
        with self.calls.noted():
            self.run_all(widths)
        self.now = widths

    def run_all(self, widths: tuple[int, ...]) -> None:
        for width in widths:
            self.call(width=width)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        with self.calls.answered():
            self.run_all(self.now)
        return ids

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def attention_layers(self) -> list[nn.Module]:
        return list(self.calls.layers)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ((8,), "called attention 1 times in a step, but 2 times at start"),
        ((8, 16, 8), "Served called attention once more than the model did at start"),
        ((8, 8), r"call 1 of attention asks for .*: key_width 8 instead of 16, value_width 8 instead of 16"),
    ],
)
def test_later_runs_must_make_the_same_calls(later: tuple[int, ...], message: str) -> None:
    model = Served(8, 16)
    driver = Driver([model])  # type: ignore[list-item]
    driver.step({0: [1] * TOKENS})
    model.now = later
    with pytest.raises(UnsupportedModel, match=message):
        driver.step({0: [1] * TOKENS})
    model.now = (8, 16)
    driver.step({0: [1] * TOKENS})


def test_a_call_outside_a_run_of_the_model_is_an_error(caller: Caller) -> None:
    with pytest.raises(RuntimeError, match="outside a pass of its model"):
        caller.call()
