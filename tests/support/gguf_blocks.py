"""Blocks of GGUF, written place by place as GGML's own source describes them, and the numbers they mean.

Nothing of the code under test is used. Numbers are rounded to what a block can hold, many blocks at a time;
loops go over the places within a block.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], float)


@dataclass(frozen=True)
class Written:
    """Blocks of some numbers."""

    data: Array
    """[blocks, bytes] uint8."""
    numbers: Array
    """[blocks, numbers] float64: what they mean."""


@dataclass(frozen=True)
class Kind:
    number: int
    """GGML's number of the coding."""
    size: int
    """The numbers of a block."""
    write: Callable[[Array], Written]


def half(x: Array) -> Array:
    """The nearest numbers of float16."""
    return x.astype(np.float16).astype(float)


def put_half(data: Array, place: int, x: Array) -> None:
    data[:, place : place + 2] = x.astype("<f2")[:, None].view(np.uint8)


def divided(x: Array, by: Array) -> Array:
    """x / by, where 0 / 0 is 0."""
    return np.divide(x, by, out=np.zeros(np.broadcast_shapes(x.shape, by.shape)), where=by != 0)


def rounded(x: Array, low: int, high: int) -> Array:
    return np.clip(np.round(x), low, high).astype(int)


def peak(x: Array) -> Array:
    """The number that is farthest from 0, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)[..., 0]


def put_nibbles(data: Array, place: int, codes: Array) -> None:
    """Write 32 codes into 16 bytes: the first 16 are the low halves."""
    for i in range(16):
        data[:, place + i] = (codes[:, i] & 15) | (codes[:, i + 16] & 15) << 4


def put_fifth_bits(data: Array, place: int, codes: Array) -> None:
    """Write the fifth bits of 32 codes into a word, the first one lowest."""
    for i in range(32):
        data[:, place + i // 8] |= ((codes[:, i] >> 4 & 1) << i % 8).astype(np.uint8)


def q8_0(x: Array) -> Written:
    data = np.zeros((len(x), 34), np.uint8)
    d = half(np.abs(x).max(1) / 127)
    codes = rounded(divided(x, d[:, None]), -128, 127)
    put_half(data, 0, d)
    for i in range(32):
        data[:, 2 + i] = codes[:, i].astype(np.int8).view(np.uint8)
    return Written(data, codes * d[:, None])


def _around_zero(x: Array, bits: int) -> Written:
    """Q4_0 and Q5_0: a scale, which may be negative."""
    middle = 1 << (bits - 1)
    extra = 4 if bits == 5 else 0
    data = np.zeros((len(x), 2 + extra + 16), np.uint8)
    d = half(peak(x) / -middle)
    codes = rounded(divided(x, d[:, None]), -middle, middle - 1) + middle
    put_half(data, 0, d)
    if extra:
        put_fifth_bits(data, 2, codes)
    put_nibbles(data, 2 + extra, codes)
    return Written(data, (codes - middle) * d[:, None])


def _from_minimum(x: Array, bits: int) -> Written:
    """Q4_1 and Q5_1: a scale and a minimum."""
    extra = 4 if bits == 5 else 0
    data = np.zeros((len(x), 4 + extra + 16), np.uint8)
    m = half(x.min(1))
    d = half((x.max(1) - m) / ((1 << bits) - 1))
    codes = rounded(divided(x - m[:, None], d[:, None]), 0, (1 << bits) - 1)
    put_half(data, 0, d)
    put_half(data, 2, m)
    if extra:
        put_fifth_bits(data, 4, codes)
    put_nibbles(data, 4 + extra, codes)
    return Written(data, codes * d[:, None] + m[:, None])


def put_six_bits(data: Array, place: int, scales: Array, minimums: Array) -> None:
    """Write eight scales and eight minimums of 6 bits each into 12 bytes."""
    for j in range(8):
        if j < 4:
            data[:, place + j] |= scales[:, j].astype(np.uint8)
            data[:, place + j + 4] |= minimums[:, j].astype(np.uint8)
        else:
            data[:, place + j + 4] = (scales[:, j] & 15) | (minimums[:, j] & 15) << 4
            data[:, place + j - 4] |= (scales[:, j] >> 4 << 6).astype(np.uint8)
            data[:, place + j] |= (minimums[:, j] >> 4 << 6).astype(np.uint8)


def _with_minimums(x: Array, bits: int) -> Written:
    """Q4_K and Q5_K: eight groups of 32, each with a scale and a minimum of 6 bits."""
    most, extra = (1 << bits) - 1, 32 if bits == 5 else 0
    data = np.zeros((len(x), 16 + extra + 128), np.uint8)
    groups = x.reshape(-1, 8, 32)
    below = np.maximum(0, -groups.min(2))
    wide = (groups.max(2) + below) / most
    d, dmin = half(wide.max(1) / 63), half(below.max(1) / 63)
    scales = rounded(divided(wide, d[:, None]), 0, 63)
    minimums = rounded(divided(below, dmin[:, None]), 0, 63)
    scale, minimum = (d[:, None] * scales)[..., None], (dmin[:, None] * minimums)[..., None]
    codes = rounded(divided(groups + minimum, scale), 0, most)
    put_half(data, 0, d)
    put_half(data, 2, dmin)
    put_six_bits(data, 4, scales, minimums)
    for pair in range(4):
        low, high = codes[:, 2 * pair], codes[:, 2 * pair + 1]
        for i in range(32):
            data[:, 16 + extra + 32 * pair + i] = (low[:, i] & 15) | (high[:, i] & 15) << 4
            if extra:
                bit = (low[:, i] >> 4) << 2 * pair | (high[:, i] >> 4) << (2 * pair + 1)
                data[:, 16 + i] |= bit.astype(np.uint8)
    return Written(data, (codes * scale - minimum).reshape(len(x), 256))


def _signed_scales(scales: Array) -> Array:
    """Turn every third scale round: files have negative ones too."""
    return scales * np.where(np.arange(scales.shape[1]) % 3 == 1, -1, 1)


def q6_k(x: Array) -> Written:
    """16 groups of 16, each with a scale of 8 bits; codes have 4 bits in one place and 2 in another."""
    data = np.zeros((len(x), 210), np.uint8)
    groups = x.reshape(-1, 16, 16)
    wide = np.abs(groups).max(2) / 31
    d = half(wide.max(1) / 127)
    scales = _signed_scales(rounded(divided(wide, d[:, None]), 0, 127))
    scale = (d[:, None] * scales)[..., None]
    codes = (rounded(divided(groups, scale), -32, 31) + 32).reshape(len(x), 256)
    for side in (0, 1):
        for i in range(32):
            one, two, three, four = (codes[:, 128 * side + 32 * part + i] for part in range(4))
            data[:, 64 * side + i] = (one & 15) | (three & 15) << 4
            data[:, 64 * side + 32 + i] = (two & 15) | (four & 15) << 4
            data[:, 128 + 32 * side + i] = one >> 4 | two >> 4 << 2 | three >> 4 << 4 | four >> 4 << 6
    for group in range(16):
        data[:, 192 + group] = scales[:, group].astype(np.int8).view(np.uint8)
    put_half(data, 208, d)
    return Written(data, ((codes.reshape(-1, 16, 16) - 32) * scale).reshape(len(x), 256))


def nearest_levels(x: Array) -> Array:
    return np.abs(x[..., None] - IQ4_LEVELS).argmin(-1)


def iq4_nl(x: Array) -> Written:
    data = np.zeros((len(x), 18), np.uint8)
    d = half(peak(x) / -127)
    codes = nearest_levels(divided(x, d[:, None]))
    put_half(data, 0, d)
    put_nibbles(data, 2, codes)
    return Written(data, IQ4_LEVELS[codes] * d[:, None])


def iq4_xs(x: Array) -> Written:
    """Eight groups of 32, each with a scale of 6 bits, from -32 to 31."""
    data = np.zeros((len(x), 136), np.uint8)
    groups = x.reshape(-1, 8, 32)
    wide = np.abs(groups).max(2) / 120
    d = half(wide.max(1) / 31)
    scales = _signed_scales(rounded(divided(wide, d[:, None]), 0, 31))
    scale = (d[:, None] * scales)[..., None]
    codes = nearest_levels(divided(groups, scale))
    put_half(data, 0, d)
    for group in range(8):
        stored = scales[:, group] + 32
        data[:, 4 + group // 2] |= ((stored & 15) << 4 * (group % 2)).astype(np.uint8)
        data[:, 2 + group // 4] |= (stored >> 4 << 2 * (group % 4)).astype(np.uint8)
        put_nibbles(data, 8 + 16 * group, codes[:, group])
    return Written(data, (IQ4_LEVELS[codes] * scale).reshape(len(x), 256))


E2M1_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], float)


def mxfp4(x: Array) -> Written:
    """A power of two, as a byte of which 127 stands for 1, and 32 numbers of e2m1."""
    data = np.zeros((len(x), 17), np.uint8)
    most = np.abs(x).max(1)
    power = np.clip(np.floor(np.log2(np.where(most > 0, most, 1))) - 2, -127, 127).astype(int)
    scale = 2.0 ** power[:, None]
    codes = np.abs((x / scale)[..., None] - E2M1_LEVELS).argmin(-1)
    data[:, 0] = power + 127
    put_nibbles(data, 1, codes)
    return Written(data, E2M1_LEVELS[codes] * scale)


KINDS = {
    "Q4_0": Kind(2, 32, lambda x: _around_zero(x, 4)),
    "Q4_1": Kind(3, 32, lambda x: _from_minimum(x, 4)),
    "Q5_0": Kind(6, 32, lambda x: _around_zero(x, 5)),
    "Q5_1": Kind(7, 32, lambda x: _from_minimum(x, 5)),
    "Q8_0": Kind(8, 32, q8_0),
    "Q4_K": Kind(12, 256, lambda x: _with_minimums(x, 4)),
    "Q5_K": Kind(13, 256, lambda x: _with_minimums(x, 5)),
    "Q6_K": Kind(14, 256, q6_k),
    "IQ4_NL": Kind(20, 32, iq4_nl),
    "IQ4_XS": Kind(23, 256, iq4_xs),
    "MXFP4": Kind(39, 32, mxfp4),
}


def in_blocks(matrix: Array, name: str) -> tuple[bytes, Array]:
    """Write a matrix [N, K], row after row; returns the bytes, and what they mean [N, K] float32."""
    kind = KINDS[name]
    written = kind.write(matrix.astype(float).reshape(-1, kind.size))
    return written.data.tobytes(), written.numbers.reshape(matrix.shape).astype(np.float32)
