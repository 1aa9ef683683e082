"""compressed-tensors: what its fields say, and which of its groups a module belongs to. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from models.config import ConfigError
from models.quantization.methods.fp8_mxfp4 import MXFP4, NVFP4, fp8_coding
from models.quantization.methods.gptq_awq import GroupSize, refuse_bits
from models.quantization.module_patterns import compiled
from models.weight_coding import Coding, Quantization, SavedQuantization, describe_form

_SMALL_FLOATS = {
    "mxfp4-pack-quantized": MXFP4,
    "nvfp4-pack-quantized": msgspec.structs.replace(NVFP4, format="nvfp4-pack-quantized"),
}
"""The formats of floats with 4 bits, whose groups have one length each."""
_FORMATS = {
    "pack-quantized": "int",
    "int-quantized": "int",
    "float-quantized": "float",
    **dict.fromkeys(_SMALL_FLOATS, "float"),
}
"""The formats that are read, and the type of their weights."""
_LAYER = "Linear"
"""The class of all modules that can have a coding: transformers' name for layers and heads alike."""


_Side = Annotated[int, msgspec.Meta(ge=1)]


class _Weights(msgspec.Struct, frozen=True, kw_only=True):
    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: GroupSize | None = None
    actorder: str | bool | None = None
    block_structure: tuple[_Side, _Side] | None = None


class _Inputs(msgspec.Struct, frozen=True, kw_only=True):
    num_bits: int = 8
    dynamic: bool | str = False


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    targets: list[str]
    weights: _Weights | None = None
    input_activations: _Inputs | None = None
    format: str | None = None


class CompressedFields(msgspec.Struct, frozen=True, kw_only=True):
    config_groups: dict[str, _Group | list[str]]
    ignore: list[str] = []
    format: str = "dense"
    sparsity_config: dict[str, object] | None = None
    transform_config: dict[str, object] | None = None
    kv_cache_scheme: object = None


_EIGHT, _CHANNELS = _Inputs(num_bits=8), _Weights(strategy="channel")
_GROUPS = _Weights(num_bits=4, strategy="group", group_size=128)
_PRESETS = {
    "W8A16": _Group(targets=[], weights=_CHANNELS),
    "W4A16": _Group(targets=[], weights=_GROUPS),
    "W4A16_ASYM": _Group(targets=[], weights=msgspec.structs.replace(_GROUPS, symmetric=False)),
    "W8A8": _Group(targets=[], weights=_CHANNELS, input_activations=_EIGHT),
    "INT8": _Group(targets=[], weights=_CHANNELS, input_activations=_EIGHT),
    "W4A8": _Group(targets=[], weights=_GROUPS, input_activations=_EIGHT),
}
"""Groups that are named instead of described, with their targets as value."""


class Compressed(Quantization):
    """A checkpoint of compressed-tensors: groups of modules, each with a coding."""

    method = "compressed-tensors"

    def __init__(self, saved: SavedQuantization, fields: CompressedFields) -> None:
        self._place = saved.place
        for name in ("sparsity_config", "transform_config"):
            value = getattr(fields, name) or {}
            if value.get("format", "dense") != "dense" or value.get("config_groups"):
                raise ConfigError(
                    f"{saved.place}: {name!r} is not supported: use a checkpoint of the model that is only "
                    "quantized"
                )
        described = {name: _described(saved.place, name, each) for name, each in fields.config_groups.items()}
        self._groups = [
            (group.targets, self._form(name, group, group.format or fields.format))
            for name, group in described.items()
        ]
        self.codings = list(dict.fromkeys(coding for _, coding in self._groups if coding is not None))
        self._ignored = fields.ignore
        for field, names in (("ignore", fields.ignore), *(("targets", names) for names, _ in self._groups)):
            for pattern in _patterns(names):
                compiled(pattern, f"{saved.place}: {field!r}")
        if not self._groups and fields.kv_cache_scheme is None:
            raise ConfigError(f"{saved.place}: 'config_groups' names no group of quantized modules")

    def coding_of(self, module: str) -> Coding | None:
        if self._rank(module, self._ignored) is not None:
            return None
        ranked = [
            (rank, i)
            for i, (names, _) in enumerate(self._groups)
            if (rank := self._rank(module, names)) is not None
        ]
        return self._groups[min(ranked)[1]][1] if ranked else None

    def describe(self) -> str:
        numbers = (
            describe_form(coding.bits, coding.group) + (" and inputs of 8" if coding.input_bits == 8 else "")
            for coding in self.codings
        )
        return ", ".join((self.method, "; ".join(numbers) or "plain weights"))

    def _rank(self, module: str, names: list[str]) -> int | None:
        """How exactly a module is named: 0 by its own name, 1 by a pattern, 2 by its class; None if not."""
        matches = any(compiled(pattern, self._place).match(module) for pattern in _patterns(names))
        ranks = {0: module in names, 1: matches, 2: _LAYER in names}
        return next((rank for rank, found in ranks.items() if found), None)

    def _form(self, name: str, group: _Group, format: str) -> Coding | None:
        weights = group.weights
        if weights is None or format == "dense":
            return None
        place, activations = f"{self._place}: group {name!r}", group.input_activations
        inputs = 8 if activations is not None and activations.num_bits <= 8 else 16
        if format not in _FORMATS or weights.type != _FORMATS[format]:
            raise ConfigError(
                f"{place}: 'format' {format!r} with {weights.type} weights is not read: use "
                f"{', '.join(name.removesuffix('quantized') for name in _FORMATS)}quantized"
            )
        if format in _SMALL_FLOATS:
            return _small_form(place, format, weights)
        if weights.type == "float":
            static = inputs == 8 and activations is not None and activations.dynamic is False
            return _float_form(place, weights, inputs, static=static)
        if weights.num_bits not in (4, 8):
            raise refuse_bits(place, weights.num_bits, "4 or 8", "num_bits")
        strategy = weights.strategy or ("group" if (weights.group_size or 0) > 0 else "tensor")
        if strategy not in ("tensor", "channel", "group") or (strategy == "group" and not weights.group_size):
            raise ConfigError(
                f"{place}: 'strategy' is {strategy!r} with a group_size of {weights.group_size}, but must be "
                "tensor, channel, or group with a size"
            )
        return Coding(
            format=format,
            bits=weights.num_bits,
            group=max(0, weights.group_size or 0) if strategy == "group" else 0,
            symmetric=weights.symmetric,
            ordered=weights.actorder in ("group", "dynamic", True),
            input_bits=inputs,
        )


def _float_form(place: str, weights: _Weights, inputs: int, *, static: bool) -> Coding:
    rows, columns = weights.block_structure or (0, 0)
    strategies = ("block",) if rows else ("tensor", "channel", None)
    if weights.num_bits != 8 or weights.strategy not in strategies or not weights.symmetric:
        raise ConfigError(
            f"{place}: {weights.num_bits} bits with the strategy {weights.strategy!r} are not read, "
            "but 8 by tensor, channel or block are: use such a checkpoint of floats"
        )
    return fp8_coding(rows, columns, inputs, static_inputs=static)


def _small_form(place: str, format: str, weights: _Weights) -> Coding:
    coding, short = _SMALL_FLOATS[format], format.partition("-")[0]
    if (weights.num_bits, weights.group_size) != (coding.bits, coding.group):
        raise ConfigError(
            f"{place}: {weights.num_bits} bits in groups of {weights.group_size} are not read in {short}, "
            f"but 4 bits in groups of {coding.group} are: use such a checkpoint"
        )
    return coding


def _described(place: str, name: str, group: _Group | list[str]) -> _Group:
    if not isinstance(group, list):
        return group
    if name.upper() not in _PRESETS:
        raise ConfigError(
            f"{place}: the group {name!r} names a scheme that is not read: there are {', '.join(_PRESETS)}"
        )
    return msgspec.structs.replace(_PRESETS[name.upper()], targets=group)


def _patterns(names: list[str]) -> list[str]:
    return [name[3:] for name in names if name.startswith("re:")]
