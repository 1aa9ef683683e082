"""The sections of `make gpu-check`, made small: on a CPU, with kernels in Triton's interpreter.

No line of theirs shall wait for a card to show that it cannot run.
"""

# pyright: reportPrivateUsage=false

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from interpreted import DEVICE  # before any kernel is imported

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "bench"))

import child
import shapes
import torch
from dummy import GREEDY, measure_idle_share, opened
from interpreted_device import Interpreted
from parts import engine
from products import measure_rounding
from results import TARGETS, Result
from workbench import Part, Workbench

from models import ops
from worker import runner
from worker.devices.cpu import Cpu

pytestmark = [
    pytest.mark.skipif(DEVICE.type != "cpu", reason="`make gpu-check` runs these sections on a card"),
]

OTHERS = ("zmq", "fastapi", "uvicorn", "tokenizers", "transformers", "jinja2", "pydantic", "yaml")
"""Packages that a machine with a card need not have."""
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Told:
    """What a section has told."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.facts: dict[str, str] = {}
        self.known: dict[str, Any] = {}
        self.next: int | None = 0

    def hear(self, **event: Any) -> None:
        match event:
            case {"result": fields}:
                self.results.append(Result(**fields))
            case {"fact": name, "value": value}:
                self.facts[name] = value
            case {"known": name, "value": value}:
                self.known[name] = value
            case {"restart": number}:
                self.next = number
            case {"end": _}:
                self.next = None
            case _:
                pass

    @property
    def names(self) -> list[str]:
        return [result.name for result in self.results]

    def text(self, name: str) -> str:
        return next(result.text for result in self.results if result.name == name)


def workbench(folder: Path) -> Workbench:
    return Workbench(torch.device("cpu"), lambda **event: None, folder)


def run(section: str, folder: Path) -> Told:
    """Run all parts of a section in this process."""
    told = Told()
    while told.next is not None:
        before, told.next = told.next, -1
        child.run(section, before, {"device": "cpu", "folder": str(folder), **told.known}, told.hear)
        assert told.next != -1
    return told


def check_results(told: Told) -> None:
    assert [result.line() for result in told.results if result.wrong] == []
    assert [result.name for result in told.results if result.skipped] == []
    assert len(told.names) == len(set(told.names))
    assert all(result.value >= 0 for result in told.results)


def test_card(tmp_path: Path) -> None:
    told = run("card", tmp_path)
    check_results(told)
    assert told.facts["torch"] == torch.__version__
    assert told.known["ceilings"]["bytes_per_second"] > 0
    assert "product of 256 rows" in told.names


def test_right(tmp_path: Path) -> None:
    told = run("right", tmp_path)
    check_results(told)
    assert told.text("operations, heads of 64") == "right"
    assert told.text("2 draws of 300, and those of the host") == "the same tokens"
    assert told.text("tests of kernels").split()[1] == "passed"


def test_sanitized(tmp_path: Path) -> None:
    told = run("sanitized", tmp_path)
    check_results(told)
    assert told.names[0] == "operations, heads of 64"


def test_rates(tmp_path: Path) -> None:
    told = run("rates", tmp_path)
    check_results(told)
    assert "latents, 2 heads, 1 x 4096" in told.names
    assert "delta rule, 1 single tokens" in told.names and "scan, prompt of 2048" in told.names
    assert "decoding, 1 x 16384, 1 splits" in told.names


def test_step(tmp_path: Path) -> None:
    told = run("step", tmp_path)
    assert [result.line() for result in told.results if result.wrong or result.skipped] == []
    assert told.text("graphs up to the logits, 200 steps") == "the same bits"
    assert told.text("steps planned 2 ahead") == "the same tokens"
    assert told.text("prompt of 20000, in other chunks").startswith("differs by 0.0")
    assert told.text("transformers in float32, and ours") == "logprobs differ by 0.000%"
    assert "in" in told.text("kernels, prompt of 1024")
    assert sum(name.startswith("kernels, 32 x 512: ") for name in told.names) == 8


def test_offload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "open_device", lambda _: Cpu(1))  # the start refuses this on a CPU
    told = run("offload", tmp_path)
    check_results(told)
    assert told.text("blocks from the host's memory") == "as they were saved"


def test_families(tmp_path: Path) -> None:
    told = run("families", tmp_path)
    assert len(told.results) == 3 and {result.wrong for result in told.results} == {0}
    assert told.text("Gemma3nForCausalLM").startswith("the CPU's tokens; in bfloat16 ")
    assert told.text("ElectraModel") == "in float32 cosines from 1.00000"


def test_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_FILE_BYTES", 20_000)  # several files
    monkeypatch.setattr(engine, "PARTS", engine.PARTS[:-1])  # the last one differs in its model alone
    told = run("engine", tmp_path)
    check_results(told)
    parts = told.text("0.6B ready, kernels not compiled")
    assert [part.split()[0] for part in parts.split(", ")] == [
        "import",
        "device",
        "weights",
        "cache",
        "first",
    ]
    measured = {name for name in TARGETS if "peer" not in name and "idle share" not in name}
    ready = {name for name in measured if "ready" in name}
    assert measured - ready <= set(told.names) and len(ready) == 4
    assert "8B idle share of a step, 1 x 512" in told.names


def test_parts_of_a_replayed_step_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that replays steps, by the stand-in for graphs: it has those that parts look for."""
    device = Interpreted(most_tokens=1)

    def open_device(_: object) -> Interpreted:
        ops.use(device.kernels)
        return device

    monkeypatch.setattr(runner, "open_device", open_device)
    bench = workbench(tmp_path)
    try:
        with opened(bench, bench.shape("0.6B"), rows=1, longest=160) as dummy:
            made = dummy.make_graphs(whole_only=False)
            assert set(made) == {"of single tokens", "of prompts and texts", "up to the logits"}
            found = list(measure_idle_share(dummy, "case", 1, *dummy.decode(1, 5, 2, GREEDY)))
    finally:
        ops.use({})
    assert [result.unit for result in found] == ["us", "ms", "%"]
    assert found[1].value > 0


def test_long_run(tmp_path: Path) -> None:
    told = run("long", tmp_path)
    check_results(told)
    assert told.text("preempted") != "never: no proof"
    assert not told.text("found in the prefix cache").startswith("0 ")
    assert told.text("seeds repeat, before and after") == "the same tokens"


def test_server(tmp_path: Path) -> None:
    told = run("server", tmp_path)
    check_results(told)
    assert all(result.value > 0 for result in told.results if result.unit)
    assert "0.6B served, 256 clients, first token" in told.names


def test_several_models(tmp_path: Path) -> None:
    told = run("models", tmp_path)
    check_results(told)
    assert told.text("models, demo again") == "the same tokens"


def test_five_packages_are_enough(tmp_path: Path) -> None:
    """The whole command, with packages that cannot be imported."""
    for name in OTHERS:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('blocked', name={name!r})")
    script = [sys.executable, str(HERE / "check.py"), "--device", "cpu", "--out", str(tmp_path / "out")]
    run = subprocess.run(
        [*script, "--only", "compile", "long", "server"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=250,
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stdout
    page = (tmp_path / "out" / "gpu-check.md").read_text()
    assert "| serving |  |  | skipped: there is no zmq here |" in page
    assert "each got one answer" in page
    assert "1 of 1 compiled" in page and "1 of 1 found in the cache" in page


def test_a_part_that_fails_is_told_with_its_place() -> None:
    told = Told()

    def fail(bench: Workbench) -> Iterator[Result]:
        yield Result("first")
        raise ValueError("such a thing")

    part, bench = Part("failing", fail), Workbench(torch.device("cpu"), told.hear, Path())
    assert not child._run_part(part, bench, told.hear)  # pyright: ignore[reportPrivateUsage]
    assert told.names == ["first", "failing"]
    assert told.results[1].wrong and told.results[1].text.startswith("ValueError at test_parts.py:")


@pytest.mark.parametrize(("name", "wrong"), [("no_such_package", 0), ("worker.no_such_room", 1)])
def test_a_missing_package_is_skipped_unless_it_is_ours(name: str, wrong: int) -> None:
    told = Told()

    def need(bench: Workbench) -> Iterator[Result]:
        __import__(name)
        yield Result("never")

    part, bench = Part("needing", need), Workbench(torch.device("cpu"), told.hear, Path())
    child._run_part(part, bench, told.hear)  # pyright: ignore[reportPrivateUsage]
    assert [(result.wrong, result.skipped) for result in told.results] == [(wrong, not wrong)]


def test_wrong_products_are_found() -> None:
    bench = workbench(Path())
    bench.operations = ops.SPECIFIED  # pyright: ignore[reportAttributeAccessIssue]
    linear = ops.SPECIFIED["linear"]
    ways = {"16 bits": linear, "8 bits": lambda x, matrix: linear(x * 1.03, matrix), "wrong": lambda x, _: -x}
    found = list(measure_rounding(bench, (16,), ways))
    assert [result.wrong for result in found] == [0, 0, 1] * 2
    assert all("differs by" in result.text for result in found[1::3])


def test_adapters_are_compared_and_timed(tmp_path: Path) -> None:
    told = run("adapters", tmp_path)
    check_results(told)
    assert told.text("tokens with adapters") == "as on the CPU"
    assert {"a step of 1 rows with adapters", "a prompt of 128 tokens with adapters"} <= {*told.names}
