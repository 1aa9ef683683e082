"""fp8: bytes in e4m3 with a scale for a block, a row or the whole matrix. What its fields say. No torch."""

from __future__ import annotations

from typing import Annotated

import msgspec

from models.coding import E4M3, Coding
from models.config import ConfigError
from models.saved_quantization import SavedQuantization

_Side = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Fp8Fields(msgspec.Struct, frozen=True, kw_only=True):
    weight_block_size: tuple[_Side, _Side] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    fmt: str = "e4m3"
    activation_scheme: str | None = None


class Fp8:
    """A checkpoint of DeepSeek's blocks, of scales per tensor, or of FBGEMM's scales per row."""

    method = "fp8"
    bits = 8
    ordered = False

    def __init__(self, saved: SavedQuantization, fields: Fp8Fields) -> None:
        if fields.fmt != "e4m3":
            raise ConfigError(
                f"{saved.place}: 'fmt' is {fields.fmt!r}, but must be e4m3: use another checkpoint"
            )
        rows, columns = fields.weight_block_size or (0, 0)
        self._form = Coding(
            format="fp8",
            bits=8,
            group=columns,
            rows=rows,
            codes=E4M3,
            input_bits=8,
            static_inputs=fields.activation_scheme == "static" and not rows,
        )
        self._plain = [*(fields.modules_to_not_convert or []), *(fields.ignored_layers or [])]

    def coding_of(self, module: str) -> Coding | None:
        return None if any(part in module for part in self._plain) else self._form

    def describe(self) -> str:
        rows, columns = self._form.rows, self._form.group
        scales = f"blocks of {rows} x {columns}" if rows else "one scale for a row or a matrix"
        return f"{self.method}, {scales}"
