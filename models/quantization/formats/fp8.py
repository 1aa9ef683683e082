"""The tensors of fp8: bytes in e4m3, and scales of blocks, rows or the whole matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from models.checkpoint.files import Cut
from models.quantization.coding import Coding
from models.quantization.formats.scope import SCALES, Scope, covering, refuse
from models.quantization.matrix import Grouped, from_column

MAIN, KINDS = "weight", ("float8_e4m3fn",)
_NAN = 127
"""The bits of the two codes that are no number, without their sign."""


def read(scope: Scope, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Grouped | None:
    """Read a matrix [outputs, inputs] or a piece of it; None if only headers are compared."""
    scales = _scales(scope, coding, shape, cut)
    stored = scope.stored(MAIN, shape, KINDS, cut)
    if scope.headers_only:
        return None
    codes = stored.view(torch.uint8)
    if scope.is_real and ((codes & _NAN) == _NAN).any():
        raise refuse(scope, MAIN, "has numbers that are NaN")
    matrix = Grouped(
        codes=codes,
        bits=coding.bits,
        group=coding.group if scales.shape[1] > 1 else 0,
        scales=scales,
        offsets=None,
        inputs=codes.shape[1],
        dtype=scope.dtype,
        kind=coding.codes,
    )
    return from_column(matrix, cut.start if cut and cut.dim == 1 else 0)


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
