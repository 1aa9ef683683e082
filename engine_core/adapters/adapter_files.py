"""Checks that the files of an adapter are still those that were asked for."""

from __future__ import annotations

from pathlib import Path

from engine_core.adapters.messages import Adapter
from models.lora_config import adapter_digest, files_of


def stamp_of(folder: Path) -> str:
    """What changes when its files are written: their sizes, and when that was. Raises OSError."""
    found = [path.stat() for path in files_of(folder)]
    return " ".join(f"{each.st_size}-{each.st_mtime_ns}-{each.st_ino}" for each in found)


def change_of(adapter: Adapter) -> str:
    """Why an adapter cannot be read as it was ordered: its files hold something else than its digest says, by
    which the cache is shared. An empty text if it can be."""
    folder = Path(adapter.folder)
    try:
        changed = stamp_of(folder) != adapter.stamp and adapter_digest(folder) != adapter.digest
    except (OSError, ValueError) as error:
        return str(error)
    return "its files have changed since: load it again" if changed else ""
