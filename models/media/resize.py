"""Bringing pictures to a size, with the very pixels that transformers' image processors on Pillow give."""

from __future__ import annotations

from models.media.item import MediaError, Picture, Prepared

MOST_RATIO = 200
"""The most by which a picture's sides may differ where its shape is kept."""
_BICUBIC = 3


def check_ratio(width: int, height: int) -> None:
    """Refuses a strip, which would become a huge picture where its short side is enlarged."""
    if max(width, height) > MOST_RATIO * min(width, height):
        raise MediaError(
            f"A picture's longer side may be {MOST_RATIO} times the shorter one at most, but this one has "
            f"{width} x {height} pixels."
        )


def center_cropped(picture: Picture, side: int) -> Picture:
    """The square in the middle of a picture, with black around it where it is smaller."""
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    return picture.crop((left, top, left + side, top + side))


def fitted(picture: Picture, side: int) -> Picture:
    """A picture that fits into a square, in its own shape; one that does so already stays as it is."""
    scale = side / max(picture.size)
    if scale >= 1:
        return picture
    width, height = (max(1, round(length * scale)) for length in picture.size)
    return picture.resize((width, height), _BICUBIC)


def to_item(picture: Picture, patch: int, embeddings: int) -> Prepared:
    """The item that a picture of the final size becomes, for a tower with square patches."""
    return Prepared(
        kind="image",
        pixels=memoryview(picture.tobytes()),
        shape=(picture.height, picture.width, 3),
        grid=(1, picture.height // patch, picture.width // patch),
        embeddings=embeddings,
    )
