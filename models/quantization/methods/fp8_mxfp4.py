"""fp8 and mxfp4: what their fields say of small floats with scales for blocks, rows or groups. No torch."""

from __future__ import annotations

from typing import Annotated

import msgspec

from models.config import ConfigError
from models.weight_coding import E2M1, E4M3, Coding, Quantization, SavedQuantization

MXFP4 = Coding(format="mxfp4", bits=4, group=32, codes=E2M1)
NVFP4 = Coding(format="nvfp4", bits=4, group=16, codes=E2M1)
_EXPERTS = "experts"
_Side = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Fp8Fields(msgspec.Struct, frozen=True, kw_only=True):
    weight_block_size: tuple[_Side, _Side] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    fmt: str = "e4m3"
    activation_scheme: str | None = None


class Mxfp4Fields(msgspec.Struct, frozen=True, kw_only=True):
    modules_to_not_convert: list[str] | None = None


def fp8_coding(rows: int, columns: int, input_bits: int, *, static_inputs: bool) -> Coding:
    """The coding of blocks of so many rows and columns; of 0 if rows or whole matrices have a scale."""
    return Coding(
        format="fp8",
        bits=8,
        group=columns,
        rows=rows,
        codes=E4M3,
        input_bits=input_bits,
        static_inputs=static_inputs and not rows,
    )


class Fp8(Quantization):
    """A checkpoint of DeepSeek's blocks, of scales per tensor, or of FBGEMM's scales per row."""

    method = "fp8"

    def __init__(self, saved: SavedQuantization, fields: Fp8Fields) -> None:
        if fields.fmt not in ("e4m3", "float8_e4m3fn"):
            raise ConfigError(
                f"{saved.place}: 'fmt' is {fields.fmt!r}, but must be e4m3: use another checkpoint"
            )
        is_static = fields.activation_scheme == "static"
        self.codings = [fp8_coding(*(fields.weight_block_size or (0, 0)), 8, static_inputs=is_static)]
        self.plain = [*(fields.modules_to_not_convert or []), *(fields.ignored_layers or [])]

    def describe(self) -> str:
        rows, columns = self.codings[0].rows, self.codings[0].group
        scales = f"blocks of {rows} x {columns}" if rows else "one scale for a row or a matrix"
        return f"{self.method}, {scales}"


class Mxfp4(Quantization):
    """A checkpoint like gpt-oss', whose experts are packed, all those of a layer in one tensor.

    Everything else is plain.
    """

    method = "mxfp4"
    codings = (MXFP4,)

    def __init__(self, saved: SavedQuantization, fields: Mxfp4Fields) -> None:
        self.plain = fields.modules_to_not_convert or []

    def coding_of(self, module: str) -> Coding | None:
        return super().coding_of(module) if _EXPERTS in module.split(".") else None
