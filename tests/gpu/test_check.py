"""How `make gpu-check` runs its sections: what hangs, crashes or is missing costs nothing else.

Sections are run by stand-ins for their processes here; `test_parts.py` runs the sections themselves.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from check import NOTHING_CHECKED, SECTIONS, Check, Section, run_all
from guard import Guard
from report import Report
from results import TARGETS, Result, Target

SCRIPT = Path(__file__).with_name("check.py")
STAND_IN = """
import json, os, signal, sys, time
section, first, context, _, pipe = sys.argv[1:]
known = json.load(open(context))

def tell(**event):
    os.write(int(pipe), json.dumps(event).encode() + b"\\n")

def result(name, **fields):
    tell(result={"name": name, **fields})

first = int(first)
print("printed by", section, first, flush=True)
if section == "empty":
    tell(nothing="torch finds no CUDA device here")
elif section == "breaks":
    raise SystemExit("no such section")
elif section == "told":
    tell(part=0, of=1, name="a", seconds=9)
    tell(fact="card", value="H200")
    tell(known="ceilings", value=[1, 2])
    result("rate", value=5.0, unit="tok/s")
    tell(end=True)
elif section == "asks":
    tell(part=0, of=1, name="a", seconds=9)
    result("heard " + str(known["ceilings"]))
    tell(end=True)
elif section == "mixed" and first == 0:
    tell(part=0, of=4, name="crash", seconds=9)
    result("before")
    os.kill(os.getpid(), signal.SIGSEGV)
elif section == "mixed" and first == 1:
    tell(part=1, of=4, name="hang", seconds=0.3)
    os.spawnvp(os.P_NOWAIT, "sleep", ["sleep", "987"])
    time.sleep(60)
elif section == "mixed" and first == 2:
    tell(part=2, of=4, name="fails", seconds=9)
    result("fails", text="wrong", wrong=2)
    tell(restart=3)
elif section == "mixed":
    tell(part=3, of=4, name="last", seconds=9)
    result("after", skipped=True)
    tell(end=True)
elif section == "sanitized":
    tell(part=0, of=1, name="a", seconds=9)
    result("right")
    tell(end=True)
    print("ERROR SUMMARY: 3 errors", flush=True)
    sys.exit(99)
elif section == "slow":
    tell(part=first, of=9, name="slow", seconds=200)
    time.sleep(60)
"""


@pytest.fixture
def checked(tmp_path: Path) -> Check:
    child = tmp_path / "child.py"
    child.write_text(STAND_IN)
    guard = Guard(dict(os.environ), tmp_path / "gpu-check.log")
    return Check(tmp_path / "out", tmp_path / "context.json", guard, child=child)


def shown(check: Check) -> list[tuple[str, str, int, bool]]:
    return [(each.name, each.text, each.wrong, each.unfinished) for each in check.report.results]


def test_what_crashes_hangs_or_fails_costs_nothing_else(checked: Check) -> None:
    sections = {"mixed": Section(30)}
    assert run_all(checked, ["mixed"], sections) == 3
    assert shown(checked) == [
        ("before", "", 0, False),
        ("crash", "its process ended with signal SIGSEGV: printed by mixed 0", 1, False),
        ("hang", "ended after 0 s", 0, True),
        ("fails", "wrong", 2, False),
        ("after", "", 0, False),
    ]
    assert checked.report.summary() == "3 wrong results, 1 parts that did not finish, 1 skipped"
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "sleep 987" not in processes


def test_a_section_ends_when_its_time_is_over(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [0.0]
    monkeypatch.setattr("guard.time", SimpleNamespace(monotonic=lambda: time.monotonic() + gone[0]))
    run = Guard.run

    def run_for_long(self: Guard, command: Any, seconds: float, hear: Any, name: str) -> None:
        def hear_late(event: dict[str, Any]) -> None:
            hear(event)
            gone[0] += 1000

        run(self, command, seconds, hear_late, name)

    monkeypatch.setattr(Guard, "run", run_for_long)
    assert run_all(checked, ["slow"], {"slow": Section(300)}) == 0
    assert shown(checked) == [
        ("slow", "ended after 1000 s", 0, True),
        ("slow", "its 300 s are over: parts from number 2 on are left out", 0, True),
    ]


def test_a_process_that_breaks_at_its_end_is_wrong(checked: Check) -> None:
    """As compute-sanitizer does, which counts errors there."""
    assert run_all(checked, ["sanitized"], {"sanitized": Section(20)}) == 1
    assert shown(checked)[1][1] == "its process ended with exit code 99: ERROR SUMMARY: 3 errors"


def test_a_process_that_does_not_come_to_its_first_part_is_wrong(checked: Check) -> None:
    assert run_all(checked, ["breaks", "told"], {name: Section(20) for name in ("breaks", "told")}) == 1
    assert shown(checked)[0][:2] == ("breaks", "its process ended with exit code 1: no such section")
    assert shown(checked)[1][0] == "rate"


def test_later_sections_know_what_earlier_ones_found(checked: Check) -> None:
    run_all(checked, ["told", "asks"], {name: Section(20) for name in ("told", "asks")})
    assert shown(checked)[1][0] == "heard [1, 2]"
    assert checked.report.facts["card"] == "H200"
    assert "printed by asks 0" in checked.guard.log.read_text()


def test_without_a_device_nothing_else_runs(checked: Check, capsys: pytest.CaptureFixture[str]) -> None:
    sections = {name: Section(20) for name in ("empty", "told")}
    assert run_all(checked, ["empty", "told"], sections) == NOTHING_CHECKED
    assert list(checked.report.sections) == ["empty"]
    assert "torch finds no CUDA device here, so nothing was checked" in capsys.readouterr().out


def test_a_program_that_is_not_installed_is_skipped(checked: Check) -> None:
    prefix = ("no-such-sanitizer", "--tool")
    assert run_all(checked, ["told"], {"told": Section(20, prefix=prefix)}) == 0
    (result,) = checked.report.results
    assert result.skipped and "no-such-sanitizer" in result.text


def test_all_takes_less_than_ten_minutes() -> None:
    assert sum(section.seconds for section in SECTIONS.values() if not section.asked) <= 600
    assert sum(section.seconds for section in SECTIONS.values() if section.quick) <= 250


def test_without_a_card_it_says_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(tmp_path)], capture_output=True, text=True, timeout=150
    )
    assert (run.returncode, run.stderr) == (NOTHING_CHECKED, "")
    assert "gpu-check: torch finds no CUDA device here, so nothing was checked" in run.stdout


def test_figures_stand_beside_their_targets() -> None:
    name = "8B decoding, 1 x 512"
    report = Report({"card": "H200", "date": "2026-01-01"})
    report.sections["engine"] = [
        Result(name, "", 229, "tok/s", 0.8),
        Result("8B prompt of 512, to its token", "", 21, "ms"),
        Result("other", "a | b", wrong=1),
    ]
    page = report.markdown()
    assert f"| {name} | at least 228 tok/s | 229.00 tok/s | hit |" in page
    assert "| 8B prompt of 512, to its token | at most 20 ms | 21.00 ms | missed |" in page
    assert "| 8B prompt of 2048 | at least 35,000 tok/s | not measured |  |" in page
    assert "| other |  |  | WRONG: a \\| b |" in page
    assert report.results[0].line().endswith("80.0% of the floor's rate  hit, at least 228 tok/s")


def test_targets_have_a_direction() -> None:
    assert Target(2, "tok/s").is_hit(2) and not Target(2, "tok/s").is_hit(1.9)
    assert TARGETS["8B ready, kernels compiled"].is_hit(11) and not TARGETS["0.6B one text of 32"].is_hit(2)
