"""GGUF: the coding of each matrix by GGML's name, and what those codings are. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from models.coding import E2M1, IQ4, Coding
from models.config import ConfigError
from models.saved_quantization import SavedQuantization

CODINGS: Mapping[str, Coding] = {
    coding.format: coding
    for coding in (
        Coding(format="Q8_0", bits=8, group=32),
        Coding(format="Q4_0", bits=4, group=32),
        Coding(format="Q4_1", bits=4, group=32),
        Coding(format="Q5_0", bits=5, group=32),
        Coding(format="Q5_1", bits=5, group=32),
        Coding(format="Q4_K", bits=4, group=32),
        Coding(format="Q5_K", bits=5, group=32),
        Coding(format="Q6_K", bits=6, group=16),
        Coding(format="IQ4_NL", bits=4, group=32, codes=IQ4),
        Coding(format="IQ4_XS", bits=4, group=32, codes=IQ4),
        Coding(format="MXFP4", bits=4, group=32, codes=E2M1),
    )
}
"""The codings of blocks that are read, as `models/quantization/gguf_codings.py` lists them."""
_BITS_OF_PLAIN = 16
_NUMBER = re.compile(r"(?<=\.experts\.)\d+\.")


def module_of_all(module: str) -> str:
    """The name that stands for a module of all experts of a layer, which are stored in one tensor."""
    return _NUMBER.sub("", module)


class GgufFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of its matrices, in the words that `models/gguf/config.py` gives it."""

    codings: dict[str, str]
    """GGML's name of the coding of each matrix that is not plain, by its module in the own checkpoint.

    All experts of a layer have one name, as `module_of_all` makes it."""
    file_type: str = ""
    """llama.cpp's name of this mixture of codings."""


class Gguf:
    """A GGUF file, each of whose matrices may have another coding."""

    method = "gguf"
    ordered = False

    def __init__(self, saved: SavedQuantization, fields: GgufFields) -> None:
        for module, name in fields.codings.items():
            if name not in CODINGS:
                raise ConfigError(
                    f"{saved.place}: {module} is stored as {name}, which is not read, but only "
                    f"{', '.join(CODINGS)}: use another file of the model"
                )
        self._fields = fields
        self.bits = min((CODINGS[name].bits for name in fields.codings.values()), default=_BITS_OF_PLAIN)

    def coding_of(self, module: str) -> Coding | None:
        name = self._fields.codings.get(module_of_all(module))
        return None if name is None else CODINGS[name]

    def describe(self) -> str:
        codings = sorted(set(self._fields.codings.values()))
        return f"{self.method}, {self._fields.file_type or ' and '.join(codings)}"
