"""Cuts long files out of bodies before these are read as JSON, which takes long for a file of many megabytes.

A short reference stands in place of each. Only what a body has where media parts have their files is cut out.
"""

from __future__ import annotations

import re

from server.errors import BadRequest
from server.media.media_parts import REFERENCE, MediaFile

SHORTEST = 8 << 10
"""Files in base64 of fewer bytes stay where they are."""
MOST_FILES = 256
"""The most files that are cut out of a body."""
_STEP = SHORTEST // 2
_HEAD = re.compile(rb"data:[\w.+;=\\/-]{0,200};base64,", re.IGNORECASE)
_BASE64 = re.compile(rb"[A-Za-z0-9+/\\]{128}")
_PLACE = re.compile(
    rb'("(url|image_url|video_url|image_embeds|data)"\s{0,9}:|("images"\s{0,9}:\s{0,9})?[\[,])\s{0,200}$'
)
"""What stands before a string that may be a file: the name of its field, or it is one of a list, which
writers of JSON for people indent by as much as they like."""
_HOLDER = re.compile(rb'"(source|input_audio|(image|video|audio)_url)"\s{0,9}:\s{0,9}\{[^{}]*$')
"""What stands before a field `url` or `data` of a media part. Calls of tools have such fields, too."""
_BEFORE_ROWS = re.compile(rb'"prompt_embeds"\s{0,9},\s{0,9}"data"\s{0,9}:\s{0,9}"$')
_BEHIND_ROWS = re.compile(rb'"\s{0,9},\s{0,9}"type"\s{0,9}:\s{0,9}"prompt_embeds"')
"""What stands around a file of embeddings in place of tokens, which is read where the prompt is written."""
_NEXT = re.compile(rb'"\s{0,9},\s{0,200}"')
"""What stands between two strings of a list."""


class InlineFiles:
    """The files that were cut out of a body, until they are prepared."""

    def __init__(self) -> None:
        self._files: dict[str, MediaFile] = {}

    def cut(self, raw: bytes | bytearray, most_left: int) -> bytes:
        """The body with references in place of long files. No more than `most_left` bytes of it are searched,
        files not counted."""
        pieces: list[bytes | bytearray] = []
        at = done = cut = 0
        bare = False
        """Whether the last file had no head of a data URL, as further ones of a list then have none."""
        while (middle := at + _STEP) < len(raw) and at - cut <= most_left and len(self._files) < MOST_FILES:
            start, stop = raw.rfind(b'"', at, middle) + 1, raw.find(b'"', middle)
            if stop < 0:
                break
            bare = bare and _NEXT.fullmatch(raw, done, start) is not None
            if start > 0 and (head := _head_of_file(raw, start, stop, bare=bare)) is not None:
                bare = head == 0
                reference = self.add(MediaFile(memoryview(raw)[start + head : stop], is_base64=True))
                pieces += [raw[done:start], reference.encode()]
                done, cut = stop, cut + stop - start
            at = stop
        return b"".join([*pieces, raw[done:]]) if pieces else bytes(raw)

    def add(self, file: MediaFile) -> str:
        """Keeps a file, and returns the reference that stands for it."""
        reference = f"{REFERENCE}{len(self._files)}"
        self._files[reference] = file
        return reference

    def take(self, url: str) -> MediaFile | None:
        """The file for which a reference stands; None if the URL is none. Each is taken once."""
        return self._files.pop(url, None)

    def check_taken(self) -> None:
        """Refuses a body in which references stand elsewhere than in media parts."""
        if self._files:
            raise BadRequest(
                f"A file in base64 of more than {SHORTEST} bytes may be in a media part only.", "messages"
            )


def _head_of_file(raw: bytes | bytearray, start: int, stop: int, *, bare: bool) -> int | None:
    """How many bytes of a string come before its base64; None if it is no long file of a media part. `bare`
    says that there may be none."""
    if stop - start < SHORTEST or raw[stop - 1] == ord("\\"):
        return None
    place = _PLACE.search(raw, max(0, start - 240), start - 1)
    head = _HEAD.match(raw, start, start + 256)
    of_rows = _BEFORE_ROWS.search(raw, max(0, start - 64), start) or _BEHIND_ROWS.match(raw, stop)
    if place is None or of_rows:
        return None
    if place[2] in (b"url", b"data") and not _HOLDER.search(raw, max(0, place.start() - 400), place.start()):
        return None
    bare = bare or place[2] in (b"data", b"image_embeds") or place[3] is not None
    if head is None and not (bare and _BASE64.match(raw, start)):
        return None
    return 0 if head is None else head.end() - start
