"""The index of kept responses by owner, in memory, so that no request looks through the folder.

Each API process notes its own responses at once. It finds what other processes have written or removed when
it refreshes the index, so an owner may have some more responses than `MOST_RESPONSES` until then. Every
function may be called in any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec

from server.batches.folder import Record, read_record

MOST_RESPONSES = 10_000
"""Responses that an owner may have: beyond them the oldest gives way."""


class Entry(Record, kw_only=True):
    """What the index knows of a response: a part of its record."""

    waits: bool = False
    """Whether it is still to be computed: then it gives way to no other one."""
    expires_at: float = 0.0


class ResponseIndex:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._owners: dict[str, dict[Path, Entry]] = {}
        """The responses of each owner, the oldest first."""
        self._changed: set[Path] = set()
        """Responses that this process has noted or dropped since a refresh began to read the folder."""

    def note(self, place: Path, entry: Entry) -> list[Path]:
        """Notes that a record was written. Returns the records that have to give way to it."""
        with self._lock:
            self._changed.add(place)
            own = self._owners.setdefault(entry.owner, {})
            before = own.get(place)
            if before is not None and before.at != entry.at:
                del own[place]  # a client has given the id of an older response again
            own[place] = entry
            return self._too_many(own)

    def drop(self, owner: str, place: Path) -> None:
        """Notes that a record was removed."""
        with self._lock:
            self._changed.add(place)
            self._owners.get(owner, {}).pop(place, None)

    def waiting(self, owner: str) -> int:
        """Counts the responses of an owner that are still to be computed."""
        with self._lock:
            return sum(entry.waits for entry in self._owners.get(owner, {}).values())

    def take_expired(self, now: float) -> list[Path]:
        """Drops the responses whose time is over, and returns their records."""
        with self._lock:
            found: list[Path] = []
            for own in self._owners.values():
                gone = [place for place, entry in own.items() if 0 < entry.expires_at <= now]
                for place in gone:
                    del own[place]
                found += gone
            self._changed.update(found)
            return found

    def refresh(self) -> list[Path]:
        """Compares the index with the folder. Returns the records of owners who have too many.

        A record is read once: only one that waits changes.
        """
        with self._lock:
            self._changed.clear()
            known = {place: entry for place, entry in self._all() if not entry.waits}
        found: dict[Path, Entry] = {}
        for place in self._folder.glob("*.json"):
            entry = known.get(place) or _read(place)
            if entry is not None:
                found[place] = entry
        with self._lock:
            for place in self._changed:
                found.pop(place, None)
            found.update({place: entry for place, entry in self._all() if place in self._changed})
            self._owners = {}
            for place, entry in sorted(found.items(), key=lambda item: item[1].at):
                self._owners.setdefault(entry.owner, {})[place] = entry
            return [place for own in self._owners.values() for place in self._too_many(own)]

    def _all(self) -> Iterable[tuple[Path, Entry]]:
        return (item for own in self._owners.values() for item in own.items())

    def _too_many(self, own: dict[Path, Entry]) -> list[Path]:
        """Drops the oldest responses that are too many, and returns their records."""
        ended = (place for place, entry in own.items() if not entry.waits)
        gone = list(islice(ended, max(0, len(own) - MOST_RESPONSES)))
        for place in gone:
            del own[place]
        self._changed.update(gone)
        return gone


def _read(place: Path) -> Entry | None:
    with suppress(msgspec.MsgspecError, OSError):  # a damaged record is no response
        return read_record(place, Entry)
    return None
