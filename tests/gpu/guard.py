"""Runs a section in child processes: a hang, a crash or a lost device ends one of its parts and no other.

A child tells what it does in lines of JSON: which part begins and how long it may take, results, facts that
later sections need, and from which part another child shall go on. It imports nothing but the standard
library, so it can say so if torch is missing.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from results import Result

Event = dict[str, Any]
Hear = Callable[[Event], None]
_PATIENCE = 20.0
"""Seconds in which a child must end when it has said all."""


class _Child:
    """A child that is ended when its time is over."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        read, write = os.pipe()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--events", str(write)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(write,),
                env=dict(environment),
                start_new_session=True,
            )
        os.close(write)
        self.lines = os.fdopen(read)
        self.was_ended = False
        self._timer: Timer | None = None

    def end_after(self, seconds: float) -> None:
        """End it after this time, in place of any time that was set before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = Timer(max(0.0, seconds), self._end)
        self._timer.start()

    def _end(self) -> None:
        self.was_ended = self.process.poll() is None
        _end_session(self.process)

    def close(self) -> int | None:
        """End all that is left of it -> its exit code; None if its time was over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        _end_session(self.process)
        self.lines.close()
        return None if self.was_ended else self.process.returncode


@dataclass(frozen=True)
class Guard:
    """What all sections share: `environment` of the children, and the file that gets what they print."""

    environment: Mapping[str, str]
    log: Path

    def run(self, command: Callable[[int], Sequence[str]], seconds: float, hear: Hear, name: str) -> None:
        """Run a section. `command`: the child's command that begins with a part; `hear` gets all events."""
        deadline = time.monotonic() + seconds
        first: int | None = 0
        while first is not None:
            if time.monotonic() > deadline:
                said = f"its {seconds:.0f} s are over: parts from number {first + 1} on are left out"
                hear({"result": asdict(Result(name, said, unfinished=True))})
                return
            first = self._run_child(command(first), deadline, hear, name)

    def _run_child(self, command: Sequence[str], deadline: float, hear: Hear, name: str) -> int | None:
        """Run one child -> the part from which another one is to go on, if any."""
        child, began = _Child(command, self.environment, self.log), time.monotonic()
        child.end_after(deadline - began)
        following, what, done = None, name, False
        try:
            for line in child.lines:
                if not line.endswith("\n"):  # it was ended while it wrote
                    break
                event: Event = json.loads(line)
                hear(event)
                match event:
                    case {"part": number, "of": parts, "name": what, "seconds": limit}:
                        following = number + 1 if number + 1 < parts else None
                        child.end_after(min(limit, deadline - time.monotonic()))
                    case {"restart": _} | {"end": _}:
                        following, what, done = event.get("restart"), f"{name}, at its end", True
                        break
                    case _:
                        pass
            child.end_after(_PATIENCE if done else 1)
            child.process.wait()
        finally:
            code = child.close()
        if not (done and code in (None, 0)):  # one that has said all may hang, but not break
            hear({"result": asdict(_explain(code, what, time.monotonic() - began, self.log))})
        return following


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
