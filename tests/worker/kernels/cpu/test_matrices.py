"""What holds for products with matrices of every kind: plain, quantized when loaded, and quantized before."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from forms import FORMS, Shape, drawn, drawn_e4m3
from kernel_levels import NAMES, linear_table, use_threads
from torch import Tensor

from models.ops.grouped_matrix import Matrix, stacked
from worker.kernels.cpu.operations import Table
from worker.kernels.cpu.quantization import SCHEMES
from worker.kernels.cpu.torch_operations import linear_operations

DTYPES = [torch.float32, torch.bfloat16]


def plain(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(outputs, inputs).to(dtype)


def in_form(name: str, outputs: int, inputs: int, dtype: torch.dtype) -> Matrix:
    return FORMS[name](Shape(outputs, inputs, dtype))


LOADED: dict[str, Callable[..., Matrix]] = {"plain": plain, **dict.fromkeys(SCHEMES, plain)}
KINDS: dict[str, Callable[..., Matrix]] = {
    **LOADED,
    "4 bits": partial(drawn, zeros=True, ordered=True),
    "8 bits": partial(drawn, bits=8, group=64, zeros=True, ordered=True),
    "e4m3": drawn_e4m3,
    **{name: partial(in_form, name) for name in FORMS},
}
"""Functions that draw a matrix, given outputs, inputs and the model's type."""


def table_for(level: str, kind: str) -> Table:
    return linear_table(level, kind if kind in SCHEMES else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_everywhere(kind: str, dtype: torch.dtype) -> None:
    """Alone, in any batch and by any threads; on every kind of processor, if the matrix is quantized."""
    torch.manual_seed(0)
    matrix, x = KINDS[kind](100, 515, dtype=dtype), plain(1100, 515, dtype)  # more than are laid out at once
    found: list[Tensor] = []
    for level in NAMES:
        table = table_for(level, kind)
        packed = table["pack"](matrix)
        use_threads(level, 2)
        found.append(table["linear"](x, packed, wide=True))
        use_threads(level, 1)
        for rows in (1, 2, 3, 6, 7, 11, 12, 13, 25, 40, 300):
            assert torch.equal(table["linear"](x[-rows:], packed, wide=True), found[-1][-rows:]), (
                level,
                rows,
            )
    if kind != "plain" and dtype == torch.float32:
        assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_and_nan_stay_in_their_row(level: str, kind: str, dtype: torch.dtype) -> None:
    table = table_for(level, kind)
    packed, x = table["pack"](KINDS[kind](40, 133, dtype=dtype)), plain(20, 133, dtype)
    clean = table["linear"](x, packed)
    for wrong in (torch.nan, torch.inf):
        x[7, 132] = wrong
        out = table["linear"](x, packed)
        rounds_inputs = kind not in ("plain", "e4m3", "nf4", "fp4")
        assert not out[7].isfinite().any() and (out[7].isnan().all() or not rounds_inputs)
        out[7] = clean[7]
        assert torch.equal(out, clean)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", LOADED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_packed_like_the_whole(level: str, kind: str, dtype: torch.dtype, gated: bool) -> None:
    parts = [plain(rows, 67, dtype) for rows in (37, 1, 40, 24)]
    parts[2] = plain(67, 40, dtype).t()
    for table in (table_for(level, kind), linear_operations(SCHEMES.get(kind))):
        assert torch.equal(table["pack"](*parts, gated=gated), table["pack"](stacked(parts), gated=gated))


@pytest.mark.parametrize("kind", LOADED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_need_not_be_contiguous(level: str, kind: str, dtype: torch.dtype) -> None:
    table, wide = table_for(level, kind), plain(20, 80, dtype)
    packed = table["pack"](plain(33, 40, dtype).t())
    for x in (wide[:, 9:42], wide[::2, 3:36], wide.t()[:33, :20].t(), wide[:1, :33].expand(5, -1)):
        assert torch.equal(table["linear"](x, packed), table["linear"](x.clone(), packed))
    assert table["linear"](wide[:0, :33], packed).shape == (0, 40)
