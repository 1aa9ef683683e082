"""The media that programs hand over, as parts of contents and files, which the server's reader takes."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import numpy as np

from models.media.item import Kind
from models.media.whisper import RATE
from server.errors import BadRequest
from server.media.inline_files import InlineFiles
from server.media.media_parts import MEDIA_PARTS, MediaFile

_FORMS: dict[Kind, str] = {
    "image": "a picture is one of Pillow, an array [height, width, 3] of 8 bits, the path of a file, a "
    "file's bytes, or its embeddings",
    "video": "a video is the path of a file, a file's bytes, or its frames: an array [frames, height, width, "
    "3]",
    "audio": f"a sound is an array of samples from -1 to 1 at {RATE} Hz, (array, rate), the path of a file, "
    "or a file's bytes",
}
_EMBEDS, _GRID = "image_embeds", "image_grid_thw"
_OWN_PARTS: dict[str, Kind] = {"image": "image", "image_pil": "image", "video": "video", "audio": "audio"}
"""The kinds of parts whose item stands under the same name, beside those of the API."""
_PNG = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}
"""Pillow's modes of pictures that a PNG holds as they are."""

Given = tuple[Kind, Any]
"""An item as a program hands it over."""


def read_media(given: object) -> list[Given]:
    """The pictures of `multi_modal_data`, behind them its videos, and its sounds. Raises TypeError."""
    kinds: tuple[Kind, ...] = ("image", "video", "audio")
    if not isinstance(given, Mapping) or set(cast("Mapping[str, object]", given)) - set(kinds):
        raise TypeError(
            "multi_modal_data is {'image': ..., 'video': ..., 'audio': ...} with one or a list of them: "
            + "; ".join(_FORMS.values())
        )
    items: list[Given] = []
    for kind in kinds:
        of_kind: Any = given.get(kind)
        several = isinstance(of_kind, list) or (isinstance(of_kind, tuple) and kind != "audio")
        for one in of_kind if several else [] if of_kind is None else [of_kind]:
            items.extend((kind, each) for each in (_each(one) if kind == "image" else [one]))
    return items


def _each(given: Any) -> Sequence[object]:
    """The pictures of which a program gives embeddings together: [pictures, N, width], or with grids."""
    if not isinstance(given, Mapping):
        several = getattr(given, "ndim", 0) == (4 if _is_pixels(given) else 3)
        return list(given) if several else [given]
    rows, grid = as_array(given.get(_EMBEDS)), np.array(listed(given.get(_GRID, [])), np.int64)
    if rows is None or grid.ndim != 2 or not grid.prod(1).sum():
        return [given]
    patches = grid.prod(1).cumsum()
    pieces = np.split(rows, patches[:-1] * len(rows) // patches[-1])
    return [{_EMBEDS: piece, _GRID: sides} for piece, sides in zip(pieces, grid, strict=True)]


def _is_pixels(given: object) -> bool:
    """Whether an array is a picture, or several, and not embeddings, which are floats."""
    return isinstance(given, np.ndarray) and given.dtype == np.uint8


def with_files(message: Mapping[str, Any], files: InlineFiles) -> dict[str, Any]:
    """A message whose parts name files as requests do. What a program has given itself goes to `files`."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [_as_asked(part, files) for part in cast("list[Any]", content)]}


def _as_asked(part: Any, files: InlineFiles) -> Any:
    name = str(part.get("type")) if isinstance(part, Mapping) else ""
    if name in _OWN_PARTS:
        return as_part(_OWN_PARTS[name], part[name], files)
    given = part.get(name) if name in MEDIA_PARTS else None
    if name == _EMBEDS and not isinstance(given, str | None):
        return as_part("image", given if isinstance(given, Mapping) else {_EMBEDS: given}, files)
    url = given.get("url") if isinstance(given, Mapping) else given
    if isinstance(url, str) and name.endswith("_url"):
        return {**part, **as_part(MEDIA_PARTS[name], url, files)}
    return part


def as_part(kind: Kind, given: Any, files: InlineFiles) -> dict[str, Any]:
    """The part of a content for an item, with the URL that a program gives or a reference to its file."""
    field = f"{kind}_url"
    match given:
        case str() if given.startswith(("data:", "http:", "https:")):
            return {"type": field, field: given}
        case str() if given.startswith("file://"):
            file = Path(unquote(given.removeprefix("file://"))).read_bytes()
        case str() | Path():
            file = Path(given).read_bytes()
        case bytes() | bytearray():
            file = bytes(given)
        case Mapping() if kind == "image":
            return _encoded_part(given, files)
        case _ if kind == "image" and hasattr(given, "ndim") and not _is_pixels(given):
            return _encoded_part({_EMBEDS: given}, files)
        case _:
            file = {"image": _of_picture, "video": _of_frames, "audio": as_sound}[kind](given)
    made = file if isinstance(file, MediaFile) else MediaFile(file)
    return {"type": field, field: files.add(made)}


def _encoded_part(given: Mapping[str, Any], files: InlineFiles) -> dict[str, Any]:
    """The part for a picture's embeddings."""
    rows, grid, file = as_array(given.get(_EMBEDS)), given.get(_GRID), BytesIO()
    if rows is None:
        raise BadRequest(f"{_EMBEDS} is a tensor or an array of finite numbers.", "multi_modal_data")
    np.save(file, rows)
    reference = files.add(MediaFile(b64encode(file.getvalue()), is_base64=True))
    sides = [] if grid is None else np.array(listed(grid), np.int64).ravel().tolist()
    return {"type": _EMBEDS, _EMBEDS: {_EMBEDS: reference, _GRID: ",".join(map(str, sides))}}


def _of_picture(given: object) -> bytes:
    from PIL import Image  # imported with the first picture

    if isinstance(given, np.ndarray):
        given = Image.fromarray(given)
    if not isinstance(given, Image.Image):
        raise TypeError(f"{_FORMS['image']}; got {type(given).__name__}")
    file, is_plain = BytesIO(), given.mode == "RGB" and "transparency" not in given.info
    if is_plain or given.mode not in _PNG:
        given.convert("RGB").save(file, "BMP")
    else:
        given.save(file, "PNG", compress_level=1, exif=b"")
    return file.getvalue()


def _of_frames(given: Any) -> MediaFile:
    """The file of an array of torch or NumPy: its frames as pictures, with commas between them."""
    from PIL import Image

    frames = np.asarray(given)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size:
        raise BadRequest(
            f"{_FORMS['video']} of 8 bits; got {frames.dtype} {list(frames.shape)}.", "multi_modal_data"
        )
    files = [b64encode(_of_picture(Image.fromarray(frame))) for frame in frames]
    return MediaFile(b",".join(files), is_base64=True)


def as_sound(given: Any) -> bytes:
    """The file of an array of samples, or of one with their rate: WAV of float32."""
    match given:
        case (array, int() | float() as rate):
            pass
        case _:
            array, rate = given, RATE
    samples = as_array(array)
    if samples is None or samples.ndim != 1 or not len(samples):
        raise TypeError(f"{_FORMS['audio']}; got {type(array).__name__}")
    form = struct.pack("<HHIIHH", 3, 1, round(rate), 4 * round(rate), 4, 32)  # floats, in one channel
    chunks = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", samples.nbytes)
    return (
        b"RIFF" + struct.pack("<I", 4 + len(chunks) + samples.nbytes) + b"WAVE" + chunks + samples.tobytes()
    )


def listed(given: object) -> object:
    """The list of what numpy or torch hold in an array; anything else as it is."""
    to_list = getattr(given, "tolist", None)
    return to_list() if callable(to_list) else given


def as_array(given: Any) -> np.ndarray | None:
    """The float32 values of a tensor or array; None if they are no real floats."""
    if hasattr(given, "detach"):  # torch's, of which NumPy has no bfloat16
        given = given.detach().cpu()
        given = given.float().numpy() if given.is_floating_point() and not given.is_sparse else None
    real = isinstance(given, np.ndarray) and given.dtype.kind == "f"
    return np.ascontiguousarray(given, np.float32) if real else None
