"""The tensors of fp8: bytes in e4m3, and scales of blocks, rows or the whole matrix."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from models.coding import E4M3, Coding
from models.ops.grouped_matrix import Grouped, from_column
from models.quantization.formats.scope import SCALES, Scope, covering, read_one_scale, refuse
from models.weight_pieces import Cut

MAIN, KINDS = "weight", ("float8_e4m3fn",)
STACK_SCALES = "_scale_inv"
"""What the name of a stack's scales ends with."""
_OF_INPUTS = ("input_scale", "activation_scale")
_BITS = 8
_NAN = 127
"""The bits of the two codes that are no number, without their sign."""


def read(scope: Scope, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Grouped | None:
    """Read a matrix [outputs, inputs] or a piece of it; None if only headers are compared."""
    scales = _scales(scope, coding, shape, cut)
    input_scale = None
    if coding.static_inputs:
        input_scale = read_one_scale(scope, _OF_INPUTS) if scope.is_real else 1.0
    stored = scope.stored(MAIN, shape, KINDS, cut)
    if scope.headers_only:
        return None
    group = coding.group if scales.shape[1] > 1 else 0
    matrix = _grouped(scope, MAIN, stored, scales, group, coding.input_bits)
    matrix = replace(matrix, input_scale=input_scale)
    return from_column(matrix, cut.start if cut and cut.dim == 1 else 0)


def read_member(scope: Scope, name: str, members: int, shape: tuple[int, int], cut: Cut) -> Grouped | Tensor:
    """Read a piece of one matrix [outputs, inputs] of a stack; zeros if only headers are compared.

    The stack is saved as bytes [members, outputs, inputs], with one scale for each member [members, 1, 1].
    """
    stored = scope.stored(name, [members, *shape], KINDS, cut)
    scales = scope.stored(f"{name}{STACK_SCALES}", [members, 1, 1], SCALES, Cut(0, 0, 1, cut.member))
    if scope.headers_only:
        zeros = torch.zeros((), device=stored.device, dtype=scope.dtype)
        return zeros.expand(cut.shape_of([members, *shape]))
    return _grouped(scope, name, stored, scales.float().expand(len(stored), 1), group=0)


def _grouped(
    scope: Scope, name: str, stored: Tensor, scales: Tensor, group: int, input_bits: int = 16
) -> Grouped:
    """Make the form of bytes, which were read from the tensor `name`, and of their scales [N, G]."""
    codes = stored.view(torch.uint8)
    if scope.is_real and ((codes & _NAN) == _NAN).any():
        raise refuse(scope, name, "has numbers that are NaN")
    return Grouped(
        codes=codes,
        bits=_BITS,
        group=group,
        scales=scales,
        offsets=None,
        inputs=codes.shape[1],
        dtype=scope.dtype,
        input_bits=input_bits,
        kind=E4M3,
    )


def _scales(scope: Scope, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Tensor:
    """Read the scales and give them to each row: [N, G]. DeepSeek's are called inverse, and are not."""
    name = (
        "weight_scale_inv"
        if "weight_scale_inv" in scope or (coding.rows and not scope.is_real)
        else "weight_scale"
    )
    outputs, inputs = shape
    start, stop = (cut.start, cut.stop) if cut and cut.dim == 0 else (0, outputs)
    if not coding.rows:
        stored = scope.stored_shape(name)
        wanted = stored if stored in ((), (1,), (outputs,)) else (outputs, 1)
        scales = scope.stored(name, wanted, SCALES).float().reshape(-1, 1)
        return scales.expand(stop - start, 1) if len(scales) == 1 else scales[start:stop]
    blocks = [-(-outputs // coding.rows), -(-inputs // coding.group)]
    if cut is not None and cut.dim == 1:
        piece, rows = covering(cut, coding.group, inputs, dim=1)[0], slice(0, outputs)
    else:
        piece, rows = covering(cut, coding.rows, outputs, dim=0)
    return scope.stored(name, blocks, SCALES, piece).float().repeat_interleave(coding.rows, dim=0)[rows]
