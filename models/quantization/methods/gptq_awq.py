"""GPTQ, AWQ and AutoRound: what they say of whole numbers in groups, packed in words. No torch."""

from __future__ import annotations

from typing import Annotated

import msgspec

from models.config import ConfigError
from models.quantization.module_patterns import compiled
from models.weight_coding import PLAIN_BITS, Coding, Quantization, SavedQuantization, describe_form

GroupSize = Annotated[int, msgspec.Meta(ge=-1, le=1 << 20)]

_AWQ_GROUP = 128


class _Own(msgspec.Struct, frozen=True):
    """The numbers of some modules; those that are missing are the checkpoint's."""

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
    dynamic: dict[str, _Own | bool] | None = None


class AwqFields(msgspec.Struct, frozen=True, kw_only=True):
    bits: int | None = None
    w_bit: int | None = None
    group_size: GroupSize | None = None
    q_group_size: GroupSize | None = None
    version: str = "gemm"
    modules_to_not_convert: list[str] | None = None


class AutoRoundFields(msgspec.Struct, frozen=True, kw_only=True):
    bits: int
    group_size: GroupSize = 128
    sym: bool = True
    packing_format: str = "auto_round:auto_gptq"
    extra_config: dict[str, _Own] | None = None


def refuse_bits(place: str, bits: int | None, possible: str, field: str = "bits") -> ConfigError:
    return ConfigError(
        f"{place}: {field!r} is {bits}, but must be {possible}: use another checkpoint of the model, or the "
        "plain one with --quantization int4"
    )


class Gptq(Quantization):
    """A checkpoint of GPTQ, of either version: the first stores each zero point less one."""

    method = "gptq"

    def __init__(self, saved: SavedQuantization, fields: GptqFields) -> None:
        self._place = saved.place
        self._fields = fields
        self._version = fields.checkpoint_format or fields.format or "gptq"
        if self._version not in ("gptq", "gptq_v2"):
            raise ConfigError(
                f"{saved.place}: 'checkpoint_format' is {self._version!r}, but must be gptq or gptq_v2: use "
                "a checkpoint of the model in GPTQ's own layout"
            )
        default, place = self._coding(_Own()), f"{saved.place}: 'dynamic'"
        self._rules = [
            (
                compiled(key.removeprefix("-:").removeprefix("+:"), place),
                self._coding(_Own() if isinstance(given, bool) else given),
                key.startswith("-:") or given is False,
            )
            for key, given in (fields.dynamic or {}).items()
        ]
        self.codings = [default, *(coding for _, coding, _ in self._rules)]

    def coding_of(self, module: str) -> Coding | None:
        for pattern, coding, leaves_plain in self._rules:
            if pattern.match(module):
                return None if leaves_plain else coding
        return self.codings[0]

    def _coding(self, own: _Own) -> Coding:
        fields = self._fields
        bits = fields.bits if own.bits is None else own.bits
        if bits not in (4, 8):
            raise refuse_bits(self._place, bits, "4 or 8")
        return Coding(
            format=self._version,
            bits=bits,
            group=max(0, fields.group_size if own.group_size is None else own.group_size),
            symmetric=fields.sym if own.sym is None else own.sym,
            ordered=fields.desc_act if own.desc_act is None else own.desc_act,
        )


class Awq(Quantization):
    """A checkpoint of AWQ, in its "gemm" layout."""

    method = "awq"

    def __init__(self, saved: SavedQuantization, fields: AwqFields) -> None:
        bits = fields.w_bit if fields.bits is None else fields.bits
        size = fields.q_group_size if fields.group_size is None else fields.group_size
        if bits != 4:
            raise refuse_bits(saved.place, bits, "4")
        if fields.version.lower() != "gemm":
            raise ConfigError(
                f"{saved.place}: 'version' is {fields.version!r}, but must be gemm: use a checkpoint of the "
                "model in that layout"
            )
        group = max(0, _AWQ_GROUP if size is None else size)
        self.codings = [Coding(format="awq", bits=4, group=group, symmetric=False)]
        self.plain = fields.modules_to_not_convert or []


class AutoRound(Quantization):
    """A checkpoint in the layout of GPTQ or of AWQ, with numbers of their own for some modules."""

    method = "auto-round"

    def __init__(self, saved: SavedQuantization, fields: AutoRoundFields) -> None:
        self._place = saved.place
        self._fields = fields
        layout = next((name for name in ("gptq", "awq") if name in fields.packing_format), None)
        if layout is None:
            raise ConfigError(
                f"{saved.place}: 'packing_format' is {fields.packing_format!r}, but must be one of auto_gptq "
                "and auto_awq: use a checkpoint of the model in such a layout"
            )
        self._layout = layout
        self._default = self._coding(_Own())
        self._own = {name: self._coding(own) for name, own in (fields.extra_config or {}).items()}
        for name in self._own:
            compiled(name, f"{saved.place}: 'extra_config'")
        found = (self._default, *self._own.values())
        self.codings = [coding for coding in found if coding is not None]

    def coding_of(self, module: str) -> Coding | None:
        if module in self._own:
            return self._own[module]
        matching = (name for name in self._own if compiled(name, self._place).fullmatch(module))
        name = next(matching, None)
        return self._default if name is None else self._own[name]

    def describe(self) -> str:
        return f"{self.method}, {describe_form(self._fields.bits, max(0, self._fields.group_size))}"

    def _coding(self, own: _Own) -> Coding | None:
        fields = self._fields
        bits = fields.bits if own.bits is None else own.bits
        if bits >= PLAIN_BITS:
            return None
        if bits not in ((4,) if self._layout == "awq" else (4, 8)):
            raise refuse_bits(self._place, bits, "4 or 8, and with AWQ's layout 4")
        return Coding(
            format=self._layout,
            bits=bits,
            group=max(0, fields.group_size if own.group_size is None else own.group_size),
            symmetric=fields.sym if own.sym is None else own.sym,
        )
