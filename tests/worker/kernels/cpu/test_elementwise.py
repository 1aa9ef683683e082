"""Norms, sums and activations of the C kernels against float64, for every level that this machine can run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_levels import NAMES, table_of, use_threads
from torch import Tensor

from models.ops import reference
from worker.kernels.cpu.operations import Table

KINDS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
"""Types of rows and of weights."""
WIDTHS = [1, 7, 16, 64, 67, 576]
EPS = 1e-5


@pytest.fixture(params=NAMES)
def table(request: pytest.FixtureRequest) -> Table:
    torch.manual_seed(0)
    use_threads(request.param, 2)
    return table_of(request.param)


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


def test_nan_stays_in_its_row(table: Table) -> None:
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


ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "relu"]


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


def test_gates(table: Table) -> None:
    x = torch.randn(9, 134)
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 2**-7)):
        out = table["gated"](x.to(dtype), "silu")
        expected = reference.gated(x.to(dtype).double(), "silu")
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_an_unknown_activation_is_refused(table: Table) -> None:
    with pytest.raises(ValueError, match="no activation 'tanh'"):
        table["activation"](torch.randn(2, 3), "tanh")
