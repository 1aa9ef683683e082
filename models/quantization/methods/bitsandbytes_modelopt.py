"""bitsandbytes and ModelOpt: what their fields say of the stored matrices. No torch."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Literal

import msgspec

from models.config import ConfigError
from models.quantization.methods.fp8_mxfp4 import NVFP4, fp8_coding
from models.weight_coding import Coding, Quantization, SavedQuantization

BNB_4BIT, BNB_INT8 = "bnb-4bit", "bnb-int8"
_BLOCK = 64


class BitsandbytesFields(msgspec.Struct, frozen=True, kw_only=True):
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "fp4"
    bnb_4bit_quant_storage: str = "uint8"
    llm_int8_skip_modules: list[str] | None = None


class Bitsandbytes(Quantization):
    """A checkpoint with a table of 16 numbers and a scale for each block, or with bytes and a scale a row."""

    method = "bitsandbytes"

    def __init__(self, saved: SavedQuantization, fields: BitsandbytesFields) -> None:
        if fields.load_in_4bit == fields.load_in_8bit:
            raise ConfigError(
                f"{saved.place}: one of 'load_in_4bit' and 'load_in_8bit' must be true: take another one"
            )
        if fields.load_in_4bit and fields.bnb_4bit_quant_storage != "uint8":
            raise ConfigError(
                f"{saved.place}: 'bnb_4bit_quant_storage' is {fields.bnb_4bit_quant_storage!r}, but must be "
                "uint8: save the model again with that"
            )
        self._kind = fields.bnb_4bit_quant_type if fields.load_in_4bit else "int8"
        by_blocks = Coding(format=BNB_4BIT, bits=4, group=_BLOCK)
        self.codings = [by_blocks if fields.load_in_4bit else Coding(format=BNB_INT8, bits=8)]
        self.plain = fields.llm_int8_skip_modules or ["lm_head"]

    def describe(self) -> str:
        return f"{self.method}, {self._kind}"


class ModelOptFields(msgspec.Struct, frozen=True, kw_only=True):
    quant_algo: str | None = None
    exclude_modules: list[str] | None = None
    ignore: list[str] | None = None


class ModelOpt(Quantization):
    """A checkpoint of NVIDIA's ModelOpt: e4m3 with a scale a matrix, or e2m1 with two levels of scales."""

    method = "modelopt"

    def __init__(self, saved: SavedQuantization, fields: ModelOptFields) -> None:
        known = {"FP8": fp8_coding(0, 0, 8, static_inputs=True), "NVFP4": NVFP4}
        if fields.quant_algo not in known:
            raise ConfigError(
                f"{saved.place}: 'quant_algo' is {fields.quant_algo!r}, but must be {' or '.join(known)}: "
                "use such a checkpoint of the model, or the plain one (--quantization int8)"
            )
        self._algorithm = fields.quant_algo
        self.codings = [known[fields.quant_algo]]
        self._plain = [*(fields.exclude_modules or ()), *(fields.ignore or ())]

    def coding_of(self, module: str) -> Coding | None:
        plain = (fnmatchcase(module, name) or module.startswith(f"{name}.") for name in self._plain)
        return None if any(plain) else self.codings[0]

    def describe(self) -> str:
        return f"{self.method}, {self._algorithm}"
