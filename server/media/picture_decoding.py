"""Decoding of pictures, whoever made them: the first frame, upright, in RGB, on a background. The type is
told by the content. This runs in processes that may be killed, see `server.media.preparing`."""

from __future__ import annotations

import binascii
import json
import logging
from io import BytesIO

from PIL import Image, ImageOps, UnidentifiedImageError

from server.errors import BadRequest
from server.options.media_options import WHITE, Color

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")

_log = logging.getLogger(__name__)

Image.MAX_IMAGE_PIXELS = None  # Pillow's alarm only warns below twice this; `decode` refuses by the header


def from_base64(text: bytes) -> bytes:
    try:
        if b"\\" in text:  # cut out of JSON, whose writers may escape slashes, line ends, `+` and `=`
            text = "".join(json.loads(b'"%b"' % text, strict=False).split()).encode()
        if b"\n" in text:
            text = text.translate(None, b" \t\r\n")
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise BadRequest(
            "The base64 of a media file is broken: send it whole, as one encoder wrote it."
        ) from None


def decode(data: bytes, most_pixels: int, background: Color = WHITE) -> Image.Image:
    """The picture in a file, on a background. Raises BadRequest, or MemoryError."""
    try:
        picture = Image.open(BytesIO(data), formats=FORMATS)
        if picture.width * picture.height > most_pixels:
            size = f"{picture.width} x {picture.height}"
            raise BadRequest(f"A picture may have at most {most_pixels} pixels, and this one has {size}.")
        picture.load()
        _turn_upright(picture)
        return in_rgb(picture, background)
    except (BadRequest, MemoryError):
        raise
    except UnidentifiedImageError:
        raise BadRequest(f"A picture must be one of {', '.join(FORMATS)}, and this file is none.") from None
    except Exception:  # decoders raise whatever they like for files that anybody may have written
        raise BadRequest("A picture cannot be decoded: its file is broken, or ends too early.") from None


def _turn_upright(picture: Image.Image) -> None:
    try:
        ImageOps.exif_transpose(picture, in_place=True)
    except MemoryError:
        raise
    except Exception:  # broken EXIF is no reason to refuse a picture
        _log.debug("a picture's EXIF is broken")


def in_rgb(picture: Image.Image, background: Color = WHITE) -> Image.Image:
    """The picture in RGB, on a background. Raises BadRequest for values of more than 16 bits."""
    if picture.mode.startswith("I;16"):  # Pillow would clip values to 8 bits
        return picture.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if picture.mode in ("I", "F"):
        raise BadRequest("A picture may have 16 bits for each value at most.")
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, background), picture)
    return picture.convert("RGB")
