"""Operations of encoders, compared with formulas in float64; a row has the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from paged import make_step
from torch import Tensor

from models import ops
from models.context import ForwardContext
from models.ops import reference

HEADS, KV_HEADS, DIM, REACH = 6, 2, 8, 5
LENGTHS = [7, 1, 300, 20]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make_context(lengths: list[int]) -> ForwardContext:
    """A step of whole texts, which has a cache that nobody uses."""
    return make_step(lengths, lengths, block_size=1)


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    total = sum(LENGTHS)
    return (
        torch.randn(total, HEADS, DIM),
        torch.randn(total, KV_HEADS, DIM),
        torch.randn(total, KV_HEADS, DIM),
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("window", [None, 0, 3, 19, 299])
def test_encoder_attention_is_the_formula(
    qkv: tuple[Tensor, Tensor, Tensor], window: int | None, biased: bool
) -> None:
    limits: dict[str, Any] = {
        "window": window,
        "bias": torch.randn(HEADS, 2 * REACH + 1) if biased else None,
        "causal": window in (None, 3),
    }
    out = ops.encoder_attention(*qkv, make_context(LENGTHS), scale=0.4, **limits)
    texts = zip(*(x.double().split(LENGTHS) for x in qkv), strict=True)
    expected = torch.cat([formula(*text, **limits) for text in texts])
    torch.testing.assert_close(out, expected.float())


def formula(q: Tensor, k: Tensor, v: Tensor, window: int | None, bias: Tensor | None, causal: bool) -> Tensor:
    """Attention within one text [L, heads, DIM], with every distance looked at by itself."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.4
    length = len(q)
    for query in range(length):
        for key in range(length):
            away = key - query
            if (window is not None and abs(away) > window) or (causal and away > 0):
                scores[:, query, key] = float("-inf")
            elif bias is not None:
                scores[:, query, key] += bias[:, REACH + max(-REACH, min(REACH, away))]
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def test_half_precision_stays_near(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    bias = torch.randn(HEADS, 2 * REACH + 1)
    for window, added in ((None, None), (3, None), (3, bias)):
        exact = ops.encoder_attention(*qkv, make_context(LENGTHS), scale=0.4, window=window, bias=added)
        halves = (x.bfloat16() for x in qkv)
        half = ops.encoder_attention(*halves, make_context(LENGTHS), scale=0.4, window=window, bias=added)
        assert half.dtype == torch.bfloat16
        torch.testing.assert_close(half.float(), exact, atol=0.05, rtol=0)


@pytest.fixture(params=[1, 2, 3, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


COMPANIES = [(0, 1), (5, 6), (0, 2), (3, 14), (1, 32), (7, 100), (50, 299)]
"""The rows that are cut out of a larger batch, from the first to the last."""


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 48), (50, 33), (384, 1536), (1536, 384), (768, 2)])
@pytest.mark.usefixtures("cpu_kernels", "threads")
def test_a_row_of_a_product_has_the_same_bits_in_any_company(inputs: int, outputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs) * inputs**-0.5, torch.randn(outputs)
    assert_rows_are_alone(lambda x: ops.linear(x, ops.pack(weight), bias), inputs)
    assert_rows_are_alone(lambda x: ops.linear(x, ops.pack(weight)), inputs)
    x = torch.randn(9, inputs)
    expected = x.double() @ weight.double().T + bias
    torch.testing.assert_close(ops.linear(x, ops.pack(weight), bias), expected.float())


@pytest.mark.parametrize("width", [48, 50, 1536])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu_squared"])
@pytest.mark.usefixtures("cpu_kernels", "threads")
def test_an_activated_row_has_the_same_bits_in_any_company(width: int, kind: str) -> None:
    assert_rows_are_alone(lambda x: ops.activation(x, kind), width)
    assert_rows_are_alone(lambda x: ops.gated(x, kind), 2 * width)


def test_a_rotated_or_normalised_row_has_the_same_bits_in_any_company(threads: int) -> None:
    weight, bias = torch.randn(50), torch.randn(50)
    assert_rows_are_alone(lambda x: ops.layer_norm(x, weight, bias, 1e-5), 50)
    angles = torch.randn(300, 5)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    assert_rows_are_alone(lambda x: ops.rotate(x[:, :30].view(-1, 3, 10), cos_sin[x[:, -1].long()]), 31)


def test_attention_has_the_same_bits_in_any_company(threads: int, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    bias = torch.randn(HEADS, 2 * REACH + 1)
    for window, added in ((None, None), (3, None), (None, bias)):
        together = ops.encoder_attention(*qkv, make_context(LENGTHS), scale=0.4, window=window, bias=added)
        texts = zip(*(x.split(LENGTHS) for x in qkv), strict=True)
        for one, text in zip(together.split(LENGTHS), texts, strict=True):
            context = make_context([len(one)])
            alone = ops.encoder_attention(*text, context, scale=0.4, window=window, bias=added)
            assert torch.equal(alone, one)


def assert_rows_are_alone(operation: Callable[[Tensor], Tensor], width: int) -> None:
    x = torch.randn(300, width) * 3
    x[:, -1] = torch.arange(300)
    together = operation(x)
    for start, stop in COMPANIES:
        assert torch.equal(operation(x[start:stop].clone()), together[start:stop])


@pytest.mark.usefixtures("portable_kernels")
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu_squared"])
def test_the_portable_activations_are_the_reference(kind: str) -> None:
    x = torch.cat([torch.randn(1000) * 4, torch.tensor([0.0, -200.0, 200.0, -88.0, -1e-8])])
    exact = reference.activation(x.double(), kind).float()
    torch.testing.assert_close(ops.activation(x, kind), exact, atol=1e-6, rtol=1e-6)
    half = x.bfloat16()
    assert torch.equal(ops.activation(half, kind), reference.activation(half, kind))


@pytest.mark.usefixtures("portable_kernels")
def test_the_portable_products_are_the_reference() -> None:
    weight, bias = torch.randn(48, 32), torch.randn(48)
    for rows in (0, 1, 2, 50):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(ops.linear(x, weight, bias), reference.linear(x, weight, bias))
        half = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
        assert torch.equal(ops.linear(*half), reference.linear(*half))


@pytest.mark.usefixtures("portable_kernels")
def test_the_portable_ones_refuse_activations_by_the_same_words() -> None:
    with pytest.raises(ValueError, match="no activation 'swoosh'; there are silu"):
        ops.gated(torch.zeros(1, 2), "swoosh")
