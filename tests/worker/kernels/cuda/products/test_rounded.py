"""Products of inputs that are rounded to e4m3, beside torch's rounding and the formula in float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import DEVICE  # before any kernel is imported
from packed_floats import write_floats
from tiny import tiny_checkpoint
from torch import Tensor
from torch.nn.functional import ScalingType

from models import ops
from models.config import read_config
from models.loader import LoadOptions, load_model
from models.ops.grouped_matrix import Grouped, stacked
from models.weight_coding import E4M3
from worker.kernels.compare_with_reference import moved
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.launch import collecting
from worker.kernels.cuda.operations import cuda_operations
from worker.kernels.cuda.products import packing, rounded
from worker.kernels.cuda.products.packing import Packed

BF16 = torch.bfloat16
ADA, HOPPER = Card(89, 4), Card(90, 4)
TOLERANCE = 2**-7
COUNTS = 1, 19, 131
"""Rows of steps: all of them have products of the same kind."""


def matrix(
    outputs: int,
    inputs: int,
    group: int,
    *,
    blocks: bool = False,
    input_scale: float | None = None,
) -> Grouped:
    """A matrix in e4m3 whose rows, groups or blocks of 128 x 128 have scales of their own."""
    codes = torch.randn(outputs, inputs).to(torch.float8_e4m3fn).view(torch.uint8)
    groups = -(-inputs // group) if group else 1
    scales = torch.rand(outputs, groups) + 0.5
    if blocks:
        scales = scales[::128].repeat_interleave(128, 0)[:outputs]
    bits = {"input_bits": 8, "input_scale": input_scale}
    return Grouped(codes, 8, group, scales, None, inputs, BF16, kind=E4M3, **bits)  # pyright: ignore


def packed(given: Grouped) -> Packed:
    made = packing.pack(moved(given, DEVICE))
    assert made is not None
    return made


def rounded_by_torch(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The numbers of each group in e4m3, and what each is multiplied with."""
    pieces = x.float().split(group or x.shape[1], dim=1)
    scales = [(piece.abs().amax(1, keepdim=True) / 448).clamp_min(1e-12) for piece in pieces]
    numbers = [(piece / scale).to(torch.float8_e4m3fn) for piece, scale in zip(pieces, scales, strict=True)]
    spread = [scale.expand_as(piece) for piece, scale in zip(pieces, scales, strict=True)]
    return torch.cat([each.view(torch.uint8) for each in numbers], 1), torch.cat(spread, 1)


def exact(x: Tensor, given: Grouped) -> Tensor:
    codes, spread = rounded_by_torch(x, given.group)
    return (codes.view(torch.float8_e4m3fn).double() * spread) @ given.widened(torch.float64).t()


def rows_of(count: int, inputs: int) -> Tensor:
    """Rows of different sizes in a wider tensor that is NaN beside them; one is zero."""
    held = torch.full((count, inputs + 5), float("nan"), dtype=BF16)
    held[:, :inputs] = torch.randn(count, inputs) * torch.rand(count, 1) * 20
    held[count // 2, :inputs] *= count == 1
    return held[:, :inputs]


def multiply(
    card: Card, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, wide: bool = False
) -> Tensor:
    bias = None if bias is None else bias.to(DEVICE)
    return cuda_operations(card)["linear"](x.to(DEVICE), weight, bias, wide=wide).cpu()


def assert_close(out: Tensor, expected: Tensor) -> None:
    error = (out.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE, error


@pytest.mark.parametrize(("inputs", "group"), [(300, 0), (8300, 0), (300, 128), (1152, 128)])
def test_rows_are_rounded_as_torch_rounds_them(inputs: int, group: int) -> None:
    weight, x = packed(matrix(16, inputs, group)), rows_of(19, inputs)
    made = rounded.round_inputs(x.to(DEVICE), weight)
    numbers, scales = made.numbers, made.scales
    filled = 32 if group else 64
    assert numbers.shape == (filled, weight.width)
    assert scales.stride() == ((1, filled) if group else (1, 1))
    codes, spread = rounded_by_torch(x, group)
    widths = [min(group or inputs, inputs - start) for start in range(0, inputs, group or inputs)]
    columns = zip(scales.cpu()[:19].split(1, 1), widths, strict=True)
    found = torch.cat([column.expand(-1, width) for column, width in columns], 1)
    torch.testing.assert_close(found, spread, atol=0, rtol=1e-6)
    found = numbers.cpu()[:19].view(torch.uint8)
    assert (found[:, :inputs] != codes).float().mean() < 1e-3  # a quotient beside a border may differ
    assert (found[:, inputs:] == 0).all()


@pytest.mark.parametrize("card", [ADA, HOPPER], ids=["8.9", "9.0"])
@pytest.mark.parametrize("rows", COUNTS)
def test_products_with_scales_of_rows(card: Card, rows: int) -> None:
    given = matrix(96, 300, 0)
    weight, x, bias = packed(given), rows_of(rows, 300), torch.randn(96).to(BF16)
    assert_close(multiply(card, x, weight), exact(x, given))
    assert_close(multiply(card, x, weight, bias), exact(x, given) + bias.double())
    wide = multiply(card, x, weight, wide=True)
    assert wide.dtype == torch.float32
    assert_close(wide, exact(x, given))


def test_the_number_of_rows_does_not_change_how_one_is_rounded() -> None:
    weight, x = packed(matrix(96, 300, 0)), rows_of(131, 300)
    alone = torch.cat([multiply(HOPPER, x[row : row + 1], weight) for row in (0, 64, 130)])
    torch.testing.assert_close(alone, multiply(HOPPER, x, weight)[[0, 64, 130]], atol=0, rtol=2**-7)
    assert multiply(HOPPER, x[:0], weight).shape == (0, 96)


def blocks_by_hand(
    x: Tensor, matrix: Tensor, of_x: Tensor, form_x: ScalingType, of_matrix: Tensor, form: ScalingType
) -> Tensor:
    """What torch's product of blocks computes on a card of 9.0; no other device has it."""
    assert (form_x, form) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    groups = x.shape[1] // 128
    wide_x = x.double() * of_x.repeat_interleave(128, 1)
    wide = matrix.double() * of_matrix[:groups].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (wide_x @ wide).to(BF16)


@pytest.mark.parametrize(("inputs", "rows"), [(256, 1), (640, 131)])
def test_blocks_are_multiplied_on_hopper(inputs: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own rules for this product are those of its shapes on "meta": it takes what it is given."""
    given = matrix(256, inputs, 128, blocks=True)
    weight, x, bias = packed(given), rows_of(rows, inputs), torch.randn(256).to(BF16)
    nowhere = torch.device("meta")
    on_meta = packing.pack(moved(given, nowhere))
    assert on_meta is not None
    with collecting() as calls:
        out = cuda_operations(HOPPER)["linear"](x.to(nowhere), on_meta)
    assert (out.shape, out.dtype) == ((rows, 256), BF16)
    assert [call.kernel.__name__ for call in calls] == ["round_rows"]
    if DEVICE.type == "cpu":
        monkeypatch.setattr(rounded, "scaled_mm", blocks_by_hand)
    assert_close(multiply(HOPPER, x, weight, bias), exact(x, given) + bias.double())


def test_inputs_keep_16_bits_where_torch_does_not_multiply() -> None:
    """Cards before 8.9 have no such products, 8.9 has none of blocks, and 9.0 none that were found wrong."""
    rows, blocks = matrix(96, 256, 0), matrix(128, 256, 128, blocks=True)
    wrong = replace(HOPPER, scaled_mm=False)
    for card, given in ((Card(80, 4), rows), (wrong, rows), (ADA, blocks), (wrong, blocks)):
        x = rows_of(19, 256)
        assert_close(multiply(card, x, packed(given)), x.double() @ given.widened(torch.float64).t())


def test_inputs_are_rounded_only_where_the_checkpoint_wants_it() -> None:
    given = matrix(128, 256, 128, blocks=True)
    assert packed(given).blocks is not None
    assert packed(matrix(128, 256, 128)).blocks is None
    for other in (
        matrix(101, 256, 0),  # no multiple of 16
        matrix(128, 256, 128),  # groups that are no blocks
        replace(given, input_bits=16),
        replace(given, dtype=torch.float16),
        replace(given, scales=given.scales.half()),
        replace(given, group=64, scales=torch.rand(128, 4)),
    ):
        assert not packed(other).rounds_inputs
    operations, there = cuda_operations(HOPPER), moved(given, DEVICE)
    assert operations["pack"](there).rounds_inputs
    assert not operations["pack"](there, wide=True).rounds_inputs, "a head's inputs keep their bits"
    experts = operations["collect_experts"]([operations["pack"](there) for _ in range(2)])
    assert not any(matrix.rounds_inputs for matrix in experts)
    expected = "inputs of 1 matrices in e4m3 are rounded to 8 bits"
    assert rounded.describe_rounding([packed(given), given.scales], HOPPER) == expected
    for nothing, card in ((given.scales, HOPPER), (packed(given), ADA), (packed(given), Card(80, 4))):
        assert rounded.describe_rounding([nothing], card) is None


@pytest.mark.parametrize(("name", "rounds"), [("per tensor", True), ("FBGEMM's rows", True), ("rows", False)])
def test_checkpoints_say_whether_inputs_are_rounded(name: str, rounds: bool, tmp_path: Path) -> None:
    """Methods of fp8 mean inputs of 8 bits; compressed-tensors says so for each group of modules."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    source = tiny_checkpoint("LlamaForCausalLM", tmp_path / "source", **shape)
    folder, _ = write_floats(source, tmp_path, name)
    ops.use(cuda_operations(ADA))
    try:
        model = load_model(LoadOptions(read_config(folder), folder, dtype=BF16, device=DEVICE))
    finally:
        ops.use({})
    found = [matrix.rounds_inputs for matrix in model.parameters() if isinstance(matrix, Packed)]
    assert found == [rounds] * 4


def test_a_card_whose_products_are_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert rounded.torch_multiplies(ADA, DEVICE)
    if DEVICE.type == "cpu":
        assert not rounded.torch_multiplies(HOPPER, DEVICE)  # torch has no products of blocks on a CPU
        given = rounded.scaled_mm

        def by_any(x: Tensor, matrix: Tensor, of_x: Tensor, form_x: ScalingType, *rest: Any) -> Tensor:
            product = given if form_x == ScalingType.RowWise else blocks_by_hand
            return product(x, matrix, of_x, form_x, *rest)

        monkeypatch.setattr(rounded, "scaled_mm", by_any)
        assert rounded.torch_multiplies(HOPPER, DEVICE)
    monkeypatch.setattr(rounded, "scaled_mm", lambda x, y, *_: x.to(BF16) @ y.to(BF16))
    assert not rounded.torch_multiplies(ADA, DEVICE)
    assert "torch's products in 8 bits fail on this card, so inputs keep 16" in caplog.text


SCALE = 0.01
"""A scale that a checkpoint has for all inputs, with which numbers from 4.48 on become the largest one."""


def static(inputs: int, scale: float | None = SCALE) -> Grouped:
    return matrix(32, inputs, 0, input_scale=scale)


@pytest.mark.parametrize(("inputs", "rows"), [(300, 131), (1100, 4)])
def test_inputs_are_rounded_by_the_scale(inputs: int, rows: int) -> None:
    given, x = static(inputs), torch.randn(rows, inputs) * 2
    weight, plain = packed(given), given.widened(torch.float64)
    x[3] *= 20
    assert (x > 448 * SCALE).any()
    x = x.to(BF16)
    numbers = (x.float() / torch.tensor(SCALE)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert_close(multiply(ADA, x, weight), numbers.double() * SCALE @ plain.t())


def test_parts_of_a_matrix_share_the_largest_scale() -> None:
    """Nothing is cut off that would not be in a part by itself; without a scale of each there is none."""
    parts = [static(64, 0.5), static(64, 2.0), static(64, 1.0)]
    for given, scale in ((parts, 2), ([*parts, static(64, None)], None)):
        joined = stacked(given)
        assert isinstance(joined, Grouped)
        assert joined.input_scale == scale


def test_scales_are_used_where_rows_have_one_scale() -> None:
    given = replace(static(256), group=128, scales=torch.rand(32, 2))
    for other in (given, replace(static(256), input_bits=16)):
        assert packed(other).input_scale is None


def test_the_log_counts_scales_of_the_checkpoint() -> None:
    weights = [packed(each) for each in (static(64), static(64, None), static(64))]
    assert rounded.describe_rounding(weights, ADA) == (
        "inputs of 3 matrices in e4m3 are rounded to 8 bits, 2 of them by scales of the checkpoint"
    )
