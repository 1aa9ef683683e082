"""Quantized matrices as the kernels of this folder read them: all parts of one in one piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.ops.grouped_matrix import Grouped
from models.weight_coding import E2M1, E4M3, IQ4, WHOLE
from models.weight_coding import LEVELS as LEVELS_OF
from worker.kernels.cuda.products import quantized_kernel
from worker.kernels.cuda.products.quantized_kernel import MatrixForm, MatrixParts

GROUP = 128
"""The inputs of a row that share a scale, where matrices in e4m3 have groups."""
LARGEST = 448.0
"""The largest number that e4m3 holds."""
LEAST_SCALE = 1e-12
"""The scale of what is zero throughout."""
_ALIGNED = 16
"""The bytes at a multiple of which each part of a matrix begins: Triton compiles anew for any other."""
_LEAST_TILE, _MOST_TILE = {4: 32, 8: 16}, {4: 128, 8: 128}
"""The inputs of a tile, by bits of a code. The matrix unit takes 16 at a time, and the halves of a tile of 4
bits, which may be of two groups, are multiplied one after the other."""
_KINDS = {
    WHOLE: quantized_kernel.WHOLE,
    E4M3: quantized_kernel.E4M3,
    IQ4: quantized_kernel.LEVELS,
    E2M1: quantized_kernel.HALVES,
}
_OUTPUTS = 16
"""The multiple of outputs that torch's product of numbers in e4m3 asks for."""
_IN_BLOCKS = 4
"""The multiple to which the scales of a row of blocks are filled up."""
_CENTRE = 128
"""The byte that stands for 0 where codes have levels."""


class Packed(nn.Parameter):
    """A quantized matrix [outputs, inputs]: bytes that only the operations of this folder can read."""

    form: MatrixForm
    parts: MatrixParts
    """Views of the bytes."""
    width: int
    """The bytes of a row of codes."""
    inputs: int
    """The columns, those of no input among them."""
    outputs: int
    numbers: torch.dtype
    order: Tensor | None
    """[columns] int64: the input of each column, or one behind the last for none; None: as they come."""
    padded: bool
    """Whether there are columns of no input."""
    bytes_before: int
    """The bytes of the matrix in the number type of the model."""
    rounds_inputs: bool
    """Whether inputs may be rounded to e4m3 where torch multiplies such numbers."""
    input_scale: Tensor | None
    """The one scale [1] float32 that the checkpoint has for all inputs; None: rows have their own."""
    blocks: Tensor | None
    """The scales [inputs / 128 and up to 3 more, outputs / 128] if all rows of a block have the same, as
    torch's product of blocks reads them; else None."""

    def move(self, memory: Tensor) -> None:
        """Give the matrix other memory of as many bytes, to which its own are copied."""
        memory.copy_(self.data)
        self.parts = _views(memory, self.parts)
        self.data = memory


class Mixed(nn.Parameter):
    """A matrix whose parts differ in form: bytes of all of them, one below the other."""

    apart: tuple[Tensor, ...]
    """The parts, packed or plain."""
    bytes_before: int


def pack(matrix: Grouped) -> Packed | None:
    """Pack a matrix; None if it has codes or groups that kernels do not know."""
    if matrix.kind not in _KINDS:
        return None
    bits = matrix.bits
    if bits in (5, 6) or (bits == 4 and matrix.kind == WHOLE and _tile(matrix) < _LEAST_TILE[4]):
        matrix = matrix.in_bytes()
    tile = _tile(matrix)
    if tile < _LEAST_TILE[matrix.bits]:
        return None
    codes = _laid(matrix.codes, matrix.bits, tile)
    scales, factors = matrix.scales, matrix.factors
    powers = scales.dtype == torch.float8_e8m0fnu
    numbers = (
        scales.view(torch.uint8) if powers else scales,
        matrix.minimums,
        None if factors is None else factors.scales,
        None if factors is None else factors.minimums,
        matrix.offsets,
    )
    given = (codes, *(None if part is None else part.t() for part in numbers))
    memory = codes.new_empty(sum(_aligned(part.nbytes) for part in given if part is not None))
    packed = Packed(memory, requires_grad=False)
    packed.parts = _views(memory, given)
    for place, part in zip(packed.parts, given, strict=True):
        if place is not None and part is not None:
            place.copy_(part)
    packed.form = _form(matrix, tile, powers=powers)
    packed.width, packed.outputs, packed.inputs = codes.shape[1], len(matrix), matrix.codes.shape[1]
    packed.numbers, packed.bytes_before = matrix.dtype, matrix.plain_bytes
    _order(packed, matrix)
    packed.blocks = _blocks(matrix, packed.width) if _has_rounded_inputs(matrix) else None
    by_rows = matrix.scales.shape[1] == 1 and packed.outputs % _OUTPUTS == 0
    packed.rounds_inputs = _has_rounded_inputs(matrix) and (by_rows or packed.blocks is not None)
    packed.input_scale = _input_scale(matrix) if packed.rounds_inputs else None
    return packed


def pack_apart(parts: Sequence[Packed | Tensor]) -> Mixed:
    """Join parts that differ in form."""
    sizes = [_aligned(part.nbytes) for part in parts]
    mixed = Mixed(torch.empty(sum(sizes), dtype=torch.uint8, device=parts[0].device), requires_grad=False)
    apart: list[Tensor] = []
    for part, memory in zip(parts, mixed.data.split(sizes), strict=True):
        if isinstance(part, Packed):
            part.move(memory)
            apart.append(part)
        else:
            apart.append(memory[: part.nbytes].view(part.dtype).view(part.shape).copy_(part))
    mixed.apart = tuple(apart)
    mixed.bytes_before = sum(getattr(part, "bytes_before", part.nbytes) for part in parts)
    return mixed


def _tile(matrix: Grouped) -> int:
    if matrix.bits == 4:
        return 2 * gcd(matrix.group or _MOST_TILE[4], _MOST_TILE[4] // 2)
    return gcd(matrix.group or _MOST_TILE[8], _MOST_TILE[8])


def in_e4m3(weight: Tensor) -> Grouped:
    """Round a plain matrix [N, K] to 8 bits: the largest number of each row becomes the largest of e4m3."""
    scales = (weight.abs().amax(1, keepdim=True).float() / LARGEST).clamp_min(LEAST_SCALE)
    codes = (weight.float() / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Grouped(
        codes.view(torch.uint8), 8, 0, scales, None, weight.shape[1], weight.dtype, input_bits=8, kind=E4M3
    )


def _form(matrix: Grouped, tile: int, *, powers: bool) -> MatrixForm:
    columns = -(-matrix.codes.shape[1] // tile) * tile
    kind, factors = _KINDS[matrix.kind], matrix.factors
    words, zero = (0,) * 4, matrix.zero_code
    if levels := LEVELS_OF.get(matrix.kind):
        unit = 2 if kind == quantized_kernel.HALVES else 1
        found = bytes(int(level * unit) + _CENTRE for level in levels)
        words = tuple(int.from_bytes(found[at : at + 4], "little", signed=True) for at in range(0, 16, 4))
        zero = _CENTRE
    run = 0 if factors is None else factors.run
    scaled = powers and kind == quantized_kernel.HALVES and not run and matrix.dtype == torch.bfloat16
    return MatrixForm(zero, matrix.bits, kind, matrix.group or columns, run, powers, words, tile, scaled)


def _has_rounded_inputs(matrix: Grouped) -> bool:
    """Whether the checkpoint wants inputs of 8 bits, and torch knows products of such a matrix."""
    return (
        matrix.kind == E4M3
        and matrix.input_bits == 8
        and matrix.order is None
        and (matrix.scales.shape[1] == 1 or matrix.group == GROUP)
        and matrix.scales.dtype == torch.float32
        and matrix.dtype == torch.bfloat16
    )


def _input_scale(matrix: Grouped) -> Tensor | None:
    if matrix.input_scale is None or matrix.scales.shape[1] > 1:
        return None
    return torch.full((1,), matrix.input_scale, dtype=torch.float32, device=matrix.device)


def _blocks(matrix: Grouped, width: int) -> Tensor | None:
    """The scales of blocks of 128 x 128, if the matrix consists of such."""
    outputs, groups = matrix.scales.shape
    if groups == 1 or outputs % GROUP or width % GROUP:
        return None
    rows = matrix.scales.unflatten(0, (-1, GROUP))
    if not (rows.is_meta or bool((rows == rows[:, :1]).all())):
        return None
    return F.pad(rows[:, 0], (0, -groups % _IN_BLOCKS)).contiguous().t()


def _laid(codes: Tensor, bits: int, tile: int) -> Tensor:
    """Codes [N, K] as bytes in the order of the kernels, filled up to whole tiles."""
    codes = F.pad(codes, (0, -codes.shape[1] % tile))
    if bits == 8:
        return codes
    low, high = codes.unflatten(1, (-1, 2, tile // 2)).unbind(2)
    return (low | high << 4).flatten(1)


def _views(memory: Tensor, like: Sequence[Tensor | None]) -> MatrixParts:
    """Tensors in a piece of memory, one behind the other, of these types and shapes."""
    found: list[Tensor | None] = []
    start = 0
    for part in like:
        if part is None:
            found.append(None)
            continue
        found.append(memory[start : start + part.nbytes].view(part.dtype).view(part.shape))
        start += _aligned(part.nbytes)
    return MatrixParts(*found)  # pyright: ignore[reportArgumentType]  (there are always codes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _order(packed: Packed, matrix: Grouped) -> None:
    packed.order, packed.padded = None, False
    if matrix.order is not None:
        order, inputs = matrix.order.long(), matrix.inputs
        packed.padded = len(order) != inputs or (not order.is_meta and bool((order < 0).any()))
        packed.order = torch.where(order < 0, inputs, order)
