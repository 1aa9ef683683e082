"""GGUF: GGML's types of tensors, which are codings, and the one that each matrix has. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from models.config import ConfigError
from models.weight_coding import E2M1, IQ4, WHOLE, Coding, Quantization, SavedQuantization


@dataclass(frozen=True)
class GgmlType:
    """A type of GGML, which is a coding: so many numbers of a row are stored in so many bytes."""

    name: str
    numbers: int
    nbytes: int


GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 36),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}

REMOVED = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Codings of older files, which GGML itself no longer reads."""

PLAIN = ("F32", "F16", "BF16")
"""The codings that are read of tensors that are not quantized."""

CODINGS: Mapping[str, Coding] = {
    name: Coding(format=name, bits=bits, group=group, codes=codes)
    for name, bits, group, codes in (
        ("Q8_0", 8, 32, WHOLE),
        ("Q4_0", 4, 32, WHOLE),
        ("Q4_1", 4, 32, WHOLE),
        ("Q5_0", 5, 32, WHOLE),
        ("Q5_1", 5, 32, WHOLE),
        ("Q4_K", 4, 32, WHOLE),
        ("Q5_K", 5, 32, WHOLE),
        ("Q6_K", 6, 16, WHOLE),
        ("IQ4_NL", 4, 32, IQ4),
        ("IQ4_XS", 4, 32, IQ4),
        ("MXFP4", 4, 32, E2M1),
    )
}
"""The codings of blocks that are read: their bits, the numbers that share a scale, and what codes mean."""
_NUMBER = re.compile(r"(?<=\.experts\.)\d+\.")


def module_of_all(module: str) -> str:
    """The name that stands for a module of all experts of a layer, which are stored in one tensor."""
    return _NUMBER.sub("", module)


class GgufFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields on matrices that `models/gguf/config.py` writes for a file."""

    codings: dict[str, str]
    """GGML's name of the coding of each matrix that is not plain, by its module in the own checkpoint.

    All experts of a layer have one name, as `module_of_all` makes it."""
    file_type: str = ""
    """llama.cpp's name of this mixture of codings."""


class Gguf(Quantization):
    """A GGUF file, each of whose matrices may have another coding."""

    method = "gguf"

    def __init__(self, saved: SavedQuantization, fields: GgufFields) -> None:
        for module, name in fields.codings.items():
            if name not in CODINGS:
                raise ConfigError(
                    f"{saved.place}: {module} is stored as {name}, which is not read, but only "
                    f"{', '.join(CODINGS)}: use another file of the model"
                )
        self._fields = fields
        self.codings = [CODINGS[name] for name in dict.fromkeys(fields.codings.values())]

    def coding_of(self, module: str) -> Coding | None:
        name = self._fields.codings.get(module_of_all(module))
        return None if name is None else CODINGS[name]

    def describe(self) -> str:
        codings = sorted(set(self._fields.codings.values()))
        return f"{self.method}, {self._fields.file_type or ' and '.join(codings)}"
