"""Files of pictures, sound and broken: what becomes of each."""

import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import noise, saved
from PIL import Image

from server.errors import BadRequest
from server.media.picture_decoding import decode, from_base64

MOST = 10_000_000
NOISE = noise(30, 20)


def same(one: Image.Image, other: Image.Image) -> bool:
    return one.mode == other.mode == "RGB" and one.size == other.size and one.tobytes() == other.tobytes()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "WEBP"])
def test_formats_without_loss_give_their_pixels(kind: str) -> None:
    picture = NOISE.quantize(64).convert("RGB") if kind == "GIF" else NOISE
    assert same(decode(saved(picture, kind, lossless=True), MOST), picture)


def test_a_picture_is_turned_as_its_exif_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert same(decode(saved(NOISE, exif=exif), MOST), NOISE.transpose(Image.Transpose.ROTATE_270))
    assert same(decode(saved(NOISE, exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"), MOST), NOISE)  # broken


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_transparency_lies_on_white_or_on_a_background(mode: str) -> None:
    clear = {"RGBA": (9, 9, 9, 0), "LA": (9, 0), "P": 0, "RGB": (9, 9, 9)}[mode]
    options = {"transparency": clear} if mode in ("P", "RGB") else {}
    file = saved(Image.new(mode, (4, 4), clear), **options)
    assert same(decode(file, MOST), Image.new("RGB", (4, 4), "white"))
    assert same(decode(file, MOST, (5, 6, 7)), Image.new("RGB", (4, 4), (5, 6, 7)))


def test_modes_that_are_not_rgb() -> None:
    red = decode(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), MOST)
    assert red.mode == "RGB" and red.getpixel((4, 4)) == pytest.approx((255, 0, 0), abs=4)
    values = np.array([[0, 255, 256, 32_768, 65_535]], dtype=np.uint16)
    for kind in ("PNG", "TIFF"):
        deep = decode(saved(Image.fromarray(values), kind), MOST)
        assert np.asarray(deep)[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    with pytest.raises(BadRequest, match="16 bits for each value at most"):
        decode(saved(Image.new("F", (2, 2)), "TIFF"), MOST)


def test_of_an_animation_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (6, 6), (n % 256, n // 256, 50)) for n in range(1, 500)]
    animated = saved(Image.new("RGB", (6, 6), "lime"), "GIF", save_all=True, append_images=frames)
    assert same(decode(animated, MOST), Image.new("RGB", (6, 6), "lime"))


def png_of(width: int, height: int) -> bytes:
    """A PNG that claims a size, and holds nothing."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b""))]
    written = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (png_of(60_000, 60_000), "at most 10000000 pixels, and this one has 60000 x 60000"),
        (png_of(10, 10), "broken, or ends too early"),
        (saved(NOISE, "JPEG")[:-200], "broken, or ends too early"),
        (saved(NOISE)[:60], "broken, or ends too early"),
        (b"", "must be one of JPEG, PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "must be one of JPEG, PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "must be one of JPEG, PNG"),
    ],
)
def test_what_cannot_be_decoded_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        decode(data, MOST)


def test_a_strip_is_decoded() -> None:
    assert decode(saved(Image.new("RGB", (1, 100_000))), MOST).size == (1, 100_000)


FILES = [saved(NOISE, kind) for kind in ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP")]


@given(st.sampled_from(FILES), st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=6))
@settings(max_examples=300, deadline=None)
def test_a_damaged_file_is_decoded_or_refused(data: bytes, damage: list[tuple[float, int]]) -> None:
    changed = bytearray(data)
    for place, value in damage:
        changed[int(place * len(data))] = value
    with suppress(BadRequest):
        assert decode(bytes(changed), 100_000).mode == "RGB"


def test_base64_may_be_written_with_the_escapes_of_json() -> None:
    assert from_base64(rb"+\/\u002B\u002b\r\nAA\u003d=") == from_base64(b"+/++AA==")


def test_base64_may_have_line_ends_and_nothing_else() -> None:
    assert from_base64(b"aGVs\r\nbG8=\n") == b"hello"
    for broken in (b"aGVsbG8", b"aGV$bG8=", b"aGVsbG8=aGVs", b"aGVsbG8\\", b"\\u00e9", b"\\ud83d"):
        with pytest.raises(BadRequest, match="base64"):
            from_base64(broken)
