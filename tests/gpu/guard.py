"""Runs a section in child processes: a hang, a crash or a lost device ends one of its parts and no other.

A child tells what it does in lines of JSON: which part begins and how long it may take, results, facts that
later sections need, and from which part another child shall go on. It imports nothing but the standard
library, so it can say so if torch is missing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from results import Result

Event = dict[str, Any]

_PATIENCE = 20.0
"""Seconds in which a child must end when it has said all."""


@dataclass
class _Child:
    """What is known of a child while it runs."""

    deadline: float
    """When the section ends."""
    part: int | None = None
    parts: int = 0
    """The number of parts of the section."""
    name: str = ""
    limit: float = float("inf")
    """When the part ends."""
    next: int | None = None
    """The part from which another child shall go on."""
    done: bool = False

    def hear(self, event: Event) -> None:
        match event:
            case {"part": number, "of": parts, "name": name, "seconds": seconds}:
                self.part, self.parts = number, parts
                self.name, self.limit = name, time.monotonic() + seconds
            case {"restart": number}:
                self.next, self.done = number, True
            case {"end": _}:
                self.done = True
            case _:
                pass

    @property
    def remaining(self) -> float:
        return min(self.limit, self.deadline) - time.monotonic()


@dataclass(frozen=True)
class Guard:
    """What all sections share: `environment` of the children, and the file that gets what they print."""

    environment: Mapping[str, str]
    log: Path

    def run(
        self,
        command: Callable[[int], Sequence[str]],
        seconds: float,
        hear: Callable[[Event], None],
        name: str,
    ) -> None:
        """Run a section. `command`: the child's command that begins with a part; `hear` gets all events."""
        deadline = time.monotonic() + seconds
        first: int | None = 0
        while first is not None:
            if time.monotonic() > deadline:
                said = f"its {seconds:.0f} s are over: parts from number {first + 1} on are left out"
                hear({"result": asdict(Result(name, said, unfinished=True))})
                return
            child = _Child(deadline)
            first = self._run_child(command(first), child, hear, name)

    def _run_child(
        self, command: Sequence[str], child: _Child, hear: Callable[[Event], None], name: str
    ) -> int | None:
        """Run one child -> the part from which another one is to go on, if any."""
        read, write = os.pipe()
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                [*command, "--events", str(write)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                env=dict(self.environment),
                start_new_session=True,
            )
        os.close(write)
        began = time.monotonic()
        try:
            for event in _events(read, child, process):
                child.hear(event)
                hear(event)
                if child.done:
                    break
            with suppress(subprocess.TimeoutExpired):
                process.wait(_PATIENCE if child.done else 0)
        finally:
            os.close(read)
            code = process.poll()
            _end_session(process)
        if not (child.done and code in (None, 0)):  # one that has said all may hang, but not break
            what = f"{name}, at its end" if child.done else child.name or name
            hear({"result": asdict(_explain(code, what, time.monotonic() - began, self.log))})
        if child.done or child.part is None:
            return child.next
        return child.part + 1 if child.part + 1 < child.parts else None


def _events(read: int, child: _Child, process: subprocess.Popen[bytes]) -> Iterator[Event]:
    """Events until the child ends, or its time is over."""
    held = b""
    with DefaultSelector() as selector:
        selector.register(read, EVENT_READ)
        while (remaining := child.remaining) > 0:
            if not selector.select(min(0.2, remaining)):
                if process.poll() is not None:  # whoever has inherited the pipe says nothing
                    return
                continue
            piece = os.read(read, 1 << 16)
            if not piece:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1)
                return
            *lines, held = (held + piece).split(b"\n")
            yield from (json.loads(line) for line in lines)


def _explain(code: int | None, name: str, seconds: float, log: Path) -> Result:
    """What is to be said of a part whose process did not come to its end."""
    if code is None:
        return Result(name, f"ended after {seconds:.0f} s", unfinished=True)
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Result(name, f"its process ended with {how}: {_last_line(log)}", wrong=1)


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "nothing was printed"


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a child's session: servers that it has started, too, which hold the device."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _session(entry) == process.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry.name), signal.SIGKILL)
    process.wait()


def _session(entry: Path) -> int:
    with suppress(OSError, IndexError, ValueError):
        return int((entry / "stat").read_text().rpartition(")")[2].split()[3])
    return -1
