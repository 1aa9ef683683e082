"""The sources of media: data URLs, files of one folder, and the network. No name and no declared type is
passed on: the content of a file tells how it is decoded."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from server.errors import BadRequest
from server.media.fetch import Fetcher
from server.media.media_parts import MediaFile


class Sources:
    """All places from which media may come."""

    def __init__(self, fetcher: Fetcher, folder: Path | None, most_bytes: int) -> None:
        """`folder`: that of --allowed-local-media-path; None allows no files."""
        self._fetcher, self._folder, self._most_bytes = fetcher, folder, most_bytes

    async def read(self, url: str) -> MediaFile:
        """The file behind a URL. Raises an error for the client if there is none, or if it is not allowed."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return _inline(url)
        if scheme == "file":
            return MediaFile(await asyncio.to_thread(self._read_file, url))
        if scheme in ("http", "https"):
            return MediaFile(await self._fetcher.fetch(url))
        raise BadRequest("A media URL must begin with data:, http:, https: or file:.")

    def _read_file(self, url: str) -> bytes:
        if self._folder is None:
            raise BadRequest(
                "Files of this server are not served: it runs without --allowed-local-media-path."
            )
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise BadRequest("A file URL must be file:///path, without a host.")
        try:
            return _read_within(self._folder, unquote(parts.path), self._most_bytes)
        except (OSError, ValueError):
            raise BadRequest("The file of a media URL cannot be read.") from None


def _inline(url: str) -> MediaFile:
    data = memoryview(url.encode("utf-8", "replace"))
    head, comma, _ = url[:200].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise BadRequest("A data URL must be data:TYPE;base64,DATA.")
    return MediaFile(data[len(head.encode("utf-8", "replace")) + 1 :], is_base64=True)


def _read_within(folder: Path, name: str, most_bytes: int) -> bytes:
    """Read a file below a folder. Links are followed before the path is checked, and the file that was opened
    is compared with the one that was checked."""
    path = os.path.realpath(name)
    if not Path(path).is_relative_to(os.path.realpath(folder)):
        raise BadRequest("The file of a media URL lies outside of the folder of --allowed-local-media-path.")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # waits for no pipe's writer
    try:
        opened = os.fstat(descriptor)
        if os.path.realpath(path) != path or not os.path.samestat(opened, os.lstat(path)):
            raise OSError
        if not stat.S_ISREG(opened.st_mode):
            raise BadRequest("A media URL must name a regular file.")
        if opened.st_size > most_bytes:
            raise BadRequest(
                f"The file of a media URL has more than the {most_bytes} bytes allowed (--max-media-mb)."
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes)
    finally:
        os.close(descriptor)
