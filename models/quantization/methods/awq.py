"""AWQ, in its "gemm" layout: what its fields say. No torch."""

from __future__ import annotations

from typing import Annotated

import msgspec

from models.coding import Coding, describe_form
from models.config import ConfigError
from models.saved_quantization import SavedQuantization

GroupSize = Annotated[int, msgspec.Meta(ge=-1, le=1 << 20)]

_USUAL_GROUP = 128


class AwqFields(msgspec.Struct, frozen=True, kw_only=True):
    bits: int | None = None
    w_bit: int | None = None
    group_size: GroupSize | None = None
    q_group_size: GroupSize | None = None
    version: str = "gemm"
    modules_to_not_convert: list[str] | None = None


class Awq:
    method = "awq"
    bits = 4
    ordered = False

    def __init__(self, saved: SavedQuantization, fields: AwqFields) -> None:
        bits = fields.w_bit if fields.bits is None else fields.bits
        size = fields.q_group_size if fields.group_size is None else fields.group_size
        if bits != 4:
            raise ConfigError(
                f"{saved.place}: 'bits' is {bits}, but must be 4: use another checkpoint of the model, or "
                "the plain one with --quantization int4"
            )
        if fields.version.lower() != "gemm":
            raise ConfigError(
                f"{saved.place}: 'version' is {fields.version!r}, but must be gemm: use a checkpoint of the "
                "model in that layout"
            )
        self._form = Coding(
            format="awq", bits=4, group=max(0, _USUAL_GROUP if size is None else size), symmetric=False
        )
        self._plain = fields.modules_to_not_convert or []

    def coding_of(self, module: str) -> Coding | None:
        return None if any(part in module for part in self._plain) else self._form

    def describe(self) -> str:
        return f"{self.method}, {describe_form(self._form.bits, self._form.group)}"
