"""The media of a prompt: how a conversation with them becomes token ids, and where among these the items are.

A template writes a placeholder for each item. What users have written is text, even if it reads like one:
marks divide it before the template runs (`server.text.control_tokens`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from engine_core.prompt_media import Media
from models.media.item import ORDINAL, Layout
from server.errors import BadRequest, Internal
from server.media.media_parts import Content, MediaPart, find_parts
from server.model_facts import MediaFacts
from server.text.control_tokens import without_cuts
from server.text.tokenizer import Tokenizer
from worker.buffers import Buffer

if TYPE_CHECKING:
    from server.media.media_cache import KeptItem

_MARK = f"r{secrets.token_hex(12)}w"
_MARKED = re.compile(f"{_MARK}([0-9]+)r")
ROWS_ID = -1
"""What stands for a file of embeddings among token ids until `place_rows` puts those of its tokens there."""


class Laid(msgspec.Struct, frozen=True):
    """A prepared item, as far as the text of a prompt depends on it."""

    hash: bytes
    layout: Layout


UNREAD = Laid(b"", Layout([], []))
"""An item of a tool that could not be read: a text stands in its place."""


class Placed(msgspec.Struct, frozen=True, gc=False):
    """The place of an item in a prompt."""

    hash: bytes
    at: int
    """The position of the first token that stands for it."""
    length: int
    runs: list[tuple[int, int]]
    """The positions, counted from `at`, that are embeddings, as (first, length)."""

    @property
    def embeddings(self) -> int:
        """The number of tokens in whose place its embeddings are put."""
        return sum(length for _, length in self.runs)


class Rows(msgspec.Struct, frozen=True, gc=False):
    """Embeddings that a client gives in place of tokens of a prompt: a piece of them, which is an item."""

    hash: bytes
    at: int
    """The position of the first of them in the prompt."""
    shape: tuple[int, int, int]
    """Their number, their width, and the bytes of a value, which is a float32."""
    data: memoryview

    def as_media(self) -> Media:
        """The item as an engine gets it."""
        count, grid = self.shape[0], (1, 1, self.shape[0])
        return Media(self.hash, "rows", self.at, count, ((0, count),), self.shape, grid, Buffer(self.data))


def as_media(placed: Sequence[Placed], items: Mapping[bytes, KeptItem]) -> tuple[Media, ...]:
    """The items of a prompt as an engine gets them. `items` has each by its hash."""

    def media(one: Placed) -> Media:
        item, runs = items[one.hash].prepared, tuple(one.runs)
        pixels, at = Buffer(item.pixels), one.at
        return Media(one.hash, item.kind, at, one.length, runs, item.shape, item.grid, pixels, item.interval)

    return tuple(map(media, placed))


LaidMedia = Mapping[MediaPart, Laid]
"""The prepared items of a request, by the parts of messages that name them."""
NO_MEDIA: LaidMedia = {}


class MediaNeeded(Exception):
    """Raised where a prompt is written whose items are not prepared: then it is written again."""

    def __init__(
        self,
        parts: Sequence[MediaPart],
        salt: str,
        settings: Mapping[str, Any],
        io: Mapping[str, Any],
        of_tools: Sequence[MediaPart] = (),
    ) -> None:
        """`salt` is the request's cache salt, within which names of items are known. `settings` are its own
        for the processor of media, and `io` for how files are read. `of_tools` may turn out to be unreadable:
        nobody but the model and its tools has sent them."""
        super().__init__()
        self.parts, self.salt = list(parts), salt
        self.settings, self.io, self.of_tools = dict(settings), dict(io), list(of_tools)


def joined(needed: Sequence[MediaNeeded]) -> MediaNeeded:
    """What several prompts of a request need."""
    parts = [part for each in needed for part in each.parts]
    of_others = {part for each in needed for part in each.parts if part not in each.of_tools}
    of_tools = [part for part in parts if part not in of_others]
    return MediaNeeded(parts, needed[0].salt, needed[0].settings, needed[0].io, of_tools)


class Written(msgspec.Struct, frozen=True, dict=True):
    """The text of a prompt as a chat template has written it."""

    text: str
    parts: list[MediaPart] = []
    """The items whose placeholders are in the text, in order."""
    is_plain: bool = True
    """Whether the text has neither placeholders nor marks of embeddings."""
    row_files: list[str] = []
    """Files in base64 of embeddings in place of tokens, whose marks are in the text, in order."""
    notes: list[str] = []
    """Sentences on what was restated for the template."""

    @cached_property
    def plain_text(self) -> str:
        """The text with what users have written, without marks."""
        return without_cuts(self.text if self.is_plain else _MARKED.sub("", self.text))


def quoted_words(facts: MediaFacts, media: LaidMedia, tokenizer: Tokenizer) -> Set[str]:
    """Returns what would read as a part of an item's place, and is text where users write it."""
    ids = {id for laid in media.values() for id in laid.layout.tokens}
    names = {name for name in map(tokenizer.token_name, ids) if name in tokenizer.added_tokens}
    return names.union(facts.reserved)


def rows_mark(number: int) -> str:
    """What stands in a text for the embeddings of this number."""
    return f"{_MARK}{number}r"


def with_row_files(written: Written, files: list[str]) -> Written:
    """The text with these embeddings at their marks. Refuses one in which a template has not written each of
    them once, in order."""
    found = _MARKED.findall(written.text)
    if found != [str(number) for number in range(len(files))]:
        raise BadRequest(
            f"The messages have {len(files)} parts of embeddings, and the template has written {len(found)}, "
            "or in another order: put them into messages of a role that it writes once.",
            "messages",
        )
    return msgspec.structs.replace(written, row_files=files, is_plain=False)


def check_places(text: str, holders: Sequence[tuple[str, Content]], facts: MediaFacts) -> None:
    """Refuses a text in which a template has not written exactly one placeholder for each item. `holders` are
    the roles and contents of the messages."""
    items = [find_parts([content], facts) for _, content in holders]
    found = find_places(text, facts)
    wanted = [part.kind for parts in items for part in parts]
    if found != wanted and sorted(found) == sorted(wanted):
        raise BadRequest(
            "The template writes the places of pictures and videos in another order than the messages have "
            "them: put them into that order, or into messages of their own.",
            "messages",
        )
    if found != wanted:
        counts = zip(map(len, items), holders, strict=True)
        where = [f"messages[{n}] ({role}): {count}" for n, (count, (role, _)) in enumerate(counts) if count]
        raise BadRequest(
            f"The messages have {len(wanted)} media items, and the template has written places for "
            f"{len(found)}; it may leave out those of some roles, or in some places. {', '.join(where)}",
            "messages",
        )


def encode_written(
    written: Written,
    media: LaidMedia,
    facts: MediaFacts,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    add_special_tokens: bool,
) -> tuple[list[int], list[Placed]]:
    """The token ids of a prompt, and the places of its items among them. The tokens of items are never looked
    up, so those that the model does not have are 0."""
    laid = [media[part] for part in written.parts]
    first, *others = _places(facts).split(written.text)
    text = [first]
    for number, (one, piece) in enumerate(zip(laid, others, strict=True)):
        before = one.layout.before.replace(ORDINAL, str(number))
        text += [before, _stand_in(one.layout, tokenizer), one.layout.after, piece]
    ids = encode_marked("".join(text), tokenizer, add_special_tokens)
    return _placed(ids, laid, vocab_size)


def find_places(text: str, facts: MediaFacts) -> list[str]:
    """The kinds of the items for which a text has places, in order."""
    places, video = _places(facts).findall(text), facts.video_placeholder
    return ["video" if place == video else facts.kind for place in places]


def _places(facts: MediaFacts) -> re.Pattern[str]:
    """What a template writes for items of any kind."""
    words = (facts.video_placeholder, facts.placeholder)
    return re.compile("|".join(re.escape(word) for word in words if word))


def _stand_in(layout: Layout, tokenizer: Tokenizer) -> str:
    """A token of the vocabulary's own that stands for an item while its text is encoded."""
    name = tokenizer.token_name(_first_embedding(layout))
    if name not in tokenizer.added_tokens:
        raise Internal("The model's tokenizer has no token of its own for media items.")
    return name


def _first_embedding(layout: Layout) -> int:
    return layout.tokens[layout.embeddings[0][0]]


def encode_marked(text: str, tokenizer: Tokenizer, special: bool) -> list[int]:
    """Encodes a text with marks of embeddings, which become `ROWS_ID`."""
    first, *rest = _MARKED.split(text)
    ids = tokenizer.encode(first, special)
    for piece in rest[1::2]:
        ids += [ROWS_ID, *tokenizer.encode_behind(piece)]
    return ids


def _placed(ids: list[int], laid: Sequence[Laid], vocab_size: int) -> tuple[list[int], list[Placed]]:
    """Puts the tokens of each item in place of the one that stands for it."""
    found: list[int] = []
    placed: list[Placed] = []
    start = 0
    for one in laid:
        tokens = one.layout.tokens
        try:
            at = ids.index(_first_embedding(one.layout), start)
        except ValueError:
            raise Internal("The model's tokenizer does not keep the places of media items.") from None
        found += ids[start:at]
        placed.append(Placed(one.hash, len(found), len(tokens), one.layout.embeddings))
        found += [token if token < vocab_size else 0 for token in tokens]
        start = at + 1
    return found + ids[start:], placed


def cut_prompt(
    ids: list[int], media: Sequence[Placed], keep: int, *, left: bool
) -> tuple[list[int], list[Placed]]:
    """The last tokens of a prompt if `left`, else the first, and the items among them. Refuses to cut one."""
    start = len(ids) - keep if left else 0
    kept: list[Placed] = []
    for one in media:
        first, stop = one.at - start, one.at - start + one.length
        if first < 0 < stop or first < keep < stop:
            raise BadRequest(
                f"truncate_prompt_tokens={keep} would cut a media item of {one.length} tokens in two.",
                "truncate_prompt_tokens",
            )
        if first >= 0 and stop <= keep:
            kept.append(msgspec.structs.replace(one, at=first))
    return ids[start : start + keep], kept
