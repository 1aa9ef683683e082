"""Triton's cache in an image: a folder that may be written to, and behind it kernels that the image brings.

`TRITON_CACHE_MANAGER=worker.kernels.cuda.compiling.image_cache:ImageCache` chooses it. The image's own folder
is only read, so it may lie in a file system without writing, and nothing is copied when a container starts.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from triton.runtime.cache import FileCacheManager

FOLDER = Path(sys.prefix) / "triton"
"""The folder into which kernels were compiled when the image was built, with `TRITON_CACHE_DIR` set to it."""


class ImageCache(FileCacheManager):
    """One kernel's files, of which those in `TRITON_CACHE_DIR` come first."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        self._shipped: dict[str, str] = {}
        if not (override or dump):
            self._shipped = {path.name: str(path) for path in (FOLDER / key).glob("*")}

    def get_file(self, filename: str) -> str | None:
        return super().get_file(filename) or self._shipped.get(filename)

    def get_group(self, filename: str) -> dict[str, Any] | None:
        """Find the files of a kernel by the name of the one that describes it.

        Where they lie was noted while the image was built, perhaps under another path: the folder is listed.
        """
        own = super().get_group(filename)
        return own or (self._shipped if filename in self._shipped else None)
