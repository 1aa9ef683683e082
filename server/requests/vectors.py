"""Vectors as arrays, and in the encodings of answers.

The usual answer is base64 of the very bytes that came from the engine: no number is converted or copied for
it.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from server.errors import BadRequest
from worker.protocol import Pooling, Task, Vectors

EmbedDtype = Literal[
    "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "uint8", "binary", "ubinary"
]
"""The types of numbers. A binary one has a bit for each number, 1 if it is above zero, eight to a byte."""
Endianness = Literal["native", "big", "little"]

Floats = NDArray[np.float32]


def as_array(vectors: Vectors) -> Floats:
    return np.frombuffer(vectors.data, dtype="<f4").reshape(vectors.shape)


@dataclass(frozen=True, slots=True)
class VectorForm:
    """The form of the vectors of an answer, all of which have the same ranges."""

    dtype: EmbedDtype = "float32"
    endianness: Endianness = "native"
    base64: bool = False
    ranges: Floats | None = None
    """[2, D]: the least and the greatest of each number, which int8 and uint8 divide into 255 steps."""

    @classmethod
    def of(
        cls,
        vectors: Sequence[Vectors],
        dtype: EmbedDtype = "float32",
        endianness: Endianness = "native",
        *,
        base64: bool = False,
        ranges: Floats | None = None,
    ) -> VectorForm:
        """The form for these vectors: without `ranges`, their own are taken."""
        if dtype not in ("int8", "uint8"):
            return cls(dtype, endianness, base64)
        width = vectors[0].shape[-1]
        if ranges is None:
            rows = np.concatenate([as_array(one).reshape(-1, width) for one in vectors])
            if len(rows) < 2:
                raise BadRequest(
                    f"{dtype} needs the ranges of numbers, which one vector does not have: send several "
                    "texts, or start the server with --int8-ranges.",
                    "embed_dtype",
                )
            ranges = np.stack([rows.min(axis=0), rows.max(axis=0)])
        elif ranges.shape[1] != width:
            raise BadRequest(
                f"--int8-ranges has ranges for {ranges.shape[1]} numbers, and these vectors have {width}.",
                "embed_dtype",
            )
        return cls(dtype, endianness, base64, ranges)

    def write(self, vectors: Vectors) -> msgspec.Raw:
        """Writes vectors as JSON: numbers, or base64 of their bytes."""
        if not self.base64:
            return msgspec.Raw(as_json(vectors, self))
        return msgspec.Raw(b'"' + base64.b64encode(self.bytes(vectors)) + b'"')

    def bytes(self, vectors: Vectors) -> bytes:
        return as_bytes(vectors, self.dtype, self.endianness, self.ranges)

    def cast(self, array: Floats) -> NDArray[np.generic]:
        return _cast(array, self.dtype, self.ranges)


def _cast(array: Floats, dtype: EmbedDtype, ranges: Floats | None) -> NDArray[np.generic]:
    if ranges is None:
        return _CASTS[dtype](array)
    steps = (ranges[1] - ranges[0]) / 255
    steps = np.where(steps == 0, 1, steps)
    codes = np.clip(np.floor((array - ranges[0]) / steps), 0, 255)
    return codes.astype(np.uint8) if dtype == "uint8" else (codes - 128).astype(np.int8)


def as_bytes(
    vectors: Vectors,
    dtype: EmbedDtype = "float32",
    endianness: Endianness = "native",
    ranges: Floats | None = None,
) -> bytes:
    """The numbers in the given type and byte order, one after the other."""
    big = endianness == "big" or (endianness == "native" and sys.byteorder == "big")
    if dtype == "float32" and not big:
        return vectors.data
    cast = _cast(as_array(vectors), dtype, ranges)
    return cast.astype(cast.dtype.newbyteorder(">" if big else "<"), copy=False).tobytes()


def as_json(vectors: Vectors, form: VectorForm | None = None) -> bytes:
    """Writes a list of numbers, or a list of such lists. Read as float32, they are the engine's bits."""
    array = as_array(vectors)
    if form is None or form.dtype == "float32":
        return msgspec.json.encode(array.tolist())
    cast = form.cast(array)
    if form.dtype == "bfloat16":  # which numpy does not have
        cast = (cast.astype(np.uint32) << 16).view(np.float32)
    return msgspec.json.encode(cast.tolist())


def sparse_json(vectors: Vectors) -> bytes:
    """Writes a sparse vector: the tokens that have a weight, rising, and their weights."""
    return msgspec.json.encode({"indices": token_ids(vectors).tolist(), "values": as_array(vectors).tolist()})


def sparse_pairs_json(vectors: Vectors) -> bytes:
    """Writes a sparse vector as text-embeddings-inference does."""
    pairs = zip(token_ids(vectors).tolist(), as_array(vectors).tolist(), strict=True)
    return msgspec.json.encode([{"index": index, "value": value} for index, value in pairs])


def token_ids(vectors: Vectors) -> NDArray[np.int32]:
    return np.frombuffer(vectors.ids, dtype="<i4")


def by_task(vectors: Vectors, params: Pooling) -> dict[Task, Vectors]:
    """All outputs of a text, in the order in which they were asked for."""
    return {params.task: vectors, **{task: vectors.others[task] for task in params.outputs}}


def scalar(vectors: Vectors) -> float:
    """The one number of an answer that is a score."""
    return float(as_array(vectors).reshape(-1)[0])


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
    "ubinary": lambda array: np.packbits(array > 0, axis=-1),
    "binary": lambda array: (np.packbits(array > 0, axis=-1).astype(np.int16) - 128).astype(np.int8),
}


def read_ranges(path: Path) -> Floats:
    """The ranges [2, D] of a file: .npy, or two lists in JSON. Raises ValueError."""
    try:
        if path.suffix == ".npy":
            ranges = np.load(path, allow_pickle=False)
        else:
            ranges = np.array(msgspec.json.decode(path.read_bytes(), type=list[list[float]]))
        ranges = ranges.astype(np.float32)
    except (OSError, ValueError, TypeError, msgspec.DecodeError) as error:
        raise ValueError(f"--int8-ranges: {path} cannot be read: {error}") from None
    if ranges.ndim != 2 or len(ranges) != 2 or not ranges.size or not np.isfinite(ranges).all():
        raise ValueError(
            f"--int8-ranges: {path} must hold two rows of finite numbers, the least and the greatest of "
            f"each, and has the shape {list(ranges.shape)}"
        )
    if (ranges[0] > ranges[1]).any():
        raise ValueError(f"--int8-ranges: in {path} some least numbers are above the greatest")
    return ranges
