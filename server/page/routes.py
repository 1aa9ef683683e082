"""GET /: the page for people, its files, and the stream of what the server does now."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.errors import NotFound
from server.http.endpoint import Endpoint
from server.http.sse import EventStream
from server.page.files import page_files
from server.page.live import Watch
from server.routes.request_context import frontend_of

router = APIRouter(route_class=Endpoint, tags=["page"], include_in_schema=False)
events = APIRouter(route_class=Endpoint, tags=["server"])

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


@router.get("/")
async def page() -> Response:
    return Response(page_files().html, media_type="text/html", headers=_INDEX_HEADERS)


@router.get("/page/{digest}/{name}")
async def page_file(digest: str, name: str) -> Response:
    page = page_files()
    file = page.files.get(name) if digest == page.digest else None
    if file is None:
        raise NotFound("The page has no such file; load it again.")
    return Response(file.content, media_type=file.media_type, headers=_FILE_HEADERS)


@events.get("/live/events")
async def live_events(request: Request) -> Response:
    """Stream what the server does now, an event a second: its state, counts of tokens, steps, replicas."""
    return EventStream(WATCH.begin(frontend_of(request)))
