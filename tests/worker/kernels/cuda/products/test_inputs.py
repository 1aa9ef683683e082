"""Rows that norms and gates round as they compute them: as a launch of its own rounds them, and never old."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreted import DEVICE  # before any kernel is imported
from torch import Tensor

from models.ops.grouped_matrix import Grouped
from models.weight_coding import E4M3
from worker.kernels import check
from worker.kernels.cuda import table
from worker.kernels.cuda.card import Card
from worker.kernels.cuda.launch import Call, taking
from worker.kernels.cuda.products import inputs as inputs_module
from worker.kernels.cuda.products.inputs import WithRounded, rounded_rows
from worker.kernels.cuda.products.packing import Packed
from worker.kernels.cuda.products.rounded import round_inputs
from worker.kernels.cuda.tiles import MANY_ROWS

BF16 = torch.bfloat16
HOPPER = Card(90, 4)
FEW, ROWS = 19, MANY_ROWS + 3
Compute = Callable[[table.Table, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:  # pyright: ignore[reportUnusedFunction]
    torch.manual_seed(0)


def values(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def matrix(inputs: int, group: int, *, input_bits: int = 8, dtype: torch.dtype = BF16) -> Grouped:
    codes = torch.randn(16, inputs).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(16, -(-inputs // group) if group else 1) + 0.5
    return Grouped(codes, 8, group, scales, None, inputs, dtype, input_bits=input_bits, kind=E4M3)


def opened(*matrices: Grouped, card: Card = HOPPER) -> tuple[table.Table, list[Packed]]:
    """The operations of a card, and matrices that they have packed."""
    operations = table.bind(card)
    return operations, [operations["pack"](check.moved(each, DEVICE)) for each in matrices]


def norm(operations: table.Table, x: Tensor) -> Tensor:
    return operations["rms_norm"](x, torch.ones(x.shape[1], dtype=BF16, device=DEVICE), 1e-5)


MAKERS: dict[str, tuple[int, Compute]] = {
    "rms_norm": (1, norm),
    "add_rms_norm": (1, lambda table, x: table["add_rms_norm"](x, x, x[1].clone(), 1e-5)[0]),
    "layer_norm": (1, lambda table, x: table["layer_norm"](x, x[1].clone(), x[2].clone(), 1e-5)),
    "add_layer_norm": (1, lambda table, x: table["add_layer_norm"](x, x, x[1].clone(), None, 1e-5)[0]),
    "gated_linear": (
        2,
        lambda table, x: table["gated_linear"](x, torch.eye(x.shape[1], dtype=BF16).to(DEVICE), None, "silu"),
    ),
    "linear": (
        1,
        lambda table, x: table["linear"](x, torch.eye(x.shape[1], dtype=BF16).to(DEVICE), kind="gelu"),
    ),
}
"""What makes rows that products read: how many times as wide its input is, and the call."""


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(("inputs", "group"), [(70, 0), (1100, 0), (70, 128), (1100, 128), (1152, 128)])
def test_rows_are_rounded_as_by_a_launch_of_its_own(
    maker: str, inputs: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that products read: numbers, the zeros behind them, and scales; of the rows that there are."""
    monkeypatch.setattr(inputs_module, "MANY_ROWS", FEW)  # which takes less time
    times, compute = MAKERS[maker]
    operations, (weight,) = opened(matrix(inputs, group))
    x = values(FEW, times * inputs)
    x[5] = 0
    out = compute(operations, x)
    found = rounded_rows(out, weight)
    assert found is not None
    assert type(out + 0) is Tensor
    plain = compute(table.bind(HOPPER), x)
    assert type(plain) is Tensor, "nothing was packed that reads 8 bits"
    assert torch.equal(out.as_subclass(Tensor), plain)
    again = round_inputs(plain, weight)
    assert torch.equal(found.numbers[:FEW].view(torch.uint8), again.numbers[:FEW].view(torch.uint8))
    assert torch.equal(found.scales[:FEW], again.scales[:FEW])
    assert (found.numbers.shape, found.scales.stride()) == (again.numbers.shape, again.scales.stride())


@pytest.mark.parametrize("group", [0, 128])
def test_all_products_of_an_input_read_what_was_rounded_once(group: int) -> None:
    operations, weights = opened(matrix(256, group), matrix(256, group))
    calls: list[str] = []

    def started(call: Call) -> None:
        calls.append(call.kernel.__name__)
        call.start()

    with taking(started):
        x = norm(operations, values(ROWS, 256))
        products = [operations["linear"](x, weight) for weight in weights]
    assert "round_rows" not in calls
    for product, weight in zip(products, weights, strict=True):
        assert torch.equal(product, operations["linear"](x.clone(), weight)), "a copy is rounded anew"


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.mul_(3),
    "an element": lambda x: x.__setitem__(2, 7.0),
    "through a view": lambda x: x[:, :9].zero_(),
    "through one of several": lambda x: x.chunk(2, dim=1)[1].zero_(),
    "as the result of another": lambda x: torch.add(x, 5, out=x),
    "by its data": lambda x: x.data.fill_(2),
    "as ranks add up": lambda x: x.contiguous().as_subclass(Tensor).neg_(),
    "in a list": lambda x: torch._foreach_mul_([x], 3.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_rows_that_were_written_to_are_rounded_anew(write: str) -> None:
    operations, (weight,) = opened(matrix(256, 0))
    x = norm(operations, values(ROWS, 256))
    assert isinstance(x, WithRounded)
    assert x.rounded is not None
    before = operations["linear"](x, weight)
    WRITES[write](x)
    assert x.rounded is None
    after = operations["linear"](x, weight)
    assert torch.equal(after, operations["linear"](x.clone(), weight))
    assert not torch.equal(after, before)


def test_reading_rows_keeps_what_was_rounded() -> None:
    operations, (weight,) = opened(matrix(256, 0))
    x = norm(operations, values(ROWS, 256))
    router = torch.randn(8, 256, device=DEVICE)
    assert (x.shape, x.dtype, len(x), x.stride(1)) == ((ROWS, 256), BF16, ROWS, 1)
    torch.nn.functional.linear(x.float(), router)
    assert isinstance(x, WithRounded)
    assert rounded_rows(x, weight) is not None


def test_a_product_of_another_form_rounds_by_itself() -> None:
    operations, weights = opened(matrix(256, 0), matrix(256, 128))
    x = norm(operations, values(ROWS, 256))
    for weight in weights:
        assert torch.equal(operations["linear"](x, weight), operations["linear"](x.clone(), weight))


def test_rows_are_rounded_only_where_a_product_may_read_them() -> None:
    given = matrix(256, 0)
    operations, _ = opened(given)
    x = values(ROWS, 256)
    assert isinstance(norm(operations, x), WithRounded)
    for other in (
        norm(operations, x[: MANY_ROWS - 1]),
        norm(operations, values(ROWS, 192)),
        norm(operations, x.float()),
        operations["rms_norm"](x.view(ROWS, 2, 128), torch.ones(128, dtype=BF16, device=DEVICE), 1e-5),
        norm(opened(given, card=Card(80, 4))[0], x),
        norm(opened(matrix(256, 0, input_bits=16))[0], x),
    ):
        assert type(other) is Tensor
