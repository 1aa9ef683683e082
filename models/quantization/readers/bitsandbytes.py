"""The tensors of bitsandbytes: two codes a byte, the first in its high half, whose numbers a table holds, and
scales of blocks of all rows in a line, which may be codes themselves; or bytes [outputs, inputs] with scales.

Matrices of 4 bits are widened if blocks do not end with rows, and where kernels have no such table: on CUDA.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from models.checkpoint.weights import Weights
from models.ops.grouped_matrix import Grouped, Matrix, from_column
from models.quantization.readers.group_slices import covering, grouped, refuse, unread_codes
from models.weight_coding import FP4, LEVELS, NF4, Coding
from models.weight_slices import Cut

MAIN = "weight"
_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_BLOCK = 64
"""Groups are multiples of this: so sections, of which a row has up to 8, begin with units of codes."""
_FLOATS = ("float32", "float16", "bfloat16")
_PARTS = {
    "absmax": (*_FLOATS, "uint8"),
    **dict.fromkeys(("quant_map", "nested_absmax", "nested_quant_map"), _FLOATS),
    **dict.fromkeys(_STATES, ("uint8",)),
}
"""The tensors beside a matrix, and their number types."""


class _State(msgspec.Struct, frozen=True):
    """The JSON that is stored as a tensor of bytes."""

    blocksize: int
    shape: tuple[int, ...]
    nested_blocksize: int = 1
    nested_offset: float = 0.0


def read_4bit(scope: Weights, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Matrix | None:
    """Read a matrix [outputs, inputs] or a piece of it; None if only headers are compared."""
    if not scope.is_real:
        return None
    total, by_rows = shape[0] * shape[1], cut is not None and cut.dim == 0
    start, stop = (cut.start * shape[1], cut.stop * shape[1]) if cut and by_rows else (0, total)
    pieces, places = covering(Cut(0, start, stop) if by_rows else None, 2, total)
    packed = scope.codes(MAIN, [-(-total // 2), 1], ("uint8",), pieces)
    parts = {
        name: scope.stored(f"{MAIN}.{name}", found, kinds)
        for name, kinds in _PARTS.items()
        if (found := scope.stored_shape(f"{MAIN}.{name}")) is not None
    }
    if scope.headers_only:
        return None
    state = _read_state(scope, parts, shape)
    if packed.is_meta:
        pairs = unread_codes(packed, 2)
    else:
        pairs = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], dim=-1)
    codes = pairs.flatten()[places]
    first = start // state.blocksize
    scales = _scales(parts, state)[first : -(-stop // state.blocksize)]
    table = parts["quant_map"].float()
    in_rows = shape[1] % state.blocksize == 0 and state.blocksize % _BLOCK == 0
    if scope.device.type == "cpu" and in_rows and (kind := _kind_of(table)) is not None:
        of_rows = codes.view(-1, shape[1]), scales.view(-1, shape[1] // state.blocksize)
        matrix = replace(grouped(scope, coding, *of_rows), kind=kind, group=state.blocksize)
        return matrix if cut is None or by_rows else _columns(matrix, cut)
    behind = start - first * state.blocksize
    each = scales.repeat_interleave(state.blocksize)[behind : behind + stop - start]
    plain = (table[codes.int()] * each).view(-1, shape[1])
    return (plain if cut is None or by_rows else cut.of(plain)).to(scope.dtype)


def _kind_of(table: Tensor) -> str | None:
    """The kind of codes that mean these numbers; None: kernels have no such table."""
    known = ((kind, torch.tensor(LEVELS[kind], device=table.device)) for kind in (NF4, FP4))
    return next((kind for kind, levels in known if torch.allclose(levels, table, atol=1e-6)), None)


def _columns(matrix: Grouped, cut: Cut) -> Grouped:
    """The piece of a whole matrix that has some of its columns."""
    scales = matrix.scales[:, cut.start // matrix.group : -(-cut.stop // matrix.group)]
    piece = replace(matrix, codes=cut.of(matrix.codes), scales=scales, inputs=cut.stop - cut.start)
    return from_column(piece, cut.start)


def _read_state(scope: Weights, parts: dict[str, Tensor], shape: tuple[int, int]) -> _State:
    """Check what stands beside a matrix, and read how it was made."""
    stored = next((parts[name] for name in _STATES if name in parts), None)
    try:
        state = msgspec.json.decode(bytes([] if stored is None else stored.tolist()), type=_State)
    except msgspec.MsgspecError:
        raise refuse(scope, MAIN, "has no readable quant_state beside it") from None
    blocks = -(-shape[0] * shape[1] // max(1, state.blocksize))
    nested = "nested_absmax" in parts
    fits = (
        (state.shape, len(parts.get("quant_map", ())), len(parts.get("absmax", ()))) == (shape, 16, blocks)
        and state.blocksize > 0
        and (parts["absmax"].dtype == torch.uint8) == nested
        and (not nested or state.nested_blocksize * len(parts["nested_absmax"]) >= blocks)
    )
    if not fits:
        raise refuse(scope, MAIN, f"has scales and a quant_state that do not fit its shape {list(shape)}")
    return state


def _scales(parts: dict[str, Tensor], state: _State) -> Tensor:
    """The scale of each block, in float32."""
    scales = parts["absmax"]
    if "nested_absmax" not in parts:
        return scales.float()
    outer = parts["nested_absmax"].float().repeat_interleave(state.nested_blocksize)[: len(scales)]
    return parts["nested_quant_map"].float()[scales.int()] * outer + state.nested_offset


def read_int8(scope: Weights, coding: Coding, shape: tuple[int, int], cut: Cut | None) -> Grouped | None:
    """Read a matrix [outputs, inputs] or a piece of it; None if only headers are compared."""
    codes = scope.codes(MAIN, shape, ("int8",), cut)
    scales = scope.stored("SCB", shape[:1], _FLOATS, cut if cut and cut.dim == 0 else None)
    scope.ignore("weight_format")
    if scope.headers_only:
        return None
    codes = unread_codes(codes, codes.shape[1]) if codes.is_meta else (codes.short() + 128).to(torch.uint8)
    return grouped(scope, coding, codes, scales.float().unsqueeze(1) / 127)
