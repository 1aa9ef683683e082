"""Writes long lists of JSON in pieces, so that no answer is in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from starlette.responses import Response, StreamingResponse

PIECE_BYTES = 256 << 10
"""A list longer than this many bytes is written in pieces."""

JSON = "application/json"


def list_response(entries: Iterable[bytes], around: bytes = b"[]") -> Response:
    """Answers with a list of entries of JSON, in pieces if it is long; later pieces are made in threads.

    `around` is what stands around the entries: JSON whose last empty list they fill.
    """
    before, _, after = around.rpartition(b"[]")
    pieces = _pieces(entries, before + b"[", b"]" + after)
    first = next(pieces)
    second = next(pieces, None)
    if second is None:
        return Response(first, media_type=JSON)
    return StreamingResponse(chain([first, second], pieces), media_type=JSON)


def _pieces(entries: Iterable[bytes], before: bytes, after: bytes) -> Iterator[bytes]:
    gathered, size = [before], 0
    for number, entry in enumerate(entries):
        gathered.append(b"," + entry if number else entry)
        size += len(entry)
        if size >= PIECE_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
    gathered.append(after)
    yield b"".join(gathered)
