"""Tensors that do not fit each other are refused: the C kernels would read or write past their ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_levels import NAMES, table_of
from paged import make_cache, make_step
from torch import Tensor

from models.ops.attention_inputs import HeadPrep
from models.ops.pooling_ops import Segments
from models.pooling.pooling_modes import MERGERS
from worker.kernels.cpu.operations import Table

pytestmark = pytest.mark.skipif(not NAMES, reason="there are no C kernels for this processor")

TOKENS, HEADS, KV_HEADS, DIM, BLOCK = 6, 4, 2, 16, 4
STEP = make_step([5, 1], [5, 9], BLOCK)
KV = make_cache(STEP, KV_HEADS, DIM, torch.float32)
LAST = torch.zeros(1)


@pytest.fixture(scope="module")
def table() -> Table:
    return table_of(NAMES[0])


def heads(count: int, dim: int = DIM, tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, count, dim)


def refused(call: Callable[[], Any], operation: str) -> None:
    with pytest.raises(ValueError, match=rf"^{operation}: .*do not fit"):
        call()


FITTING = {"q": heads(HEADS), "k": heads(KV_HEADS), "v": heads(KV_HEADS), "kv": KV}
"""Arguments of `rotary_and_cache` that fit. JetMoe's code, for instance, passes as many keys as queries."""


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": heads(HEADS), "v": heads(HEADS)},
        {"k": heads(1), "v": heads(1)},
        {"v": heads(HEADS)},
        {"k": heads(KV_HEADS, tokens=2)},
        {"q": heads(HEADS, tokens=2), "k": heads(KV_HEADS, tokens=2), "v": heads(KV_HEADS, tokens=2)},
        {name: heads(count, 32) for name, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))},
        {"k": heads(KV_HEADS, 8), "v": heads(KV_HEADS, 8)},
        {"kv": make_cache(STEP, KV_HEADS, 8, torch.float32)},
        {"kv": make_cache(make_step([5, 1], [5, 9], 2), KV_HEADS, DIM, torch.float32)},
        {"cos_sin": torch.ones(TOKENS, 2 * DIM)},
        {"cos_sin": torch.ones(TOKENS, DIM - 1)},
        {"cos_sin": torch.ones(2, DIM)},
        {"q_norm": torch.ones(DIM // 2), "k_norm": torch.ones(DIM)},
        {"q_norm": torch.ones(DIM), "k_norm": torch.ones(1)},
    ],
    ids=lambda wrong: ", ".join(f"{name} {tuple(each.shape)}" for name, each in wrong.items()),
)
def test_heads_and_the_cache(table: Table, wrong: dict[str, Tensor]) -> None:
    table["rotary_and_cache"](**FITTING, context=STEP, prep=HeadPrep(torch.ones(TOKENS, DIM)))
    heads = {name: wrong.get(name, fitting) for name, fitting in FITTING.items()}
    prep = HeadPrep(**{name: wrong[name] for name in ("cos_sin", "q_norm", "k_norm") if name in wrong})
    refused(lambda: table["rotary_and_cache"](**heads, context=STEP, prep=prep), "rotary_and_cache")


@pytest.mark.parametrize("cos_sin", [torch.ones(TOKENS, DIM + 2), torch.ones(TOKENS, 3), torch.ones(5, DIM)])
def test_rotation(table: Table, cos_sin: Tensor) -> None:
    refused(lambda: table["rotate"](heads(HEADS), cos_sin), "rotate")


@pytest.mark.parametrize("q", [heads(3), heads(1), heads(HEADS, 32), heads(HEADS, 8), heads(HEADS, tokens=2)])
def test_queries_and_the_cache(table: Table, q: Tensor) -> None:
    refused(lambda: table["attention"](q, KV, STEP, scale=0.1), "attention")


@pytest.mark.parametrize("window", [0, -3])
def test_windows_that_show_nothing(table: Table, window: int) -> None:
    with pytest.raises(ValueError, match=f"attention: a window of {window} positions"):
        table["attention"](heads(HEADS), KV, STEP, scale=0.1, window=window)
    with pytest.raises(ValueError, match="encoder_attention: a window of -1 positions"):
        table["encoder_attention"](heads(2), heads(2), heads(2), STEP, scale=0.1, window=-1)


def test_other_blocks_than_the_caches(table: Table) -> None:
    refused(
        lambda: table["attention"](heads(HEADS), KV, make_step([5, 1], [5, 9], 2), scale=0.1), "attention"
    )


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        (heads(HEADS), heads(3), heads(3)),
        (heads(2), heads(HEADS), heads(HEADS)),
        (heads(HEADS), heads(HEADS), heads(2)),
        (heads(HEADS), heads(HEADS, 8), heads(HEADS, 8)),
        (heads(HEADS), heads(HEADS, tokens=2), heads(HEADS, tokens=2)),
        (heads(HEADS, tokens=2), heads(HEADS, tokens=2), heads(HEADS, tokens=2)),
    ],
)
def test_heads_of_encoders(table: Table, q: Tensor, k: Tensor, v: Tensor) -> None:
    refused(lambda: table["encoder_attention"](q, k, v, STEP, scale=0.1), "encoder_attention")


@pytest.mark.parametrize("bias", [torch.ones(2, 5), torch.ones(HEADS, 4), torch.ones(5)])
def test_biases_of_distances(table: Table, bias: Tensor) -> None:
    q, k, v = (heads(HEADS) for _ in range(3))
    refused(lambda: table["encoder_attention"](q, k, v, STEP, scale=0.1, bias=bias), "encoder_attention")


@pytest.mark.parametrize("weight", [torch.ones(4), torch.ones(16), torch.ones(1, 8)])
def test_norms(table: Table, weight: Tensor) -> None:
    x, fitting = torch.randn(3, 8), torch.ones(8)
    refused(lambda: table["rms_norm"](x, weight, 1e-5), "rms_norm")
    refused(lambda: table["add_rms_norm"](x, x, weight, 1e-5), "add_rms_norm")
    refused(lambda: table["layer_norm"](x, weight, None, 1e-5), "layer_norm")
    refused(lambda: table["layer_norm"](x, fitting, weight, 1e-5), "layer_norm")
    refused(lambda: table["add_layer_norm"](x, x, fitting, weight, 1e-5), "add_layer_norm")


def test_weights_of_norms_need_not_be_contiguous(table: Table) -> None:
    x, apart = torch.randn(3, 8), torch.randn(8, 2)[:, 0]
    near = torch.testing.assert_close
    near(table["rms_norm"](x, apart, 1e-5), table["rms_norm"](x, apart.clone(), 1e-5))
    norm, ones = table["layer_norm"], torch.ones(8)
    near(norm(x, ones, apart, 1e-5), norm(x, ones, apart.clone(), 1e-5))
    together, total = table["add_layer_norm"](x, x, ones, apart, 1e-5)
    near(together, norm(total, ones, apart.clone(), 1e-5))


def test_the_reference_refuses_biases_of_another_type(table: Table) -> None:
    x, weight, bias = torch.randn(3, 8).bfloat16(), torch.ones(8), torch.ones(8).bfloat16()
    with pytest.raises(RuntimeError, match="type"):
        table["layer_norm"](x, weight, bias, 1e-5)


def test_linear_layers(table: Table) -> None:
    x, packed = torch.randn(3, 8), table["pack"](torch.randn(6, 8))
    for bias in (torch.ones(3), torch.ones(7), torch.ones(1, 6), torch.ones(6).bfloat16()):
        refused(lambda bias=bias: table["linear"](x, packed, bias), "linear")
    gated = table["pack"](torch.randn(6, 8), gated=True)
    refused(lambda: table["gated_linear"](x, gated, torch.ones(3), "silu"), "linear")
    apart = torch.randn(6, 2)[:, 0]
    assert torch.equal(table["linear"](x, packed, apart), table["linear"](x, packed, apart.clone()))


def test_matrices(table: Table) -> None:
    refused(lambda: table["pack"](torch.randn(6, 8), torch.randn(2, 7)), "pack")
    refused(lambda: table["pack"](torch.randn(6, 8), torch.randn(2, 8).bfloat16()), "pack")
    refused(lambda: table["pack"](torch.randn(5, 8), gated=True), "pack")


def test_gates(table: Table) -> None:
    refused(lambda: table["gated"](torch.randn(3, 5), "silu"), "gated")


def test_numbers_of_tokens_and_positions(table: Table) -> None:
    """The reference looks up numbers of another type than the kernels read."""
    weight, numbers = torch.randn(9, 4), torch.tensor([3, 0, 8], dtype=torch.int32)
    assert torch.equal(table["embed"](numbers, weight), weight[numbers.long()])
    frequencies = torch.tensor([1.0, 0.1])
    expected = table["angles"](numbers.long(), frequencies, 1.0)
    torch.testing.assert_close(table["angles"](numbers, frequencies, 1.0), expected)
    torch.testing.assert_close(table["angles"](numbers.long(), frequencies.double(), 1.0).float(), expected)


@pytest.mark.parametrize("name", ["pool", "normalize", "activation", "rms_norm", "add"])
def test_nothing_at_all(table: Table, name: str) -> None:
    """Rows without columns, and no rows at all: nothing is divided by their number."""
    more: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
        "activation": lambda x: ("silu",),
        "rms_norm": lambda x: (torch.ones(x.shape[1]), 1e-5),
        "add": lambda x: (x,),
    }
    none = Segments([], torch.empty(0, 3, dtype=torch.int32))
    more["pool"] = lambda x: (none, "MEAN", MERGERS["MEAN"])
    for shape in ((0, 8), (3, 0)):
        x = torch.ones(shape)
        out = table[name](x, *more.get(name, lambda x: ())(x))
        assert out.shape[1] == shape[1]
