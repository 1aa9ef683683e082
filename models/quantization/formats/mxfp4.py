"""The tensors of mxfp4: two codes of e2m1 in a byte, the first in its low half; a power of 2 for a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.coding import E2M1, Coding
from models.ops.grouped_matrix import Grouped, from_column
from models.quantization.formats.scope import Scope, covering, refuse
from models.weight_pieces import Cut

PACKED, KINDS = "weight_packed", ("uint8",)
_SCALE = "weight_scale"
BLOCKS, SCALES = "_blocks", "_scales"
"""What the names of a stack's tensors end with."""

_GROUP, _BITS = 32, 4
_NAN = 255
_USUAL = 120
"""The power of scales that are made up: 2^-7."""


def read(scope: Scope, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Grouped | None:
    """Read a matrix [outputs, inputs] or a piece of it; None if only headers are compared."""
    outputs, inputs = shape
    by_columns = cut if cut is not None and cut.dim == 1 else None
    rows = cut if by_columns is None else None
    pairs, columns = covering(by_columns, 2, inputs, dim=1)
    groups, _ = covering(by_columns, coding.group, inputs, dim=1)
    packed = scope.stored(PACKED, [outputs, -(-inputs // 2)], KINDS, pairs or rows)
    scales = scope.stored(_SCALE, [outputs, -(-inputs // coding.group)], KINDS, groups or rows)
    scope.ignore("input_global_scale")
    if scope.headers_only:
        return None
    codes = _codes(packed)[:, columns]
    return from_column(_grouped(scope, _SCALE, codes, scales), by_columns.start if by_columns else 0)


def read_member(scope: Scope, name: str, members: int, shape: tuple[int, int], cut: Cut) -> Grouped | Tensor:
    """Read a piece of one matrix [outputs, inputs] of a stack; zeros if only headers are compared.

    The stack is saved as blocks [members, outputs, groups, 16] of two codes a byte, with a scale for each.
    """
    outputs, groups = shape[0], -(-shape[1] // _GROUP)
    blocks_cut, columns = cut, slice(0, shape[1])
    if cut.dim == 1:
        first = cut.start // _GROUP
        blocks_cut = Cut(1, first, -(-cut.stop // _GROUP), cut.member)
        columns = slice(cut.start - first * _GROUP, cut.stop - first * _GROUP)
    sizes: Sequence[int] = [members, outputs, groups]
    blocks = scope.stored(f"{name}{BLOCKS}", [*sizes, _GROUP // 2], KINDS, blocks_cut)
    scales = scope.stored(f"{name}{SCALES}", sizes, KINDS, blocks_cut)
    if scope.headers_only:
        return torch.zeros((), device=scales.device, dtype=scope.dtype).expand(
            cut.shape_of([members, *shape])
        )
    codes = _codes(blocks.flatten(1))[:, columns]
    return from_column(_grouped(scope, f"{name}{SCALES}", codes, scales), cut.start if cut.dim == 1 else 0)


def _grouped(scope: Scope, name: str, codes: Tensor, scales: Tensor) -> Grouped:
    """Make the form of codes and of scales, which were read from the tensor `name`."""
    if not scope.is_real:
        scales = torch.full_like(scales, _USUAL)
    elif (scales == _NAN).any():
        raise refuse(scope, name, "has scales that are NaN")
    powers = scales.contiguous().view(torch.float8_e8m0fnu)
    return Grouped(codes, _BITS, _GROUP, powers, None, codes.shape[1], scope.dtype, kind=E2M1)


def _codes(packed: Tensor) -> Tensor:
    """[N, C] -> [N, 2 C]: the codes of each byte."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
