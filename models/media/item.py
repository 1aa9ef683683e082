"""Media items: what a picture or a video becomes for a model's tower, and what stands for it in a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

from models.media.files import PictureSettings

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image as Picture
else:
    Picture = object  # Pillow is imported where pictures are decoded, not where they are counted

Kind = Literal["image", "video", "audio", "encoded", "rows"]
"""The kinds of items. Processors take pictures and videos, or sound. A client may compute embeddings itself:
those of a picture that it has encoded, or rows for all of its prompt."""
CLIENT_MADE: tuple[Kind, ...] = ("encoded", "rows")
"""The kinds whose bytes are embeddings, float32 values that no tower reads."""


ORDINAL = "{ordinal}"
"""What stands in a layout's text for the number of the item in its prompt, of which the first is 0."""


class MediaError(ValueError):
    """The item cannot be used with this model. The message is a sentence for the client that sent it."""


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """A media item as the model's tower takes it, which normalises the pixels and cuts patches itself."""

    kind: Kind
    pixels: memoryview
    """The RGB values row by row, one byte each. Tiles of a picture that was cut stand below each other,
    and so do the frames of a video. Of a sound they are the features of its
    frames, band by band, in float32."""
    shape: tuple[int, int, int]
    """The height of all tiles or frames together, the width, and 3. Of a sound the bands, the frames,
    and 4."""
    grid: tuple[int, int, int]
    """The number of frames, and of rows and columns of patches, before any of them are merged. Of a picture
    that was cut into tiles: the rows of tiles, and the rows and columns of patches of all tiles together.
    Of a sound 1, 1, and the frames that are heard, behind which there is silence."""
    embeddings: int
    """The number of hidden states that the item has in the prompt."""
    interval: float = 1.0
    """How far the frames of the grid lie apart on the axis of time, for models whose positions have one."""
    seconds: tuple[float, ...] = ()
    """When each frame of the grid is seen, of a video."""
    duration: float = 0.0
    """The seconds that a video takes, for models that are told."""


@dataclass(frozen=True, slots=True)
class Video:
    """A video, whose frames are decoded while they are read."""

    total: int
    rate: float | None
    """The frames of a second; None if that is not known."""
    frames: Callable[[Sequence[int]], Iterator[Picture]]
    """Reads the frames with these rising numbers, as RGB pictures."""


class Layout(msgspec.Struct, frozen=True):
    """The tokens that take the place of an item's placeholder in a prompt."""

    tokens: list[int]
    embeddings: list[tuple[int, int]]
    """Runs of `tokens`, as (first, length), in whose place the item's embeddings are put, in order."""
    before: str = ""
    """Text in front of the tokens, and `after` behind them: it is tokenized together with the text there.
    `ORDINAL` in `before` stands for the item's number."""
    after: str = ""
    texts: tuple[tuple[int, str], ...] = ()
    """Texts whose tokens `spelled` puts in front of `tokens[index]`, as (index, text) in order. Each is
    tokenized by itself, with names of special tokens in it."""
    token: str = ""
    """The name of the token at the positions of embeddings, where `tokens` cannot have its number."""

    def spelled(self, encode: Callable[[str], list[int]]) -> Layout:
        """The layout without texts and names, whose tokens `encode` gives."""
        given = encode(self.token)[-1:] * len(self.tokens) if self.token else self.tokens
        encoded = {text: encode(text) for text in {text for _, text in self.texts}}
        tokens: list[int] = []
        runs: list[tuple[int, int]] = []
        done, left = 0, list(self.embeddings)
        for index, text in (*self.texts, (len(self.tokens), "")):
            while left and left[0][0] < index:
                first, length = left.pop(0)
                runs.append((len(tokens) + first - done, length))
            tokens += given[done:index]
            tokens += encoded.get(text, [])
            done = index
        return Layout(tokens, runs, self.before, self.after)


def run_of(token: int, count: int) -> Layout:
    """The layout of so many positions with the same token, all of them embeddings."""
    return Layout([token] * count, [(0, count)])


def interleaved(token: int | str, parts: Iterable[int | str]) -> Layout:
    """The layout of texts and numbers of embeddings, whose positions have `token`, or that of the name."""
    tokens, runs, texts = 0, list[tuple[int, int]](), list[tuple[int, str]]()
    for part in parts:
        if isinstance(part, str):
            texts.append((tokens, part))
        else:
            runs.append((tokens, part))
            tokens += part
    number, name = (0, token) if isinstance(token, str) else (token, "")
    return Layout([number] * tokens, runs, texts=tuple(texts), token=name)


class Processor(Protocol):
    """Prepares the media of one checkpoint. The methods are pure functions of the item."""

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


@runtime_checkable
class AudioProcessor(Protocol):
    """Prepares sounds for a model that hears, in place of a processor of pictures."""

    def prepare_audio(self, pieces: Iterable[np.ndarray]) -> Prepared:
        """Make features of a sound, whose samples at 16 kHz come in pieces. Raises MediaError for one that
        the model does not take."""
        ...


@runtime_checkable
class VideoProcessor(Processor, Protocol):
    """A processor that prepares videos too."""

    video_placeholder: str
    """The text of a rendered template that the layout of a video replaces."""
    video_written: str
    """What is put into a message for a template that takes texts only."""

    @property
    def video_settings(self) -> msgspec.Struct: ...

    def prepare_video(self, video: Video, most_frames: int, most_embeddings: int) -> Prepared:
        """Take frames of a video, at most so many, and resize them. Raises MediaError for one whose shape the
        model does not take, or that needs more embeddings."""
        ...
