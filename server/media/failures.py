"""Turns errors of jobs that read media into refusals that clients understand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from models.media.item import MediaError
from server.errors import BadRequest, refused_if_full

FULL_TEMPORARY = (
    "The server's folder for temporary files is full. Try again later; the operator can make room there, or "
    "name another one by TMPDIR."
)


@contextmanager
def refused_unless_read(what: str, param: str | None = None) -> Iterator[None]:
    """Turns what goes wrong while `what` is read into errors for clients; `param` is the field of it."""
    try:
        with refused_if_full(FULL_TEMPORARY):
            yield
    except MediaError as error:
        raise BadRequest(str(error), param) from None
    except MemoryError:
        raise BadRequest(f"Decoding a {what} took more memory than it may.", param) from None
