"""Memory that ran out: what an error means, and how often workers before this one were killed. No torch."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

import msgspec

from worker.host.machine import address_limit, available_memory, kills_for_memory

_GIB = 1 << 30
_NOT_MAPPED = ("failed to map segment", "cannot allocate memory", "can't allocate memory", "can't start new")
"""Words of the system, of its loader, of torch and of Python."""


class OutOfMemory(OSError):
    """A worker cannot start because memory ran out; the message says what to do."""


class _Note(msgspec.Struct, frozen=True):
    """What a worker leaves behind."""

    kills: int
    """The processes that had been killed when it began."""
    times: int
    """How many workers before it were killed."""


def explain_shortage(error: Exception) -> str | None:
    """A sentence for the operator if a start failed because memory ran out, or most likely did."""
    limit = address_limit()
    ran_out = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    ran_out = ran_out or any(words in str(error).lower() for words in _NOT_MAPPED)
    # Libraries that get no addresses fail in ways of their own.
    if limit is not None and (ran_out or not isinstance(error, (ValueError, OSError))):
        return (
            f"this process may have {limit / _GIB:.1f} GiB of addresses (ulimit -v), and they are used up; "
            "libraries alone take 1.5: raise the limit, or set none"
        )
    if ran_out:
        return (
            f"memory ran out, with {available_memory() / _GIB:.1f} GiB available now: take a smaller model, "
            "or lower --kv-cache-memory-bytes or --max-num-seqs"
        )
    return None


def times_killed(folder: str, name: str) -> int:
    """How many workers of this run have been killed in the place `name` because memory ran out.

    The kernel counts them. Each worker leaves its count in the run's folder, and the next one compares.
    """
    if not folder:
        return 0
    path, kills = Path(folder) / f"memory of {name}", kills_for_memory()
    times = 0
    with suppress(OSError, msgspec.DecodeError):
        before = msgspec.json.decode(path.read_bytes(), type=_Note)
        times = before.times + (kills > before.kills)
    with suppress(OSError):  # a folder of another machine
        path.write_bytes(msgspec.json.encode(_Note(kills, times)))
    return times
