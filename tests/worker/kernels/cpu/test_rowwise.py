"""Embeddings, norms, sums, merged rows and activations of the C kernels, for every level of this machine."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from forms import FORMS, Shape
from torch import Tensor

from models.ops import encoder_ops, pooling_ops, reference
from models.ops.pooling_ops import Segments
from models.pooling.pooling_modes import MERGERS
from models.pooling.sentence_files import Mode
from worker.kernels.cpu import torch_operations
from worker.kernels.cpu.operations import Table
from worker.kernels.cpu.packing import Packed

KINDS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
"""Types of rows and of weights."""
WIDTHS = [1, 7, 16, 64, 67, 576]
EPS = 1e-5


def assert_rounded(out: Tensor, expected: Tensor) -> None:
    """Compare with float64 in the digits that `out` has."""
    tolerance = 4e-6 if out.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "weights"), KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_equal_the_formula(table: Table, dtype: torch.dtype, weights: torch.dtype, width: int) -> None:
    x, residual = torch.randn(2, 300, width).to(dtype) * 3 + 1
    weight, bias = torch.randn(2, width).to(weights)
    total = residual + x
    for given, expected in ((x, x.double()), (total, total.double())):
        assert_rounded(
            table["rms_norm"](given, weight, EPS), reference.rms_norm(expected, weight.double(), EPS)
        )
    normed, added = table["add_rms_norm"](x, residual, weight, EPS)
    assert torch.equal(added, total)
    assert torch.equal(normed, table["rms_norm"](total, weight, EPS))
    wider = torch.cat([x, residual[:, :3]], dim=1)
    normed = torch.cat([table["rms_norm"](x, weight, EPS), residual[:, :3]], dim=1)
    assert torch.equal(table["front_rms_norm"](wider, weight, EPS), normed)

    exact = reference.layer_norm(x.double(), weight.double(), bias.double(), EPS)
    assert_near_layer_norm(table["layer_norm"](x, weight, bias, EPS), exact)
    exact = reference.layer_norm(x.double(), weight.double(), None, EPS)
    assert_near_layer_norm(table["layer_norm"](x, weight, None, EPS), exact)
    normed, added = table["add_layer_norm"](x, residual, weight, bias, EPS)
    assert torch.equal(added, total)
    assert torch.equal(normed, table["layer_norm"](total, weight, bias, EPS))


def assert_near_layer_norm(out: Tensor, expected: Tensor) -> None:
    """Subtracting a mean costs digits."""
    tolerance = 3e-5 if out.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_are_torchs(table: Table, dtype: torch.dtype, width: int) -> None:
    wide, x = torch.randn(2, 300, 3 * width).to(dtype).unbind()
    x = x[:, :width]
    for y in (wide[:, width : 2 * width], wide[0, :width], wide[:, 0:1].expand(-1, width)):
        total = table["add"](x, y)
        assert torch.equal(total, x + y)
        assert torch.equal(table["add"](x[7:8], y[7:8] if y.dim() == 2 else y), total[7:8])
    assert torch.equal(table["add"](x, wide[:1, :1]), x + wide[:1, :1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_multiples_are_torchs(table: Table, dtype: torch.dtype, width: int) -> None:
    wide = torch.randn(300, 3 * width).to(dtype)
    for x in (wide, wide[:, width : 2 * width], wide[:1]):
        for factor in (0.22, 5.656854249492381, -3.0):
            assert torch.equal(table["scale"](x, factor), x * factor)


def test_rows_need_not_be_contiguous_and_have_any_shape(table: Table) -> None:
    weight = torch.randn(12)
    wide = torch.randn(9, 40)
    for x in (
        wide[:, 5:17],
        wide[::2, :12],
        torch.randn(3, 4, 12),
        torch.randn(4, 30, 3).transpose(0, 1)[:, :, 0:1].expand(-1, -1, 12),
    ):
        assert torch.equal(table["rms_norm"](x, weight, EPS), table["rms_norm"](x.clone(), weight, EPS))
        assert torch.equal(table["activation"](x, "silu"), table["activation"](x.clone(), "silu"))
        assert torch.equal(table["gated"](x, "silu"), table["gated"](x.clone(), "silu"))


def test_a_row_has_the_same_bits_in_every_batch(table: Table) -> None:
    x, weight, bias = torch.randn(500, 67), torch.randn(67), torch.randn(67)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda rows: table["rms_norm"](rows, weight, EPS),
        lambda rows: table["layer_norm"](rows, weight, bias, EPS),
        lambda rows: table["activation"](rows, "gelu"),
    ]
    for call in calls:
        whole = call(x)
        assert all(torch.equal(call(x[-rows:]), whole[-rows:]) for rows in (1, 3, 50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "side", "depth", "merge"),
    [((3, 37, 29, 3), 4, 2, 2), ((1, 16, 16, 3), 16, 1, 1), ((2, 30, 33, 3), 7, 3, 2)],
)
def test_patches_are_those_of_the_reference(
    table: Table, dtype: torch.dtype, shape: tuple[int, ...], side: int, depth: int, merge: int
) -> None:
    pixels, levels = torch.randint(0, 256, shape, dtype=torch.uint8), torch.randn(3, 256).to(dtype)
    expected = encoder_ops.patches(pixels, levels, side, depth=depth, merge=merge)
    assert torch.equal(table["patches"](pixels, levels, side, depth=depth, merge=merge), expected)
    with pytest.raises(ValueError, match="patches"):
        table["patches"](pixels, levels[:, :-1].float().contiguous(), side)


def test_nan_stays_in_the_row_of_a_norm(table: Table) -> None:
    x, weight = torch.randn(5, 67), torch.randn(67)
    x[2, 66] = torch.nan
    for out in (table["rms_norm"](x, weight, EPS), table["layer_norm"](x, weight, None, EPS)):
        assert out.isnan().all(dim=1).tolist() == [False, False, True, False, False]
        assert not out[[0, 1, 3, 4]].isnan().any()


def test_the_reference_computes_types_that_kernels_do_not_know(table: Table) -> None:
    x, weight = torch.randn(5, 67).half(), torch.randn(67).half()
    assert torch.equal(table["rms_norm"](x, weight, EPS), reference.rms_norm(x, weight, EPS))
    assert torch.equal(table["activation"](x, "silu"), reference.activation(x, "silu"))
    assert torch.equal(table["add"](x, weight), x + weight)
    assert table["add"](x, weight.float()).dtype == torch.float32
    half = torch.randn(67).bfloat16()  # narrower than the rows
    out = table["rms_norm"](x.float(), half, EPS)
    assert torch.equal(out, reference.rms_norm(x.float(), half, EPS))


ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_are_right_everywhere(table: Table, kind: str) -> None:
    x = torch.cat([torch.linspace(-130, 130, 20011), torch.linspace(-6, 6, 20011)])
    out = table["activation"](x[None], kind)[0]
    torch.testing.assert_close(
        out.double(),
        reference.activation(x.double(), kind),
        rtol=3e-6,
        atol=2e-6 if "gelu" in kind else 1e-30,
    )
    half = table["activation"](x.bfloat16()[None], kind)[0]
    torch.testing.assert_close(
        half.double(), reference.activation(x.bfloat16().double(), kind), rtol=2**-8, atol=1e-5
    )


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_keep_infinity_and_nan(table: Table, kind: str) -> None:
    x = torch.tensor([[torch.nan, torch.inf, 1.0]])
    out = table["activation"](x, kind)[0]
    assert out[0].isnan()
    assert out[1] == torch.inf


@pytest.mark.parametrize("width", [1, 67])
def test_xielu(table: Table, width: int) -> None:
    x, curves = torch.randn(900, 2 * width)[:, :width] * 4, torch.tensor([0.8, 1.3])
    exact = reference.xielu(x.double(), curves)
    torch.testing.assert_close(table["xielu"](x, curves).double(), exact.double(), rtol=3e-6, atol=1e-6)
    half = table["xielu"](x.bfloat16(), curves)
    torch.testing.assert_close(half, reference.xielu(x.bfloat16(), curves), rtol=2**-8, atol=1e-6)


def test_gates(table: Table) -> None:
    x = torch.randn(9, 134)
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 2**-7)):
        out = table["gated"](x.to(dtype), "silu")
        expected = reference.gated(x.to(dtype).double(), "silu")
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_an_unknown_activation_is_refused(table: Table) -> None:
    with pytest.raises(ValueError, match="no activation 'tanh'"):
        table["activation"](torch.randn(2, 3), "tanh")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 67, 4000])
def test_embeddings_are_copied(table: Table, dtype: torch.dtype, width: int) -> None:
    weight, ids = torch.randn(40, width).to(dtype), torch.randint(40, (300,))
    for given in (ids, ids[:0], ids[::3]):
        assert torch.equal(table["embed"](given, weight), reference.embed(given, weight))
    apart = torch.randn(40, 2 * width).to(dtype)[:, :width]
    assert torch.equal(table["embed"](ids, apart), reference.embed(ids, apart))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_unknown_id_is_nan_and_changes_no_other_row(table: Table, dtype: torch.dtype) -> None:
    weight = torch.randn(5, 9).to(dtype)
    rows = table["embed"](torch.tensor([4, 5, 0, -1, 1 << 40]), weight)
    assert rows.isnan().all(1).tolist() == [False, True, False, True, True]
    assert torch.equal(rows[[0, 2]], weight[[4, 0]])


@pytest.mark.parametrize("pairs", [1, 20, 64])
def test_angles_are_exact_far_from_the_beginning(table: Table, pairs: int) -> None:
    positions = torch.cat([torch.arange(100), torch.tensor([1_000_003, 131_071])])
    frequencies = 10_000.0 ** -(torch.arange(pairs) / pairs)
    turned = (positions.float()[:, None] * frequencies).double()
    exact = torch.cat([turned.cos(), turned.sin()], -1) * 1.25
    found = table["angles"](positions, frequencies, 1.25)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-7)
    torch.testing.assert_close(found, reference.angles(positions, frequencies, 1.25), rtol=0, atol=4e-7)


def test_a_position_has_the_same_bits_in_every_batch(table: Table) -> None:
    positions, frequencies = torch.randperm(5000), torch.rand(32)
    whole = table["angles"](positions, frequencies, 1.0)
    for at in (0, 77, 4999):
        assert torch.equal(table["angles"](positions[at : at + 1], frequencies, 1.0)[0], whole[at])


def test_equal_axes_give_the_bits_of_positions(table: Table) -> None:
    positions, frequencies, axes = torch.randperm(3000), torch.rand(32), torch.arange(32) % 3
    found = table["angles"](positions.expand(3, -1).contiguous(), frequencies, 1.5, axes)
    assert torch.equal(found, table["angles"](positions, frequencies, 1.5))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_quantized_embeddings_are_widened(table: Table, name: str, dtype: torch.dtype) -> None:
    """Rows are those of the plain matrix, bit for bit, and logits come from the same bytes."""
    matrix = replace(FORMS[name](Shape(70, 720)), dtype=dtype)
    packed, ids = table["pack"](matrix, wide=True), torch.tensor([0, 69, 31, 32, 5, 5])
    assert type(packed) is Packed
    rows = table["embed"](ids, packed)
    assert torch.equal(rows, matrix.widened()[ids])
    assert table["embed"](torch.tensor([3, 70, -1]), packed).isnan().all(1).tolist() == [False, True, True]
    plain = torch_operations.linear_operations(None)
    assert torch.equal(plain["embed"](ids, plain["pack"](matrix, wide=True)), rows)


def in_words(places: list[tuple[int, int, int]]) -> Tensor:
    return torch.tensor(places, dtype=torch.int32)


def pooled(table: Table, x: Tensor, mode: Mode = "MEAN") -> Tensor:
    """The rows of a text without the first of them, which is followed by another text."""
    more = torch.cat([x[:1], x, x[:1], x[:1]])
    segments = Segments.packed([len(x) + 1, 2], [1, 0], in_words)
    return table["pool"](more, segments, mode, MERGERS[mode])[:1]


MERGED_WIDTHS = [1, 7, 16, 64, 67, 384]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", MERGED_WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 300])
def test_merged_rows(table: Table, dtype: torch.dtype, width: int, rows: int) -> None:
    x = (torch.randn(rows, width) + 1).to(dtype)
    for mode, merge in MERGERS.items():
        out = pooled(table, x, mode)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), merge(x.double(), 1).double(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("width", MERGED_WIDTHS)
def test_a_mean_has_the_same_bits_in_any_memory_and_by_any_threads(table: Table, width: int) -> None:
    """The text is long enough for both threads, and a part of wider rows."""
    x = torch.randn(3000, width + 3)
    segments = Segments([(100, 100, 2900)], in_words([(100, 100, 2900)]))
    alone = pooled(table, x[100:2900, 1:-2].contiguous())
    assert torch.equal(table["pool"](x[:, 1:-2], segments, "MEAN", MERGERS["MEAN"]), alone)


@pytest.mark.parametrize("width", MERGED_WIDTHS)
@pytest.mark.parametrize("rows", [1, 5, 3000])
def test_rows_of_length_1(table: Table, width: int, rows: int) -> None:
    x = torch.randn(rows, width + 1) * 3
    x[0] = 0
    for given in (x[:, :-1], x[:, 1:].contiguous()):
        expected = torch.nn.functional.normalize(given.double(), dim=-1)
        torch.testing.assert_close(table["normalize"](given).double(), expected, rtol=1e-6, atol=1e-6)


def test_infinity_and_nan_are_kept(table: Table) -> None:
    x = torch.ones(4, 20)
    x[1, 17], x[2, 3] = torch.nan, torch.inf
    assert pooled(table, x).isfinite().tolist()[0] == [i not in (3, 17) for i in range(20)]
    assert table["normalize"](x).isfinite().all(1).tolist() == [True, False, False, True]


def test_the_reference_computes_columns_apart_in_memory(table: Table) -> None:
    x = torch.randn(20, 30).t()
    segments = Segments.packed([20], [0], in_words)
    expected = pooling_ops.pool(x, segments, "MEAN", MERGERS["MEAN"])
    assert torch.equal(table["pool"](x, segments, "MEAN", MERGERS["MEAN"]), expected)
    assert torch.equal(table["normalize"](x), pooling_ops.normalize(x))
