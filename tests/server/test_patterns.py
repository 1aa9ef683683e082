"""Regular expressions of the server take time by the length of a text, whatever characters it has many of.

Each is tried at the beginning of a text, where it may not divide one run of characters in several ways.
"""

import ast
import functools
import re
import signal
from pathlib import Path

import pytest

import server

SECONDS = 1
"""For a text of 50 kB, of which the slowest takes 20 ms: quadratic patterns need many seconds."""
BEGINNINGS = ("", "{", "{1,", "~", '"', '{"input', "boundary=", "<|a", "a", "/a/", "\\")


@functools.cache
def _found() -> list[tuple[str, re.Pattern[str] | re.Pattern[bytes]]]:
    """The patterns that the sources have as constants."""
    found: list[tuple[str, re.Pattern[str] | re.Pattern[bytes]]] = []
    for path in sorted(Path(server.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="re"), attr=str()),
                    args=[ast.Constant(value=str() | bytes() as source), *more],
                ):
                    flags = re.VERBOSE if any("VERBOSE" in ast.unparse(one) for one in more) else 0
                    found.append((f"{path.stem}:{node.lineno}", re.compile(source, flags)))
                case _:
                    pass
    return found


def _late(*_: object) -> None:
    raise TimeoutError


@pytest.mark.parametrize("many", [" ", "\t", "\n", "0", "a", "_", '"', "\\", "/", "{"])
def test_fifty_kilobytes_of_a_character(many: str) -> None:
    patterns, slow = _found(), list[tuple[str, str]]()
    assert len(patterns) > 40
    before = signal.signal(signal.SIGVTALRM, _late)
    try:
        for name, pattern in patterns:
            for begins in BEGINNINGS:
                text = f"{begins}{many * 50_000}\0"
                signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
                try:
                    pattern.match(text.encode() if isinstance(pattern.pattern, bytes) else text)  # pyright: ignore[reportArgumentType, reportCallIssue]
                except TimeoutError:
                    slow.append((name, begins))
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    assert slow == []
