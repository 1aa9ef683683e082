"""GET /: the page for people, its files, and the stream of what the server does now.

The files are read once, and named by a digest of all of them, so that browsers keep them.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from server.errors import NotFound
from server.http.endpoint import Endpoint
from server.http.sse import EventStream
from server.page.live_status import Watch
from server.routes.request_context import frontend_of

router = APIRouter(route_class=Endpoint, tags=["page"], include_in_schema=False)
events = APIRouter(route_class=Endpoint, tags=["server"])

FOLDER = Path(__file__).parent / "files"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_ALLOWED = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _ALLOWED,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_INDEX_HEADERS = {**_HEADERS, "Cache-Control": "no-cache"}
_FILE_HEADERS = {**_HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}

WATCH = Watch()


class PageFiles(NamedTuple):
    html: bytes
    digest: str
    """The part of the other files' addresses that changes with any of them."""
    files: dict[str, tuple[bytes, str]]
    """Content and media type of the other files by name."""


@cache
def page_files() -> PageFiles:
    paths = sorted(path for path in FOLDER.iterdir() if path.suffix in _TYPES)
    files = {path.name: (path.read_bytes(), _TYPES[path.suffix]) for path in paths}
    digest = hashlib.sha256(b"\0".join(content for content, _ in files.values())).hexdigest()[:16]
    index, _ = files.pop("index.html")
    return PageFiles(index.replace(b"{digest}", digest.encode()), digest, files)


@router.get("/")
async def page() -> Response:
    return Response(page_files().html, media_type="text/html", headers=_INDEX_HEADERS)


@router.get("/page/{digest}/{name}")
async def page_file(digest: str, name: str) -> Response:
    page = page_files()
    if digest != page.digest or name not in page.files:
        raise NotFound("The page has no such file; load it again.")
    content, media_type = page.files[name]
    return Response(content, media_type=media_type, headers=_FILE_HEADERS)


@events.get("/live/events")
async def live_events(request: Request) -> Response:
    """Stream what the server does now, an event a second: its state, counts of tokens, steps, replicas."""
    return EventStream(WATCH.begin(frontend_of(request)))
