"""mxfp4 as gpt-oss has it: experts in e2m1, with a power of two for each 32 inputs. No torch."""

from __future__ import annotations

import msgspec

from models.coding import E2M1, Coding, describe_form
from models.saved_quantization import SavedQuantization

FORM = Coding(format="mxfp4", bits=4, group=32, codes=E2M1)
_EXPERTS = "experts"


class Mxfp4Fields(msgspec.Struct, frozen=True, kw_only=True):
    modules_to_not_convert: list[str] | None = None


class Mxfp4:
    """A checkpoint whose experts are packed, all those of a layer in one tensor. Everything else is plain."""

    method = "mxfp4"
    bits = FORM.bits
    ordered = False

    def __init__(self, saved: SavedQuantization, fields: Mxfp4Fields) -> None:
        self._plain = fields.modules_to_not_convert or []

    def coding_of(self, module: str) -> Coding | None:
        if _EXPERTS not in module.split(".") or any(part in module for part in self._plain):
            return None
        return FORM

    def describe(self) -> str:
        return f"{self.method}, {describe_form(FORM.bits, FORM.group)}"
