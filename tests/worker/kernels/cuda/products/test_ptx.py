"""PTX of our own makes numbers of codes of 4 bits. The interpreter does not run it, so these tests do."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import pytest
import torch
from interpreted import DEVICE  # noqa: F401  # before any kernel is imported

from models.weight_coding import E2M1, LEVELS
from worker.kernels.cuda.products import quantized_kernel

LINE = re.compile(r"(\w+)\.[\w.]*(b32|u32|bf16x2|f16x2) (.*);")
DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def permuted(a: int, b: int, places: int) -> int:
    data = struct.pack("<II", a, b)
    return int.from_bytes(bytes(data[places >> 4 * at & 7] for at in range(4)), "little")


def bitwise(a: int, b: int, c: int, table: int) -> int:
    chosen = (table >> (4 * (a >> at & 1) + 2 * (b >> at & 1) + (c >> at & 1)) & 1 for at in range(32))
    return sum(bit << at for at, bit in enumerate(chosen))


INTEGERS: dict[str, Callable[..., int]] = {
    "mov": lambda a: a,
    "prmt": permuted,
    "and": lambda a, b: a & b,
    "shr": lambda a, b: a >> b,
    "mul": lambda a, b: a * b & 0xFFFFFFFF,
    "lop3": bitwise,
}


def pair(word: int, dtype: torch.dtype) -> torch.Tensor:
    halves = torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16)
    return halves.view(dtype).double()


def run(ptx: str, operands: dict[str, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """The two pairs of numbers that PTX makes of these operands."""
    known, made = dict(operands), dict[str, torch.Tensor]()
    for operation, _, named in LINE.findall(ptx):
        target, *sources = named.split(", ")
        values = [known[each] if each in known else int(each, 0) for each in sources]
        if operation == "fma":
            x, y, z = (pair(value, dtype) for value in values)
            made[target] = (x * y + z).to(dtype).double()
        else:
            known[target] = INTEGERS[operation](*values)
    return [made["$0"], made["$1"]]


def word(value: float, dtype: torch.dtype) -> int:
    bits = int(torch.tensor(value, dtype=dtype).view(torch.uint16))
    return bits | bits << 16


PAIRS = [(one, 255 - one) for one in range(256)]


@pytest.mark.parametrize("exponents", [(126, 126), (63, 55), (72, 63)])
def test_floats_of_4_bits(exponents: tuple[int, int]) -> None:
    """Halves of a byte have units of their own."""
    dtype, levels = torch.bfloat16, LEVELS[E2M1]
    units = {f"${3 + at}": word(2.0**each, dtype) for at, each in enumerate(exponents)}
    for one, two in PAIRS:
        ptx = quantized_kernel._FLOAT_BFLOAT16.value  # pyright: ignore[reportPrivateUsage]
        low, high = run(ptx, {"$2": one | two << 8, **units}, dtype)
        for found, shift, exponent in zip((low, high), (0, 4), exponents, strict=True):
            meant = [levels[code >> shift & 15] * 2.0 ** (exponent - 126) for code in (one, two)]
            assert found.tolist() == meant


@pytest.mark.parametrize("type", DTYPES)
def test_whole_numbers_of_4_bits(type: str) -> None:
    """The last operand takes the code that means 0, and what was or-ed into a number, away."""
    dtype = DTYPES[type]
    name, raised = ("_WHOLE_BFLOAT16", 128) if dtype == torch.bfloat16 else ("_WHOLE_FLOAT16", 1024)
    for one, two in PAIRS:
        operands = {"$2": one | two << 8, "$3": word(-raised - 8, dtype)}
        low, high = run(getattr(quantized_kernel, name).value, operands, dtype)
        assert [low.tolist(), high.tolist()] == [
            [(code >> shift & 15) - 8 for code in (one, two)] for shift in (0, 4)
        ]
