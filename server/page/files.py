"""The files of the page: read once, and named by a digest of all of them, so that browsers keep them."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "files"
_INDEX = "index.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class PageFile(NamedTuple):
    content: bytes
    media_type: str


class PageFiles(NamedTuple):
    html: bytes
    digest: str
    """The part of the other files' addresses that changes with any of them."""
    files: dict[str, PageFile]


@cache
def page_files() -> PageFiles:
    paths = sorted(path for path in FOLDER.iterdir() if path.suffix in _TYPES)
    files = {path.name: PageFile(path.read_bytes(), _TYPES[path.suffix]) for path in paths}
    digest = hashlib.sha256(b"\0".join(file.content for file in files.values())).hexdigest()[:16]
    html = files.pop(_INDEX).content.replace(b"{digest}", digest.encode())
    return PageFiles(html, digest, files)
