"""Products of inputs that are rounded to e4m3, beside torch's rounding and the formula in float64."""

from __future__ import annotations

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
from worker.kernels import check
from worker.kernels.cuda.capabilities import MANY_ROWS, Card
from worker.kernels.cuda.launch import collecting
from worker.kernels.cuda.operations import cuda_operations
from worker.kernels.cuda.products import packing, rounded
from worker.kernels.cuda.products.packing import Packed

BF16, FP16 = torch.bfloat16, torch.float16
ADA, HOPPER = Card(89, 4), Card(90, 4)
BY_TRITON = Card(90, 4, scaled_mm=False)
TOLERANCE = 2**-7
ROWS = MANY_ROWS + 3


def matrix(
    outputs: int,
    inputs: int,
    group: int,
    dtype: torch.dtype = BF16,
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
    return Grouped(codes, 8, group, scales, None, inputs, dtype, kind=E4M3, **bits)  # pyright: ignore


def packed(given: Grouped) -> Packed:
    made = packing.pack(check.moved(given, DEVICE))
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


def rows_of(count: int, inputs: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows of different sizes in a wider tensor that is NaN beside them; one is zero."""
    held = torch.full((count, inputs + 5), float("nan"), dtype=dtype)
    held[:, :inputs] = torch.randn(count, inputs) * torch.rand(count, 1) * 20
    held[count // 2, :inputs] = 0
    return held[:, :inputs]


def multiply(
    card: Card, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, wide: bool = False
) -> Tensor:
    bias = None if bias is None else bias.to(DEVICE)
    return cuda_operations(card)["linear"](x.to(DEVICE), weight, bias, wide=wide).cpu()


def assert_close(out: Tensor, expected: Tensor) -> None:
    error = (out.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE, error


@pytest.mark.turns
@pytest.mark.parametrize(("inputs", "group"), [(300, 0), (1100, 0), (300, 128), (1152, 128)])
def test_rows_are_rounded_as_torch_rounds_them(inputs: int, group: int) -> None:
    weight, x = packed(matrix(16, inputs, group)), rows_of(19, inputs)
    made = rounded.round_inputs(x.to(DEVICE), weight)
    numbers, scales = made.numbers, made.scales
    assert numbers.shape == (32, weight.width)
    assert scales.stride() == ((1, 32) if group else (1, 1))
    codes, spread = rounded_by_torch(x, group)
    widths = [min(group or inputs, inputs - start) for start in range(0, inputs, group or inputs)]
    columns = zip(scales.cpu()[:19].split(1, 1), widths, strict=True)
    found = torch.cat([column.expand(-1, width) for column, width in columns], 1)
    torch.testing.assert_close(found, spread, atol=0, rtol=1e-6)
    found = numbers.cpu()[:19].view(torch.uint8)
    assert (found[:, :inputs] != codes).float().mean() < 1e-3  # a quotient beside a border may differ
    assert (found[:, inputs:] == 0).all()


@pytest.mark.turns
@pytest.mark.parametrize("card", [ADA, HOPPER, BY_TRITON], ids=["8.9", "9.0", "by Triton"])
@pytest.mark.parametrize("outputs", [96, 101])
def test_products_with_scales_of_rows(card: Card, outputs: int) -> None:
    given = matrix(outputs, 300, 0)
    weight, x, bias = packed(given), rows_of(ROWS, 300), torch.randn(outputs).to(BF16)
    assert_close(multiply(card, x, weight), exact(x, given))
    assert_close(multiply(card, x, weight, bias), exact(x, given) + bias.double())
    wide = multiply(card, x, weight, wide=True)
    assert wide.dtype == torch.float32
    assert_close(wide, exact(x, given))


@pytest.mark.turns
@pytest.mark.parametrize("inputs", [256, 300])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_products_with_scales_of_groups(inputs: int, dtype: torch.dtype) -> None:
    given = matrix(101, inputs, 128, dtype)
    weight, x, bias = packed(given), rows_of(ROWS, inputs, dtype), torch.randn(101).to(dtype)
    out = multiply(HOPPER, x, weight, bias)
    assert out.dtype == dtype
    assert_close(out, exact(x, given) + bias.double())


def blocks_by_hand(
    x: Tensor, matrix: Tensor, of_x: Tensor, form_x: ScalingType, of_matrix: Tensor, form: ScalingType
) -> Tensor:
    """What torch's product of blocks computes on a card of 9.0; no other device has it."""
    assert (form_x, form) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    groups = x.shape[1] // 128
    wide_x = x.double() * of_x.repeat_interleave(128, 1)
    wide = matrix.double() * of_matrix[:groups].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (wide_x @ wide).to(BF16)


@pytest.mark.turns
@pytest.mark.parametrize("inputs", [256, 640])
def test_blocks_are_multiplied_by_torch_on_hopper(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own rules for this product are those of its shapes on "meta": it takes what it is given."""
    given = matrix(256, inputs, 128, blocks=True)
    weight, x, bias = packed(given), rows_of(ROWS, inputs), torch.randn(256).to(BF16)
    nowhere = torch.device("meta")
    on_meta = packing.pack(check.moved(given, nowhere))
    assert on_meta is not None
    with collecting() as calls:
        out = cuda_operations(HOPPER)["linear"](x.to(nowhere), on_meta)
    assert (out.shape, out.dtype) == ((ROWS, 256), BF16)
    assert [call.kernel.__name__ for call in calls] == ["round_rows"]
    if DEVICE.type == "cpu":
        monkeypatch.setattr(rounded, "scaled_mm", blocks_by_hand)
    assert_close(multiply(HOPPER, x, weight, bias), exact(x, given) + bias.double())


def test_few_rows_and_old_cards_keep_16_bits() -> None:
    given = matrix(96, 256, 0)
    weight = packed(given)
    for card, rows in ((HOPPER, MANY_ROWS - 1), (Card(80, 4), ROWS)):
        x = rows_of(rows, 256)
        assert_close(multiply(card, x, weight), x.double() @ given.widened(torch.float64).t())


def test_inputs_are_rounded_only_where_the_checkpoint_wants_it() -> None:
    given = matrix(128, 256, 128, blocks=True)
    assert packed(given).blocks is not None
    assert packed(matrix(128, 256, 128)).blocks is None
    for other in (
        replace(given, input_bits=16),
        replace(given, dtype=torch.float32),
        replace(given, scales=given.scales.half()),
        replace(given, group=64, scales=torch.rand(128, 4)),
    ):
        assert not packed(other).rounds_inputs
    operations, moved = cuda_operations(HOPPER), check.moved(given, DEVICE)
    assert operations["pack"](moved).rounds_inputs
    assert not operations["pack"](moved, wide=True).rounds_inputs, "a head's inputs keep their bits"
    experts = operations["collect_experts"]([operations["pack"](moved) for _ in range(2)])
    assert not any(matrix.rounds_inputs for matrix in experts)
    assert rounded.describe_rounding([packed(given), given.scales], 128) == (
        "inputs of 1 matrices in e4m3 are rounded to 8 bits in steps of 128 tokens and more; in shorter "
        "ones they keep 16"
    )
    assert rounded.describe_rounding([given.scales], 128) is None


@pytest.mark.turns
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
    assert "torch's products in 8 bits fail on this card, so our own kernel multiplies" in caplog.text


SCALE = 0.01
"""A scale that a checkpoint has for all inputs, with which numbers from 4.48 on become the largest one."""


def static(inputs: int, scale: float | None = SCALE) -> Grouped:
    return matrix(32, inputs, 0, input_scale=scale)


@pytest.mark.turns
@pytest.mark.parametrize("card", [ADA, Card(89, 4, scaled_mm=False)], ids=["by torch", "by Triton"])
@pytest.mark.parametrize("inputs", [300, 1100])
def test_inputs_of_long_steps_are_rounded_by_the_scale(inputs: int, card: Card) -> None:
    given, x = static(inputs), torch.randn(ROWS, inputs) * 2
    weight, plain = packed(given), given.widened(torch.float64)
    x[3] *= 20
    assert (x > 448 * SCALE).any()
    x = x.to(BF16)
    numbers = (x.float() / torch.tensor(SCALE)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert_close(multiply(card, x, weight), numbers.double() * SCALE @ plain.t())
    few = x[: MANY_ROWS - 1]
    assert_close(multiply(card, few, weight), few.double() @ plain.t())


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
    line = rounded.describe_rounding(
        [packed(each) for each in (static(64), static(64, None), static(64))], 128
    )
    assert line is not None
    assert line.startswith(
        "inputs of 3 matrices in e4m3 are rounded to 8 bits in steps of 128 tokens and more"
    )
    assert ", 2 of them by scales of the checkpoint; in" in line
