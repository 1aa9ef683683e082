"""Adapters on CUDA: two kernels read them by their numbers, wherever on the device they lie.

An adapter is one piece of memory: a table of what it has of each layer, and that. All adapters have a copy in
pinned memory; a few places of the device hold those of the last steps, and a table of their addresses is all
that kernels are told. So a graph is right for whichever adapters come. Each row's sums have one order,
whatever rows are beside it. Rows without an adapter keep the bits that they have.
"""

# The bounds of loops in kernels are no numbers that Python knows.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from models.context import AdapterRows
from models.ops.lora_ops import Adaptable, Added, Block, LayerAdapter
from worker.kernels.cuda.launch import launch
from worker.kernels.cuda.products.packing import Mixed, Packed

_WORDS: constexpr = constexpr(6)
"""The words of a layer in an adapter's table: where A lies, how many numbers A x there are, and where B, the
ranges of its tiles, factors and shifts lie. 0: it has none."""
_NUMBERS: constexpr = constexpr(16)
_COLUMNS, _INPUTS, _SECTION = 64, 1024, 512
"""The outputs of a tile of B, the bytes of inputs multiplied at a time, and the inputs that are added up
apart."""
_AT_ONCE = 4
"""The sums of sections that are read at once."""
_FEW = 64
"""The tokens up to which each adapter of a tile, and each section of inputs, has a program of its own."""
_ROWS, _ROWS_OF_MANY = 16, 32
"""The tokens of a tile, and those of one of results of many tokens."""
_ALIGNED = 256
_PIECE = 1 << 20
"""The bytes that are pinned at a time: torch takes the next power of 2."""


@triton.jit
def _numbers_of_tile(numbers_ptr, tokens, apart, ROWS: constexpr):
    """The rows of a program's tile, the numbers of their adapters, and those of them that are its to compute.

    A program takes the adapters that come first in every `apart`-th row of the tile.
    """
    at = tl.arange(0, ROWS)
    rows = tl.program_id(0) // apart * ROWS + at
    numbers = tl.load(numbers_ptr + rows, mask=rows < tokens, other=0)
    is_earlier = (numbers[:, None] == numbers[None, :]) & (at[None, :] < at[:, None])
    is_first = tl.sum(is_earlier.to(tl.int32), 1) == 0
    return rows, numbers, tl.where(is_first & (at % apart == tl.program_id(0) % apart), numbers, 0)


@triton.jit(do_not_specialize=["layer", "tokens", "apart", "each", "sections"])
def shrink(
    x_ptr, numbers_ptr, bases_ptr, low_ptr, layer, tokens, apart, each, sections, x_stride, inputs, room,
    ROWS: constexpr, INPUTS: constexpr, SECTION: constexpr,
):  # fmt: skip
    """Multiply rows of a tile by A, for some numbers A x: `each` sections of inputs, one after the other."""
    rows, numbers, left = _numbers_of_tile(numbers_ptr, tokens, apart, ROWS)
    low = tl.program_id(1) * _NUMBERS + tl.arange(0, _NUMBERS)
    plane = tl.program_id(2)
    x_row, there = x_ptr + rows.to(tl.int64)[:, None] * x_stride, (rows < tokens)[:, None]
    number = tl.max(left, 0)
    while number > 0:
        base = tl.load(bases_ptr + number)
        words = base.to(tl.pointer_type(tl.int64)) + layer * _WORDS
        a_at = tl.load(words, mask=base != 0, other=0)
        count = tl.load(words + 1, mask=base != 0, other=0).to(tl.int32)
        if tl.program_id(1) * _NUMBERS < count:
            a_ptr = tl.multiple_of(base + a_at, 16).to(tl.pointer_type(x_ptr.dtype.element_ty))
            total = tl.zeros([ROWS, _NUMBERS], tl.float32)
            for section in range(plane * each, tl.minimum((plane + 1) * each, sections)):
                sums = tl.zeros([ROWS, _NUMBERS], tl.float32)
                for first in range(section * SECTION, tl.minimum((section + 1) * SECTION, inputs), INPUTS):
                    at = first + tl.arange(0, INPUTS)
                    inside = at < inputs
                    x = tl.load(x_row + at[None, :], mask=there & inside[None, :], other=0.0)
                    a = tl.load(
                        a_ptr + low[None, :] * inputs + at[:, None],
                        mask=(low < count)[None, :] & inside[:, None],
                        other=0.0,
                    )
                    sums = tl.dot(x, a, sums, input_precision="ieee")
                total += sums
            low_at = low_ptr + (plane * tokens + rows).to(tl.int64)[:, None] * room + low[None, :]
            tl.store(low_at, total, mask=(numbers == number)[:, None] & (low < room)[None, :])
        left = tl.where(left == number, 0, left)
        number = tl.max(left, 0)


@triton.jit(do_not_specialize=["layer", "known"])
def gather(
    rows_ptr, ids_ptr, numbers_ptr, bases_ptr, low_ptr, layer, known, room, NUMBERS: constexpr,
):  # fmt: skip
    """Read what a token has in A of a layer of embeddings: a row of numbers for each id that is known."""
    row = tl.program_id(0).to(tl.int64)
    number, token = tl.load(numbers_ptr + row), tl.load(ids_ptr + row)
    base = tl.load(bases_ptr + number, mask=number > 0, other=0)
    if base != 0:
        words = base.to(tl.pointer_type(tl.int64)) + layer * _WORDS
        count = tl.load(words + 1).to(tl.int32)
        a_ptr = tl.multiple_of(base + tl.load(words), 16).to(tl.pointer_type(rows_ptr.dtype.element_ty))
        inside = (token >= 0) & (token < known)  # the embeddings of others are NaN
        for first in range(0, count, NUMBERS):
            low = first + tl.arange(0, NUMBERS)
            a = tl.load(a_ptr + token * count + low, mask=(low < count) & inside, other=0.0)
            tl.store(low_ptr + row * room + low, a.to(tl.float32), mask=low < count)


@triton.jit
def _at_length(total, bias_ptr, base, factors, shifts, at, outputs):
    """Results, which have a bias already, at the lengths that DoRA wants, if an adapter has any."""
    if factors != 0:
        factor_ptr = (base + factors).to(tl.pointer_type(tl.float32))
        bias = tl.zeros_like(at).to(tl.float32)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + at, mask=at < outputs, other=0.0).to(tl.float32)
        factor = tl.load(factor_ptr + at, mask=at < outputs, other=1.0)
        total = (total - bias[None, :]) * factor[None, :] + bias[None, :]
    if shifts != 0:
        shift_ptr = (base + shifts).to(tl.pointer_type(tl.float32))
        total += tl.load(shift_ptr + at, mask=at < outputs, other=0.0)[None, :]
    return total


@triton.jit(do_not_specialize=["layer", "tokens", "apart", "planes"])
def expand(
    out_ptr, low_ptr, bias_ptr, numbers_ptr, bases_ptr, layer, tokens, apart, planes, outputs, room,
    ROWS: constexpr, COLUMNS: constexpr, AT_ONCE: constexpr,
):  # fmt: skip
    """Add the products of A x and B to a tile of results, and bring them to the lengths that DoRA wants."""
    rows, numbers, left = _numbers_of_tile(numbers_ptr, tokens, apart, ROWS)
    column = tl.arange(0, COLUMNS)
    at = tl.program_id(1) * COLUMNS + column
    out_at = out_ptr + rows.to(tl.int64)[:, None] * outputs + at[None, :]
    out = tl.load(out_at, mask=(rows < tokens)[:, None] & (at < outputs)[None, :], other=0.0).to(tl.float32)
    number = tl.max(left, 0)
    while number > 0:
        base = tl.load(bases_ptr + number)
        words = base.to(tl.pointer_type(tl.int64)) + layer * _WORDS
        is_there = base != 0
        b, ranges = (tl.load(words + 2, mask=is_there, other=0), tl.load(words + 3, mask=is_there, other=0))
        factors, shifts = (
            tl.load(words + 4, mask=is_there, other=0), tl.load(words + 5, mask=is_there, other=0)
        )  # fmt: skip
        own = numbers == number
        total = out
        if b != 0:
            sums = tl.zeros([ROWS, COLUMNS], tl.float32)
            range_ptr = (base + ranges).to(tl.pointer_type(tl.int32)) + 3 * tl.program_id(1)
            start, count, before = tl.load(range_ptr), tl.load(range_ptr + 1), tl.load(range_ptr + 2)
            b_ptr = tl.multiple_of(base + b, 16).to(tl.pointer_type(out_ptr.dtype.element_ty))
            for first in range(0, count, _NUMBERS):
                low = first + tl.arange(0, _NUMBERS)
                inside = low < count
                b_at = b_ptr + (before + low).to(tl.int64)[:, None] * COLUMNS + column[None, :]
                values = tl.load(b_at, mask=inside[:, None], other=0.0).to(tl.float32)
                x = tl.zeros([ROWS, _NUMBERS], tl.float32)
                for some in range(0, planes, AT_ONCE):
                    for plane in tl.static_range(AT_ONCE):
                        low_at = low_ptr + ((some + plane) * tokens + rows).to(tl.int64)[:, None] * room
                        known = own & (some + plane < planes)
                        x += tl.load(
                            low_at + start + low[None, :], mask=known[:, None] & inside[None, :], other=0.0
                        )
                sums = tl.dot(x, values, sums, input_precision="ieee")
            total += sums
        total = _at_length(total, bias_ptr, base, factors, shifts, at, outputs)
        there = (own & is_there)[:, None] & (at < outputs)[None, :]
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=there)
        left = tl.where(left == number, 0, left)
        number = tl.max(left, 0)


@dataclass(frozen=True, eq=False)
class ArenaLayer:
    """The arguments of kernels for the adapters of a layer."""

    number: int
    """The place of the layer in the tables of adapters."""
    outputs: int
    numbers: int
    """The room for numbers A x of a token."""
    embeds: bool
    """Whether A has a row for each token, and not one for each number."""
    inputs: int
    bases: Tensor  # [most + 1] int64: the address of each adapter, or 0 if it is not there


@dataclass(frozen=True, eq=False)
class _Pinned:
    pieces: Sequence[Tensor]
    """The memory of an adapter, cut."""

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class Arena:
    """The adapters of a model, in pinned memory, and places on the device for those of a step."""

    def __init__(self, layers: Sequence[Adaptable], most: int, rank: int, in_step: int) -> None:
        target = layers[0].weight.device
        self._dtype = _numbers_of(layers[0].weight)
        self.bases = torch.zeros(most + 1, dtype=torch.int64, device=target)
        self.layers = [
            ArenaLayer(
                *(number, layer.outputs, layer.scopes * rank, layer.embeds, layer.inputs), bases=self.bases
            )
            for number, layer in enumerate(layers)
        ]
        room = _aligned(8 * len(layers) * _WORDS.value)
        room += sum(_room_for(layer, rank, self._dtype.itemsize) for layer in layers)
        self._places = torch.empty(in_step, room, dtype=torch.uint8, device=target)
        self._free = list(range(in_step))
        self._entered: dict[int, _Pinned] = {}
        self._placed: dict[int, int] = {}
        """The place of each adapter that has one; the one used longest ago comes first."""

    def prepare(self, changes: Iterable[tuple[int, LayerAdapter]]) -> _Pinned:
        table = torch.zeros(len(self.layers), _WORDS.value, dtype=torch.int64)
        parts = [table.view(torch.uint8).flatten()]
        used = _aligned(len(parts[0]))
        for number, adapter in changes:
            table[number, 1] = 0 if adapter.a is None else len(adapter.a)
            for word, part in _parts_of(adapter, self.layers[number], self._dtype):
                table[number, word] = used
                parts.append(part.contiguous().view(torch.uint8).flatten())
                used += _aligned(len(parts[-1]))
        if used > self._places.shape[1]:
            raise ValueError(f"an adapter has {used} bytes, and there is room for {self._places.shape[1]}")
        memory, used = torch.empty(used, dtype=torch.uint8), 0
        for part in parts:
            memory[used : used + len(part)] = part
            used += _aligned(len(part))
        pins = self._places.is_cuda
        return _Pinned([piece.pin_memory() if pins else piece for piece in memory.split(_PIECE)])

    def enter(self, number: int, prepared: _Pinned) -> None:
        self._entered[number] = prepared

    def drop(self, number: int) -> None:
        self._entered.pop(number, None)
        if number in self._placed:
            self._free.append(self._leave(number))

    def bring(self, numbers: Iterable[int]) -> None:
        wanted = {number for number in numbers if number in self._entered}
        for number in wanted & self._placed.keys():
            self._placed[number] = self._placed.pop(number)
        for number in wanted - self._placed.keys():
            place = self._free.pop() if self._free else self._leave(self._unwanted(wanted))
            memory, at = self._places[place], 0
            for piece in self._entered[number].pieces:
                memory[at : at + len(piece)].copy_(piece, non_blocking=True)
                at += len(piece)
            self.bases[number].fill_(memory.data_ptr())
            self._placed[number] = place

    def _unwanted(self, wanted: set[int]) -> int:
        for number in self._placed:
            if number not in wanted:
                return number
        raise ValueError(f"a step has {len(wanted)} adapters, and there is room for {len(self._places)}")

    def _leave(self, number: int) -> int:
        """Take an adapter from its place -> that."""
        self.bases[number].fill_(0)
        return self._placed.pop(number)


def _parts_of(adapter: LayerAdapter, layer: ArenaLayer, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """The words of the table that say where something lies, and what lies there."""
    if adapter.a is not None:
        yield 0, (adapter.a.t() if layer.embeds else adapter.a).to(dtype)
    if adapter.blocks:
        b, ranges = _in_tiles(adapter.blocks, layer.outputs, dtype)
        yield from ((2, b), (3, ranges))
    if adapter.factor is not None:
        yield 4, adapter.factor.float()
    if adapter.shift is not None:
        yield 5, adapter.shift.float()


def _in_tiles(blocks: Sequence[Block], outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values of B, tile by tile [numbers, _COLUMNS], and the range of numbers A x of each tile.

    A range is the first number, the count of them, and the count of those in the tiles before.
    """
    tiles, ranges, before = list[Tensor](), list[tuple[int, int, int]](), 0
    blocks = [block.in_float32() for block in blocks]
    for start in range(0, outputs, _COLUMNS):
        stop = start + _COLUMNS
        own = [each for each in blocks if each.start < stop and start < each.start + len(each.b)]
        first = min((each.first for each in own), default=0)
        end = max((each.first + each.b.shape[1] for each in own), default=first)
        tile = torch.zeros(end - first, _COLUMNS, dtype=dtype)
        for each in own:
            begin, last = max(start, each.start), min(stop, each.start + len(each.b))
            low = slice(each.first - first, each.first - first + each.b.shape[1])
            tile[low, begin - start : last - start] = each.b[begin - each.start : last - each.start].t()
        tiles.append(tile)
        ranges.append((first, end - first, before))
        before += end - first
    return torch.cat(tiles), torch.tensor(ranges, dtype=torch.int32)


def _room_for(layer: Adaptable, rank: int, itemsize: int) -> int:
    """The most bytes that an adapter of this rank takes of a layer."""
    numbers, tiles = layer.scopes * rank, -(-layer.outputs // _COLUMNS)
    b = (tiles * rank + layer.pieces * numbers) * _COLUMNS * itemsize  # a piece may end within a tile
    parts = (numbers * layer.inputs * itemsize, b, 12 * tiles, 4 * layer.outputs, 4 * layer.outputs)
    return sum(map(_aligned, parts))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _numbers_of(weight: Tensor) -> torch.dtype:
    """The number type of a layer's inputs."""
    if isinstance(weight, Mixed):
        return _numbers_of(weight.apart[0])
    return weight.numbers if isinstance(weight, Packed) else weight.dtype


def lora(x: Tensor, layer: ArenaLayer, rows: AdapterRows) -> Added:
    tokens, inputs = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    sections = -(-inputs // _SECTION)
    programs = _programs(tokens)
    planes, each = (sections, 1) if tokens <= _FEW else (1, sections)
    low = torch.empty(planes, tokens, layer.numbers, dtype=torch.float32, device=x.device)
    launch(
        shrink,
        (-(-tokens // _ROWS) * programs, -(-layer.numbers // _NUMBERS.value), planes),
        *(x, rows.numbers, layer.bases, low, layer.number, tokens, programs, each, sections),
        *(x.stride(0), inputs, layer.numbers, _ROWS, _INPUTS // x.itemsize, _SECTION),
        num_warps=4,
        num_stages=1,  # a section is read at once
    )
    return Added(layer, rows, low)


def adapt_embeddings(embedded: Tensor, ids: Tensor, layer: ArenaLayer, rows: AdapterRows) -> Tensor:
    tokens = len(ids)
    low = torch.empty(1, tokens, layer.numbers, dtype=torch.float32, device=ids.device)
    launch(
        gather,
        (tokens,),
        *(embedded, ids, rows.numbers, layer.bases, low, layer.number, layer.inputs, layer.numbers, 64),
        num_warps=1,
    )
    add(embedded, None, Added(layer, rows, low))
    return embedded


def add(out: Tensor, bias: Tensor | None, added: Added) -> None:
    """Change the rows of `out` [T, outputs], to which the bias has been added, that have an adapter."""
    layer: ArenaLayer = added.adapters
    low: Tensor = added.products
    rows, programs = _ROWS if len(out) <= _FEW else _ROWS_OF_MANY, _programs(len(out))
    launch(
        expand,
        (-(-len(out) // rows) * programs, -(-layer.outputs // _COLUMNS)),
        *(out, low, bias, added.rows.numbers, layer.bases, layer.number, len(out), programs, len(low)),
        *(layer.outputs, layer.numbers, rows, _COLUMNS, _AT_ONCE),
        num_warps=4,
        maxnreg=128,  # or 9.0 would keep one of 72 registers in memory
    )


def _programs(tokens: int) -> int:
    """The programs among which a tile's adapters are divided."""
    return min(tokens, _ROWS) if tokens <= _FEW else 1


def on_device(numbers: Tensor | None) -> AdapterRows | None:
    """The adapters of tokens whose numbers [T] int32 only kernels know."""
    return None if numbers is None else AdapterRows(numbers, numbers[:0], ())


OPERATIONS: dict[str, Callable[..., Any]] = {
    "hold_adapters": Arena,
    "lora": lora,
    "adapt_embeddings": adapt_embeddings,
}
