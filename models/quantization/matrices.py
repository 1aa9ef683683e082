"""The matrix of a scope in a checkpoint, plain or quantized: read in the form it is stored in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from models.checkpoint.weights import Weights
from models.ops.grouped_matrix import Grouped, Matrix
from models.quantization.methods.bitsandbytes_modelopt import BNB_4BIT, BNB_INT8
from models.quantization.methods.gguf import CODINGS
from models.quantization.readers import bitsandbytes, compressed_tensors, fp8_mxfp4, gguf, gptq_awq
from models.weight_coding import Coding
from models.weight_slices import Cut

Read = Callable[[Weights, Coding, tuple[int, int], Cut | None], Matrix | None]


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
    "gptq": Format(gptq_awq.MAIN, ("int32",), gptq_awq.read),
    "gptq_v2": Format(gptq_awq.MAIN, ("int32",), gptq_awq.read),
    "awq": Format(gptq_awq.MAIN, ("int32",), gptq_awq.read),
    "fp8": Format(fp8_mxfp4.FP8, fp8_mxfp4.FP8_KINDS, fp8_mxfp4.read_fp8),
    "pack-quantized": Format(compressed_tensors.PACKED, ("int32",), compressed_tensors.read),
    "int-quantized": Format(compressed_tensors.PLAIN, ("int8",), compressed_tensors.read),
    "mxfp4": Format(fp8_mxfp4.PACKED, fp8_mxfp4.PACKED_KINDS, fp8_mxfp4.read_mxfp4),
    "nvfp4": Format(fp8_mxfp4.FP8, fp8_mxfp4.PACKED_KINDS, fp8_mxfp4.read_nvfp4),
    "nvfp4-pack-quantized": Format(fp8_mxfp4.PACKED, fp8_mxfp4.PACKED_KINDS, fp8_mxfp4.read_nvfp4),
    BNB_4BIT: Format(bitsandbytes.MAIN, ("uint8",), bitsandbytes.read_4bit),
    BNB_INT8: Format(bitsandbytes.MAIN, ("int8",), bitsandbytes.read_int8),
    **{name: Format(gguf.MAIN, (name,), gguf.read, embeds=True) for name in CODINGS},
}


def read_matrix(
    weights: Weights, shape: tuple[int, int], cut: Cut | None = None, *, transposed: bool = False
) -> Matrix:
    """Read the matrix [outputs, inputs] of a scope, or its piece `cut`.

    `transposed`: a plain one is stored as [inputs, outputs].
    """
    if coding := _coding_of(weights):
        matrix = FORMATS[coding.format].read(weights, coding, shape, cut)
        return _zeros(weights, shape, cut) if matrix is None else matrix
    if not transposed:
        return weights.take("weight", shape, cut, to_pack=True)
    turned = Cut(1 - cut.dim, cut.start, cut.stop) if cut else None
    return weights.take("weight", shape[::-1], turned, to_pack=True).t()


def read_embeddings(weights: Weights, shape: tuple[int, int], cut: Cut | None = None) -> Matrix:
    """Read token embeddings [tokens, size], or the piece `cut` of them."""
    coding = _coding_of(weights)
    if coding is None or not FORMATS[coding.format].embeds:
        return weights.take("weight", shape, cut)
    return read_matrix(weights, shape, cut)


def read_plain_matrix(
    weights: Weights, shape: tuple[int, int], cut: Cut | None, dtype: torch.dtype
) -> Tensor:
    """Read a matrix as plain numbers of this type, whatever its form."""
    if _coding_of(weights) is None:
        return weights.take("weight", shape, cut, dtype)
    with weights.reading.packing_nothing():
        matrix = read_matrix(weights, shape, cut)
    return matrix.widened(dtype) if isinstance(matrix, Grouped) else matrix.to(dtype)


def ignore_matrix(weights: Weights) -> None:
    weights.ignore("weight" if _coding_of(weights) is None else "")


def has_matrix(weights: Weights) -> bool:
    """Whether the checkpoint has a matrix in a scope, plain or quantized."""
    return "weight" in weights or _coding_of(weights) is not None


def _coding_of(weights: Weights) -> Coding | None:
    """The coding of a scope's matrix; None if it is plain, also if it was to be quantized."""
    quantization = weights.reading.quantization
    coding = None if quantization is None else quantization.coding_of(weights.path)
    if coding is None or not weights.reading.names:
        return coding
    format = FORMATS[coding.format]
    return coding if weights.stored_type(format.main) in format.kinds else None


def _zeros(weights: Weights, shape: tuple[int, int], cut: Cut | None) -> Tensor:
    zeros = torch.zeros((), device=weights.device, dtype=weights.dtype).expand(shape)
    return zeros if cut is None else cut.of(zeros)
