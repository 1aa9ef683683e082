"""Finds out whether a checkpoint is quantized, and the coding of each matrix. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, cast

import msgspec

from models.plain_files import FileError, read_json

WHOLE, E4M3, E2M1, IQ4, NF4, FP4 = "whole", "e4m3", "e2m1", "iq4", "nf4", "fp4"
"""What a code means: a whole number; a number of 8 bits with four of exponent and three of mantissa; one of 4
bits with two of exponent and one of mantissa; one of 16 whole numbers that lie closer near 0; one of the 16
numbers of bitsandbytes, in either kind."""
UNROUNDED = (E4M3, NF4, FP4)
"""The kinds that are multiplied as floats, with inputs that are not rounded."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = tuple(level / 12 for level in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
LEVELS: Mapping[str, tuple[float, ...]] = {
    E2M1: (*_E2M1, *(-level for level in _E2M1)),
    IQ4: (*(-127, -104, -83, -65, -49, -35, -22, -10), *(1, 13, 25, 38, 53, 69, 89, 113)),
    NF4: (
        *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ),
    FP4: (*_FP4, *(-level for level in _FP4)),
}
"""The 16 numbers that codes of 4 bits stand for, by kind: mxfp4's, those of GGUF's IQ4_NL and IQ4_XS, and
those of bitsandbytes."""


PLAIN_BITS = 16
"""The bits of matrices that stay as they are."""


class Coding(msgspec.Struct, frozen=True, kw_only=True):
    """The form in which the matrix of one module is stored."""

    format: str
    """The reader of its tensors, a name in `models/quantization/matrices.py`."""
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


class Quantization:
    """A checkpoint's method, with all that its config says."""

    method: ClassVar[str]
    codings: Sequence[Coding]
    """All codings that its matrices may have, the usual one first."""

    plain: Sequence[str] = ()
    """Ends of names of modules, or of scopes around them, whose matrices are plain: `gate` is no part of
    `gate_proj`, which many lists for mixtures leave quantized."""

    def coding_of(self, module: str) -> Coding | None:
        """The coding of the matrix of a module, by its name in the checkpoint; None if it is plain."""
        plain = any(f"{part}." in f"{module}." for part in self.plain)
        return None if plain else self.codings[0]

    @property
    def bits(self) -> int:
        """The fewest bits that a matrix has."""
        return min((coding.bits for coding in self.codings), default=PLAIN_BITS)

    @property
    def ordered(self) -> bool:
        """Whether matrices have their inputs in an order of their own: then their sums have no sections."""
        return any(coding.ordered for coding in self.codings)

    def describe(self) -> str:
        """The method and its numbers, for people."""
        return f"{self.method}, {describe_form(self.codings[0].bits, self.codings[0].group)}"


def describe_form(bits: int, group: int) -> str:
    return f"{bits} bits, " + (f"groups of {group}" if group else "one scale for a row")


_FIELDS = ("quantization_config", "compression_config")
_SIDE_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files of older tools, and the method of those that do not name one."""


class SavedQuantization(msgspec.Struct, frozen=True):
    """The fields that describe how a checkpoint was quantized, as they were saved."""

    place: str
    """The file, and the field that holds them if the file is config.json."""
    fields: dict[str, object]


def find_quantization(
    folder: Path, whole: Mapping[str, object], text: Mapping[str, object]
) -> SavedQuantization | None:
    """Find the description of a checkpoint whose config.json is `whole`; None if it is not quantized.

    Composite checkpoints have it at the top level or in their text part, `text`.
    """
    for scope in (whole, text):
        for name in _FIELDS:
            if (found := scope.get(name)) is not None:
                return _saved(f"config.json: {name}", found)
    for name, method in _SIDE_FILES.items():
        path = folder / name
        if path.exists():
            saved = _saved(name, read_json(path))
            inner = saved.fields.get("quantization")  # ModelOpt's file has a level more
            fields = cast("dict[str, object]", inner) if isinstance(inner, dict) else saved.fields
            return SavedQuantization(saved.place, {"quant_method": method, **fields})
    return None


def _saved(place: str, value: object) -> SavedQuantization:
    if not isinstance(value, dict):
        raise FileError(f"{place} must be an object, but is {type(value).__name__}")
    return SavedQuantization(place, cast("dict[str, object]", value))
