"""The method of a quantized checkpoint, which its config tells; others are refused here. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from models.config import ConfigError, ModelConfig
from models.plain_files import typed
from models.quantization.methods.bitsandbytes_modelopt import (
    Bitsandbytes,
    BitsandbytesFields,
    ModelOpt,
    ModelOptFields,
)
from models.quantization.methods.compressed_tensors import Compressed, CompressedFields
from models.quantization.methods.fp8_mxfp4 import Fp8, Fp8Fields, Mxfp4, Mxfp4Fields
from models.quantization.methods.gguf import Gguf, GgufFields
from models.quantization.methods.gptq_awq import AutoRound, AutoRoundFields, Awq, AwqFields, Gptq, GptqFields
from models.weight_coding import Quantization, SavedQuantization

METHODS: Mapping[str, tuple[type[msgspec.Struct], Callable[[SavedQuantization, Any], Quantization]]] = {
    "gptq": (GptqFields, Gptq),
    "awq": (AwqFields, Awq),
    "auto-round": (AutoRoundFields, AutoRound),
    "fp8": (Fp8Fields, Fp8),
    "fbgemm_fp8": (Fp8Fields, Fp8),
    "compressed-tensors": (CompressedFields, Compressed),
    "gguf": (GgufFields, Gguf),
    "mxfp4": (Mxfp4Fields, Mxfp4),
    "bitsandbytes": (BitsandbytesFields, Bitsandbytes),
    "modelopt": (ModelOptFields, ModelOpt),
}
"""The methods that are read, by name: the struct of their fields, and the class that is made of it."""

SAME = {"gptq_marlin": "gptq", "awq_marlin": "awq", "gptq_bitblas": "gptq", "modelopt_fp4": "modelopt"}
"""Names that vLLM's --quantization has for a faster kernel of a method."""

MADE_ON_CUDA = "fp8"
"""The method that checkpoints have, and that is made of a plain one when it is loaded on CUDA."""
MADE_ON_LOADING = ("int8", "int8-dynamic", "int4")
"""Values of --quantization for weights that become small, or smaller, while they are loaded."""
MOST_BITS = 8
"""The most bits of a quantized matrix; a checkpoint of more has only its cache quantized."""
_LEAST_BITS = 8
"""The bits that a checkpoint must have for others to be made of its weights."""


def read_quantization(config: ModelConfig) -> Quantization | None:
    """Read how the checkpoint was quantized; None if it was not. Raises ConfigError if it cannot be read."""
    saved = config.quantization
    if saved is None:
        return None
    method = _method(saved.fields)
    if method == "torchao":
        raise ConfigError(
            f"{saved.place}: torchao's tensors are pickled objects of its own classes, and are not read: use "
            "the plain checkpoint (--quantization int8 or int4), or one of compressed-tensors or GPTQ"
        )
    if method not in METHODS:
        raise ConfigError(
            f"{saved.place}: method {method!r} is not read: use one of {', '.join(METHODS)}, or a plain one "
            "(-q int8)"
        )
    kind, make = METHODS[method]
    return make(saved, typed(saved.fields, kind, f"{saved.place} ({method})"))


def describe_quantization(config: ModelConfig, asked: str | None) -> str | None:
    """What the served weights are: the checkpoint's method and numbers, or what is made on loading."""
    found = read_quantization(config)
    if found is None:
        return asked
    return f"{asked}, made of {found.describe()}" if asked in MADE_ON_LOADING else found.describe()


def makes_fp8(config: ModelConfig, asked: str | None) -> bool:
    """Whether --quantization `asked` makes fp8 of plain weights: those of an fp8 checkpoint stay plain."""
    return asked == MADE_ON_CUDA and read_quantization(config) is None


def check_quantization(config: ModelConfig, asked: str | None) -> None:
    """Refuse a checkpoint that is not read, and a value of --quantization that does not fit it."""
    found = read_quantization(config)
    if asked is None:
        return
    if asked in MADE_ON_LOADING:
        if found is not None and found.bits < _LEAST_BITS:
            raise ConfigError(
                f"--quantization {asked}: the checkpoint has {found.bits} bits already "
                f"({found.describe()}): leave the option out, or use the plain checkpoint"
            )
        return
    method = SAME.get(asked, asked)
    if found is None and method == MADE_ON_CUDA:
        return  # the worker refuses it where it has another device
    if found is None:
        raise ConfigError(
            f"--quantization {asked}: the checkpoint is not quantized; leave the option out, or choose "
            f"{', '.join(MADE_ON_LOADING)}"
        )
    if found.method != method:
        raise ConfigError(
            f"--quantization {asked}: the checkpoint is of {found.method}; leave the option out"
        )


def _method(fields: Mapping[str, object]) -> str:
    """The name of the method; where it is missing, the fields tell."""
    named = fields.get("quant_method")
    if isinstance(named, str):
        return named
    marks = {
        "config_groups": "compressed-tensors",
        "packing_format": "auto-round",
        "w_bit": "awq",
        "bits": "gptq",
    }
    return next((method for field, method in marks.items() if field in fields), "not named")


class CacheScheme(msgspec.Struct, frozen=True, kw_only=True):
    """The field `kv_cache_scheme` of compressed-tensors."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    dynamic: bool | str = False

    @property
    def obstacle(self) -> str | None:
        """Why keys and values cannot be cached so, as the end of a sentence; None if they can be in fp8."""
        if (self.num_bits, self.type) != (8, "float"):
            return f"numbers of {self.num_bits} bits of the type {self.type!r}, and fp8 alone is known"
        if self.strategy == "attn_head":
            return "a scale for each head, and one for each layer alone is known"
        return None


def read_cache_scheme(config: ModelConfig) -> CacheScheme | None:
    """Read how the checkpoint wants its KV cache; None if it says nothing.

    Other methods than compressed-tensors do not say it: they have scales, which an option puts to use.
    """
    saved = config.quantization
    if saved is None or "config_groups" not in saved.fields:
        return None
    try:
        return msgspec.convert(saved.fields.get("kv_cache_scheme"), CacheScheme | None)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{saved.place}: 'kv_cache_scheme': {error}") from None
