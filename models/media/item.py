"""Media items: what a picture becomes for a model's tower, and what stands for it in a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from models.media.files import PictureSettings

if TYPE_CHECKING:
    from PIL.Image import Image as Picture
else:
    Picture = object  # Pillow is imported where pictures are decoded, not where they are counted

Kind = Literal["image"]
"""The kinds of media that processors take. Video and sound are not among them yet."""


class MediaError(ValueError):
    """The item cannot be used with this model. The message is a sentence for the client that sent it."""


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """A media item as the model's tower takes it, which normalises the pixels and cuts patches itself."""

    kind: Kind
    pixels: memoryview
    """The RGB values row by row, one byte each."""
    shape: tuple[int, int, int]
    """The height, the width, and 3."""
    grid: tuple[int, int, int]
    """The number of frames, and of rows and columns of patches, before any of them are merged."""
    embeddings: int
    """The number of hidden states that the item has in the prompt."""


class Layout(msgspec.Struct, frozen=True):
    """What takes the place of an item's placeholder in a prompt."""

    tokens: list[int]
    embeddings: list[tuple[int, int]]
    """Runs of `tokens`, as (first, length), in whose place the item's embeddings are put, in order."""
    before: str = ""
    """Text in front of the tokens, and `after` behind them: it is tokenized together with the text there."""
    after: str = ""


class Processor(Protocol):
    """How one checkpoint's media are prepared. The methods are pure functions of the item."""

    placeholder: str
    """The text of a rendered template that `layout` replaces, once for each item; empty if an item is a
    prompt of its own."""
    written: str
    """What is put into a message for a template that takes texts only."""

    @property
    def settings(self) -> PictureSettings: ...

    def prepare(self, picture: Picture) -> Prepared:
        """Resize an RGB picture. Raises MediaError for one whose shape the model does not take."""
        ...

    def layout(self, prepared: Prepared) -> Layout: ...
