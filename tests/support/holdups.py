"""What held up an event loop or the steps of an engine, by the log of a watched server, and why it may."""

import re

_NAMED = re.compile(
    r"(?:(?P<loop>the event loop) is behind by|a part of a step, (?P<part>[\w ]+), took)"
    r" (?P<seconds>[\d.]+) s"
    r"[^\n]*(?P<stack>(?:\n  [^\n]*)*)"
)
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line \d+, in (?P<function>\S+)')
_FRAMES = 4
"""The innermost frames that an entry shows."""

EXPLAINED: tuple[tuple[str, str], ...] = (
    (r"^the event loop: .* run_until_complete$", "the loop itself, which waits for the interpreter's lock"),
)
"""Patterns of entries that may be, and why."""


def holdups(log: str) -> dict[str, list[float]]:
    """What was named, with the innermost frames of its stack, and the seconds of each time."""
    found: dict[str, list[float]] = {}
    for each in _NAMED.finditer(log.replace(r"\n", "\n")):  # in a log, a record has one line
        frames = [
            f"{frame['file'].rpartition('/')[2]} {frame['function']}"
            for frame in _FRAME.finditer(each["stack"])
        ]
        entry = f"{each['loop'] or each['part']}: {' > '.join(frames[-_FRAMES:])}"
        found.setdefault(entry, []).append(float(each["seconds"]))
    return found


def explanation(entry: str) -> str | None:
    """Why an entry may be, if that is known."""
    return next((why for known, why in EXPLAINED if re.search(known, entry)), None)


def unexplained(log: str) -> dict[str, list[float]]:
    """What was named and has no explanation."""
    return {entry: seconds for entry, seconds in holdups(log).items() if explanation(entry) is None}
