"""Vectors as arrays, and in the encodings of answers.

The usual answer is base64 of the very bytes that came from the engine: no number is converted or copied for
it.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from models.pooling.sentence_files import Similarity
from worker.protocol import CosineScores, Vectors

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]

Floats = NDArray[np.float32]


def as_array(vectors: Vectors) -> Floats:
    return np.frombuffer(vectors.data, dtype="<f4").reshape(vectors.shape)


def as_bytes(vectors: Vectors, dtype: EmbedDtype = "float32", endianness: Endianness = "native") -> bytes:
    """The numbers in the given type and byte order, one after the other."""
    big = endianness == "big" or (endianness == "native" and sys.byteorder == "big")
    if dtype == "float32" and not big:
        return vectors.data
    cast = _CASTS[dtype](as_array(vectors))
    return cast.astype(cast.dtype.newbyteorder(">" if big else "<"), copy=False).tobytes()


def as_json(vectors: Vectors) -> bytes:
    """Writes a list of numbers, or a list of such lists. Read as float32, they are the engine's bits."""
    return msgspec.json.encode(as_array(vectors).tolist())


def as_base64_json(
    vectors: Vectors, dtype: EmbedDtype = "float32", endianness: Endianness = "native"
) -> bytes:
    return b'"' + base64.b64encode(as_bytes(vectors, dtype, endianness)) + b'"'


def as_bits(vectors: Vectors, *, signed: bool) -> list[int]:
    """Writes one bit for each number, 1 if it is above zero, eight to a byte."""
    packed = np.packbits(as_array(vectors) > 0, axis=-1)
    return (packed.astype(np.int16) - 128 if signed else packed).tolist()


def scalar(vectors: Vectors) -> float:
    """The one number of an answer that is a score."""
    return float(as_array(vectors).reshape(-1)[0])


def compare(left: Vectors, right: Vectors, similarity: Similarity) -> float:
    """The similarity of two vectors as sentence-transformers computes it: distances are negative.

    Measures for many vectors compare two single ones by their angle.
    """
    one, two = as_array(left).astype(np.float64), as_array(right).astype(np.float64)
    match similarity:
        case "dot":
            return float(one @ two)
        case "euclidean":
            return -float(np.linalg.norm(one - two))
        case "manhattan":
            return -float(np.abs(one - two).sum())
        case "cosine" | "maxsim" | "meanmaxsim":
            lengths = float(np.linalg.norm(one) * np.linalg.norm(two))
            return float(one @ two) / lengths if lengths else 0.0


def label_probs(vectors: Sequence[Vectors], labels: int, learned: CosineScores) -> NDArray[np.floating]:
    """The probabilities [inputs, labels] of labels, whose own vectors come last. All have the length 1."""
    rows = np.stack([as_array(one) for one in vectors])
    scores = learned.scale * (rows[:-labels] @ rows[-labels:].T) + learned.bias
    if learned.activation == "sigmoid":
        return 1 / (1 + np.exp(-scores))
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def _bfloat16(array: Floats) -> NDArray[np.uint16]:
    bits = array.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # half to even
    return rounded.astype(np.uint16)


def _fp8(exponent_bits: int, largest: float) -> Callable[[Floats], NDArray[np.uint8]]:
    """Rounds to the nearest number of that format, half to even; beyond the largest it is the largest."""
    magnitudes = _fp8_magnitudes(exponent_bits)
    magnitudes = magnitudes[magnitudes <= largest]
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2

    def cast(array: Floats) -> NDArray[np.uint8]:
        size = np.abs(array).astype(np.float64)
        code = np.searchsorted(middles, size, side="left")
        halfway = size == middles[np.minimum(code, len(middles) - 1)]
        code = code + (halfway & (code % 2 == 1) & (code < len(middles)))
        return (code + 128 * np.signbit(array)).astype(np.uint8)

    return cast


def _fp8_magnitudes(exponent_bits: int) -> NDArray[np.float64]:
    """The values of the codes 0 to 127, special ones read as numbers. They rise, so a code is an index."""
    mantissa_bits = 7 - exponent_bits
    codes = np.arange(128)
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    return np.ldexp(fraction, np.maximum(exponent, 1) - (2 ** (exponent_bits - 1) - 1))


_CASTS: dict[EmbedDtype, Callable[[Floats], NDArray[np.generic]]] = {
    "float32": lambda array: array,
    "float16": lambda array: array.astype(np.float16),
    "bfloat16": _bfloat16,
    "fp8_e4m3": _fp8(4, 448.0),
    "fp8_e5m2": _fp8(5, 57344.0),
}
