"""The coding of each matrix of a checkpoint: which are packed, and how. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

WHOLE, E4M3, E2M1, IQ4 = "whole", "e4m3", "e2m1", "iq4"
"""What a code means: a whole number; a number of 8 bits with four of exponent and three of mantissa; one of 4
bits with two of exponent and one of mantissa; one of 16 whole numbers that lie closer near 0."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEVELS: Mapping[str, tuple[float, ...]] = {
    E2M1: (*_E2M1, *(-level for level in _E2M1)),
    IQ4: (*(-127, -104, -83, -65, -49, -35, -22, -10), *(1, 13, 25, 38, 53, 69, 89, 113)),
}
"""The 16 numbers that codes of 4 bits stand for, by kind: mxfp4's, and those of GGUF's IQ4_NL and IQ4_XS."""


class Coding(msgspec.Struct, frozen=True, kw_only=True):
    """How the matrix of one module is stored."""

    format: str
    """The reader of its tensors, a name in `models/quantization/formats/registry.py`."""
    bits: int
    group: int = 0
    """The inputs of a row that share a scale; 0 means all of them."""
    rows: int = 0
    """The rows that share scales, where those are of blocks; 0 means that each row has its own."""
    codes: str = WHOLE
    symmetric: bool = True
    """Whether zero points are left out."""
    ordered: bool = False
    """Whether groups are made of inputs that lie anywhere ("act-order")."""
    input_bits: int = 16
    """The bits to which a kernel may round the inputs."""
    static_inputs: bool = False
    """Whether the checkpoint has one scale with which all inputs of a matrix are rounded ("static")."""


class Quantization(Protocol):
    """A checkpoint's method, with all that its config says."""

    method: str

    @property
    def bits(self) -> int:
        """The fewest bits that a matrix has."""
        ...

    @property
    def ordered(self) -> bool:
        """Whether matrices have their inputs in an order of their own: then their sums have no sections."""
        ...

    def coding_of(self, module: str) -> Coding | None:
        """The coding of the matrix of a module, by its name in the checkpoint; None if it is plain."""
        ...

    def describe(self) -> str:
        """The method and its numbers, for people."""
        ...


def describe_form(bits: int, group: int) -> str:
    return f"{bits} bits, " + (f"groups of {group}" if group else "one scale for a row")
