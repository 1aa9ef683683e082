"""AutoRound: the layout of GPTQ or of AWQ, with numbers of their own for some modules. No torch."""

from __future__ import annotations

import msgspec

from models.coding import Coding, describe_form
from models.config import ConfigError
from models.quantization.matching import compiled
from models.quantization.methods.gptq import GroupSize
from models.saved_quantization import SavedQuantization

_LAYOUTS = ("gptq", "awq")
_PLAIN_BITS = 16
"""Bits of modules that stay as they are."""


class _Own(msgspec.Struct, frozen=True):
    """The numbers of some modules; those that are missing are the checkpoint's."""

    bits: int | None = None
    group_size: GroupSize | None = None
    sym: bool | None = None


class AutoRoundFields(msgspec.Struct, frozen=True, kw_only=True):
    bits: int
    group_size: GroupSize = 128
    sym: bool = True
    packing_format: str = "auto_round:auto_gptq"
    extra_config: dict[str, _Own] | None = None


class AutoRound:
    method = "auto-round"
    ordered = False

    def __init__(self, saved: SavedQuantization, fields: AutoRoundFields) -> None:
        self._place = saved.place
        self._fields = fields
        layout = next((name for name in _LAYOUTS if name in fields.packing_format), None)
        if layout is None:
            raise ConfigError(
                f"{saved.place}: 'packing_format' is {fields.packing_format!r}, but must be one of auto_gptq "
                "and auto_awq: use a checkpoint of the model in such a layout"
            )
        self._format = layout
        self._default = self._form(_Own())
        self._own = {name: self._form(own) for name, own in (fields.extra_config or {}).items()}
        for name in self._own:
            compiled(name, f"{saved.place}: 'extra_config'")

    def coding_of(self, module: str) -> Coding | None:
        if module in self._own:
            return self._own[module]
        for name, coding in self._own.items():
            if compiled(name, self._place).fullmatch(module):
                return coding
        return self._default

    @property
    def bits(self) -> int:
        codings = (self._default, *self._own.values())
        return min((coding.bits for coding in codings if coding is not None), default=_PLAIN_BITS)

    def describe(self) -> str:
        return f"{self.method}, {describe_form(self._fields.bits, max(0, self._fields.group_size))}"

    def _form(self, own: _Own) -> Coding | None:
        fields = self._fields
        bits = fields.bits if own.bits is None else own.bits
        size = fields.group_size if own.group_size is None else own.group_size
        if bits >= _PLAIN_BITS:
            return None
        if bits not in ((4,) if self._format == "awq" else (4, 8)):
            raise ConfigError(
                f"{self._place}: 'bits' is {bits}, but must be 4 or 8, and with AWQ's layout 4: use another "
                "checkpoint of the model, or the plain one with --quantization int4"
            )
        symmetric = fields.sym if own.sym is None else own.sym
        return Coding(format=self._format, bits=bits, group=max(0, size), symmetric=symmetric)
