"""Checks that the files of an adapter are still those that were asked for."""

from __future__ import annotations

from pathlib import Path

from engine_core.adapters.messages import Adapter
from models.lora_config import adapter_digest, files_of


def stamp_of(folder: Path) -> str:
    """What changes when its files are written: their sizes, and when that was. Raises OSError."""
    found = [path.stat() for path in files_of(folder)]
    return " ".join(f"{each.st_size}-{each.st_mtime_ns}-{each.st_ino}" for each in found)


def has_changed(adapter: Adapter) -> bool:
    """Whether its files hold something else than what its digest says, by which the cache is shared.

    Raises OSError or ValueError if they cannot be read.
    """
    folder = Path(adapter.folder)
    return stamp_of(folder) != adapter.stamp and adapter_digest(folder) != adapter.digest
