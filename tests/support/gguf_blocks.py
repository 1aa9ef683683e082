"""Blocks of GGUF by the package `gguf`: near the numbers of a matrix, or random where it writes none."""

import zlib

import gguf
import numpy as np

Array = np.ndarray

KINDS = {
    kind: gguf.GGMLQuantizationType[kind].value
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
}
"""GGML's numbers of codings."""
_SCALES = {
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
    "IQ4_NL": {0: 1.0},
    "IQ4_XS": {0: 1.0},
    "MXFP4": {},
}
"""Where blocks that are drawn have scales, each as a multiple of the first, so that numbers are around 0."""


def in_blocks(matrix: Array, name: str) -> tuple[bytes, Array]:
    """Write a matrix [N, K], row after row; returns the bytes, and what they mean [N, K] float32.

    Numbers of blocks that are drawn are as large as those of the matrix.
    """
    kind = gguf.GGMLQuantizationType(KINDS[name])
    size, stored = gguf.GGML_QUANT_SIZES[kind]
    blocks = matrix.astype(np.float32).reshape(-1, size)
    if name not in _SCALES:
        data = gguf.quants.quantize(blocks, kind)
    else:
        drawn = np.random.default_rng(zlib.crc32(blocks.tobytes()))
        data = drawn.integers(0, 256, (len(blocks), stored), dtype=np.uint8)
        _scale(data, np.ones(len(blocks)), name)
        _scale(data, _sizes(blocks) / _sizes(gguf.quants.dequantize(data, kind)), name)
    return data.tobytes(), gguf.quants.dequantize(data, kind).reshape(matrix.shape)


def _sizes(blocks: Array) -> Array:
    return np.sqrt(np.square(blocks.astype(float)).mean(1))


def _scale(data: Array, factors: Array, name: str) -> None:
    """Write scales in float16; MXFP4 has a power of two, as a byte of which 127 stands for 1."""
    if name == "MXFP4":
        data[:, 0] = np.clip(127 + np.round(np.log2(np.maximum(factors, 1e-9))), 0, 254)
        return
    for place, multiple in _SCALES[name].items():
        data[:, place : place + 2] = (factors * multiple).astype("<f2")[:, None].view(np.uint8)
