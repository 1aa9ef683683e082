"""GPTQ: what its fields say. No torch."""

from __future__ import annotations

from typing import Annotated

import msgspec

from models.coding import Coding, describe_form
from models.config import ConfigError
from models.quantization.matching import compiled
from models.saved_quantization import SavedQuantization

_BITS = (4, 8)
GroupSize = Annotated[int, msgspec.Meta(ge=-1, le=1 << 20)]


class _Overrides(msgspec.Struct, frozen=True):
    """The fields that `dynamic` may set for some modules."""

    bits: int | None = None
    group_size: GroupSize | None = None
    desc_act: bool | None = None
    sym: bool | None = None


class GptqFields(msgspec.Struct, frozen=True, kw_only=True):
    bits: int
    group_size: GroupSize = -1
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: str | None = None
    format: str | None = None
    dynamic: dict[str, _Overrides | bool] | None = None


class Gptq:
    """A checkpoint of GPTQ, of either version: the first stores each zero point less one."""

    method = "gptq"

    def __init__(self, saved: SavedQuantization, fields: GptqFields) -> None:
        self._place = saved.place
        self._fields = fields
        version = fields.checkpoint_format or fields.format or "gptq"
        if version not in ("gptq", "gptq_v2"):
            raise ConfigError(
                f"{saved.place}: 'checkpoint_format' is {version!r}, but must be gptq or gptq_v2: use a "
                "checkpoint of the model in GPTQ's own layout"
            )
        self._format = version
        self._default = self._form(_Overrides())
        place = f"{saved.place}: 'dynamic'"
        self._rules = [
            (key.startswith("-:"), compiled(key.removeprefix("-:").removeprefix("+:"), place), given)
            for key, given in (fields.dynamic or {}).items()
        ]
        # A number of bits that is not read is refused at once.
        self._codings = [
            self._default,
            *(self._form(_overrides(given)) for given in (fields.dynamic or {}).values()),
        ]

    def coding_of(self, module: str) -> Coding | None:
        for leaves_plain, pattern, given in self._rules:
            if pattern.match(module):
                return None if leaves_plain or given is False else self._form(_overrides(given))
        return self._default

    @property
    def bits(self) -> int:
        return min(coding.bits for coding in self._codings)

    @property
    def ordered(self) -> bool:
        return any(coding.ordered for coding in self._codings)

    def describe(self) -> str:
        return f"{self.method}, {describe_form(self._default.bits, self._default.group)}"

    def _form(self, given: _Overrides) -> Coding:
        fields = self._fields
        bits = fields.bits if given.bits is None else given.bits
        group = fields.group_size if given.group_size is None else given.group_size
        if bits not in _BITS:
            raise ConfigError(
                f"{self._place}: 'bits' is {bits}, but must be 4 or 8: use another checkpoint of the model, "
                "or the plain one with --quantization int4"
            )
        return Coding(
            format=self._format,
            bits=bits,
            group=max(0, group),
            symmetric=fields.sym if given.sym is None else given.sym,
            ordered=fields.desc_act if given.desc_act is None else given.desc_act,
        )


def _overrides(given: _Overrides | bool) -> _Overrides:
    return _Overrides() if isinstance(given, bool) else given
