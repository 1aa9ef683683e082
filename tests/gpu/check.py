"""Says what this card does, in one command and under ten minutes: `make gpu-check`.

    python tests/gpu/check.py [--quick] [--only SECTION ...] [--sanitize] [--peer PYTHON] [--out FOLDER]

It installs nothing and needs no network: torch with its Triton, numpy, msgspec and safetensors are enough,
and what needs more is skipped by name. Each section runs in a process of its own and has a limit of time: if
it hangs, crashes or loses the device, it goes on behind the part that did, and so does all the rest. Lines
are printed as they come; `gpu-check.json` and `gpu-check.md` are written anew after each section, so a run
that is killed leaves what it had. What parts print lies in `gpu-check.log`.

The exit code is the number of wrong results, at most 100, or 101 if nothing could be checked, for want of a
card or of torch. Slow results are not wrong: they stand beside the floor that the card's own speed sets, and
beside the targets for an H200, of which those that are bound by memory are scaled by the speed of the card's.
Nor are parts that took too long: they are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from guard import Event, Guard  # noqa: E402
from report import Report  # noqa: E402
from results import H200_BYTES, Result  # noqa: E402

MOST_WRONG, NOTHING_CHECKED = 100, 101
SANITIZER = "compute-sanitizer"
_SANITIZED = (SANITIZER, "--tool", "memcheck", "--error-exitcode", "99")
_TOOLS = "/usr/local/cuda/bin"


@dataclass(frozen=True)
class Section:
    seconds: float
    """The time after which it is ended."""
    quick: bool = False
    """Whether it is part of the check for every change of a kernel."""
    asked: bool = False
    """Whether it runs only if it is asked for."""
    prefix: tuple[str, ...] = ()
    """A program under which it runs."""


SECTIONS: dict[str, Section] = {
    "card": Section(25, quick=True),
    "compile": Section(60, quick=True),
    "right": Section(90, quick=True),
    "rates": Section(80),
    "step": Section(75, quick=True),
    "engine": Section(155),
    "long": Section(55),
    "server": Section(60),
    "families": Section(290, asked=True),
    "kinds": Section(200, asked=True),
    "guesses": Section(140, asked=True),
    "adapters": Section(140, asked=True),
    "offload": Section(90, asked=True),
    "sanitized": Section(300, asked=True, prefix=_SANITIZED),
    "models": Section(200, asked=True),
    "peer": Section(900, asked=True),
}
"""The sections by name, which are the modules of `tests/gpu/parts` too; `card` runs before all others."""


@dataclass
class Check:
    """One run: where its files go, and what earlier sections have found that later ones need."""

    out: Path
    context: Path
    """The file by which children learn of what was found before."""
    guard: Guard
    known: dict[str, object] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    child: Path = HERE / "child.py"
    nothing: str = ""
    """Why nothing can be checked, if so."""

    def run(self, name: str, section: Section) -> None:
        """Run one section, and write the files anew."""
        print(f"== {name}", flush=True)
        results = self.report.sections.setdefault(name, [])

        def hear(event: Event) -> None:
            match event:
                case {"result": fields}:
                    results.append(Result(**fields))
                    print(results[-1].line(self.report.speed), flush=True)
                case {"fact": fact, "value": str(value)}:
                    self.report.facts[fact] = value
                case {"known": known, "value": value}:
                    self.known[known] = value
                    if isinstance(value, dict) and known == "ceilings":
                        self.report.speed = value["bytes_per_second"] / H200_BYTES
                case {"nothing": reason}:
                    self.nothing = reason
                case _:
                    pass

        def command(first: int) -> list[str]:
            self.context.write_text(json.dumps(self.known))
            program = [sys.executable, str(self.child), name, str(first), str(self.context)]
            return [*_found(section.prefix), *program]

        if section.prefix and not _found(section.prefix):
            results.append(Result(name, f"there is no {section.prefix[0]} here", skipped=True))
        else:
            self.guard.run(command, section.seconds, hear, name)
        self.report.write(self.out)


def _found(prefix: tuple[str, ...]) -> list[str]:
    """The command of a program, if it is installed."""
    path = shutil.which(prefix[0], path=f"{os.environ.get('PATH', '')}:{_TOOLS}") if prefix else None
    return [path, *prefix[1:]] if path else []


def choose(given: argparse.Namespace, sections: Mapping[str, Section]) -> list[str]:
    """The names of the sections to run, in order; the card's own is always the first."""
    chosen: set[str] = set(given.only or ())
    if not chosen:
        chosen = {
            name for name, each in sections.items() if not each.asked and (each.quick or not given.quick)
        }
    if given.sanitize:
        chosen.add("sanitized")
    if given.peer:
        chosen.add("peer")
    return [name for name in sections if name in {"card", *chosen}]


def run_all(check: Check, names: Sequence[str], sections: Mapping[str, Section]) -> int:
    """Run sections in order -> the exit code."""
    for name in names:
        check.run(name, sections[name])
        if check.nothing:
            print(f"gpu-check: {check.nothing}, so nothing was checked")
            return NOTHING_CHECKED
    print(check.report.summary())
    print(f"in {check.out / 'gpu-check.md'} and gpu-check.json; what parts printed is in gpu-check.log")
    return min(check.report.wrong, MOST_WRONG)


def environment(cache: Path | None) -> dict[str, str]:
    """The environment of children, which keep compiled kernels in `cache`, or where the user has them."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    made = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | own
    return made if cache is None else {**made, "TRITON_CACHE_DIR": str(cache)}


def commit() -> str:
    """The commit that is checked out, or that it is not known here."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return run.stdout.strip() or "unknown"


def main(arguments: Sequence[str], clock: Callable[[], float] = time.monotonic) -> int:
    parser = argparse.ArgumentParser(description="What this card does, beside what it could do at most.")
    parser.add_argument("--quick", action="store_true", help="The sections for every change of a kernel.")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="These sections, and the card's.")
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="Run kernels under compute-sanitizer, too, if it is installed.",
    )
    parser.add_argument("--peer", metavar="PYTHON", help="The Python of a vLLM to measure in turns.")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "")),
        help="The folder for files; default: $OUT.",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to try the check itself."
    )
    given = parser.parse_args(arguments)
    names = choose(given, SECTIONS)
    given.out.mkdir(parents=True, exist_ok=True)
    log = given.out / "gpu-check.log"
    log.write_bytes(b"")
    began = clock()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        cache = Path(folder) / "triton" if "compile" in names else None
        guard = Guard(environment(cache), log)
        check = Check(given.out, Path(folder) / "context.json", guard)
        check.known = {"device": given.device, "folder": folder, "peer": given.peer}
        check.report.facts = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit()}
        code = run_all(check, names, SECTIONS)
    print(f"{clock() - began:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
