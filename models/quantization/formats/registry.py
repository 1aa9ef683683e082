"""The reader of each format in which a matrix may be stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from models.coding import Coding
from models.ops.grouped_matrix import Grouped
from models.quantization.formats import awq, compressed, fp8, gguf, gptq, mxfp4
from models.quantization.formats.scope import Scope
from models.quantization.methods.gguf import CODINGS
from models.weight_pieces import Cut

Read = Callable[[Scope, Coding, tuple[int, int], Cut | None], Grouped | None]


@dataclass(frozen=True)
class Format:
    main: str
    """The tensor that a module of this format always has."""
    kinds: tuple[str, ...]
    """The number types that this tensor may have. One of another type belongs to a module that is plain."""
    read: Read
    embeds: bool = False
    """Whether token embeddings may be stored so too. Other formats leave them plain, whatever configs say."""


FORMATS: Mapping[str, Format] = {
    "gptq": Format(gptq.MAIN, ("int32",), gptq.read),
    "gptq_v2": Format(gptq.MAIN, ("int32",), gptq.read),
    "awq": Format(awq.MAIN, ("int32",), awq.read),
    "fp8": Format(fp8.MAIN, fp8.KINDS, fp8.read),
    "pack-quantized": Format(compressed.PACKED, ("int32",), compressed.read),
    "int-quantized": Format(compressed.PLAIN, ("int8",), compressed.read),
    "mxfp4": Format(mxfp4.PACKED, mxfp4.KINDS, mxfp4.read),
    **{name: Format(gguf.MAIN, (name,), gguf.read, embeds=True) for name in CODINGS},
}
