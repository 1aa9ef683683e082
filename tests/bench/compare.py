"""Measures Facet and other servers on the same work, side by side; `make compare` writes docs/performance.md.

    python tests/bench/compare.py [--only PART ...] [--models MODEL ...] [--without SIDE ...] [--rounds N]

All servers of a model are up at the same time, and take turns within each round while the others are
stopped, so that a slow minute of the machine is a slow minute for all; ratios are taken within a round. What
one call has measured is kept beside the checkpoints, and the next adds to it: the parts may be measured one
by one.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import page
import peers
import texts
import uvloop
import work
from floor import ABOUT, NAME, Floor, Shape
from servers import DidNotStart, Server, Side, cpu_seconds, resident_mib, tree

from server.bench.load_generator import Figures
from server.bench.serve_benchmark import measure

HERE = Path(__file__).parent
IDLE_SECONDS = 10.0
FLOORED = ("generation", "embeddings")
_NO_SERVERS = {
    NAME: ABOUT,
    "sentence-transformers": f"{version('sentence-transformers')}, in a process without a server",
}

Record = dict[str, Any]


class Comparison:
    def __init__(self, given: argparse.Namespace, sides: Sequence[Side]) -> None:
        self._given = given
        self._sides = sides
        self._folder: Path = given.folder
        self.records: list[Record] = []
        self.machine: Record = {}
        """The best figure of each metric."""

    def run(self, part: str) -> None:
        measure = {"startup": self._time_starts, "memory": self._weigh}.get(part)
        for model in self.models(part):
            if measure is None:
                self._load(part, model)
            else:
                measure(model)

    def models(self, part: str) -> list[work.Model]:
        return [model for model in work.models(part) if model.name in (self._given.models or [model.name])]

    def _load(self, part: str, model: work.Model) -> None:
        cases = work.CASES[part](self._given.quick)
        with ExitStack() as stack:
            servers = self._start_all(stack, part, model)
            for server in servers:
                server.pause()
            for round in range(self._given.rounds):
                if part in FLOORED:
                    self._lay_floor(part, model, cases, round)
                for case in cases:
                    able = [server for server in servers if server.side.room >= case.tokens]
                    for server in _rotated(able, round):
                        server.resume()
                        self._measure(part, model, case, server, round)
                        server.pause()
        if part == "embeddings":
            self._in_process(model, cases)

    def _lay_floor(self, part: str, model: work.Model, cases: Sequence[work.Case], round: int) -> None:
        """The rates that the machine reaches at this moment."""
        machine = _machine()
        self.machine = _best(machine, self.machine)
        floor = Floor(Shape.read(self._checkpoint(model.name)), model, machine)
        for case in cases:
            self._keep(part, model, case.title, NAME, round, floor.values(case))

    def _measure(self, part: str, model: work.Model, case: work.Case, server: Server, round: int) -> None:
        file = self._texts(model, *case.texts) if case.texts else None
        options = case.options(server.url, round, quick=self._given.quick, file=file)
        http = server.http_pid
        before = cpu_seconds(http), cpu_seconds(os.getpid())
        [figures] = uvloop.run(measure(options)).points
        spent = cpu_seconds(http) - before[0]
        loader = cpu_seconds(os.getpid()) - before[1]
        self._keep(part, model, case.title, server.side.name, round, _values(figures, spent, loader))

    def _in_process(self, model: work.Model, cases: Sequence[work.Case]) -> None:
        """Measures sentence-transformers in its own process, without a server."""
        for case in cases:
            if case.texts is None or case.texts[1] == 1:
                continue
            script = [sys.executable, str(HERE / "texts.py"), str(self._checkpoint(model.name))]
            given = [model.dtype, str(case.texts[0])]
            for round in range(self._given.rounds):
                done = subprocess.run([*script, *given], capture_output=True, text=True, check=False)
                if done.returncode == 0:
                    values = {"inputs_per_second": float(done.stdout.split()[-1])}
                    self._keep("embeddings", model, case.title, "sentence-transformers", round, values)

    def _time_starts(self, model: work.Model) -> None:
        for round in range(self._given.rounds):
            for side in _rotated(self._taking("startup"), round):
                with ExitStack() as stack:
                    if server := self._start(stack, "startup", model, side):
                        values = {"ready_s": server.ready_s, "first_s": server.first_answer()}
                        self._keep("startup", model, "start", side.name, round, values)

    def _weigh(self, model: work.Model) -> None:
        """Measures memory, once for each side, for it does not depend on who else runs.

        Some fill their KV cache when they start and others as it is used, so what it takes of the memory is
        learned from two sizes of it.
        """
        weights = weight_bytes(self._checkpoint(model.name)) / (1 << 20)
        for side in self._taking("memory"):
            half = self._at_rest(replace(model, cache_mib=model.cache_mib // 2), side)
            if half and (values := self._at_rest(model, side)):
                values["beyond_mib"] = 2 * half["all_mib"] - values["all_mib"] - weights
                self._keep("memory", model, "idle", side.name, 0, values)

    def _at_rest(self, model: work.Model, side: Side) -> dict[str, float] | None:
        with ExitStack() as stack:
            server = self._start(stack, "memory", model, side)
            if server is None:
                return None
            server.first_answer()
            time.sleep(2)  # what a start leaves to do is no idling
            pids = tree(server.pid)
            before = cpu_seconds(*pids)
            time.sleep(IDLE_SECONDS)
            share = (cpu_seconds(*pids) - before) / IDLE_SECONDS
            return {
                "api_mib": resident_mib(server.http_pid),
                "all_mib": resident_mib(*pids),
                "processes": len(pids),
                "idle_percent": 100 * share,
            }

    def _taking(self, part: str) -> list[Side]:
        return [side for side in self._sides if part in side.parts]

    def _start_all(self, stack: ExitStack, part: str, model: work.Model) -> list[Server]:
        started = (self._start(stack, part, model, side) for side in self._taking(part))
        return [server for server in started if server is not None]

    def _start(self, stack: ExitStack, part: str, model: work.Model, side: Side) -> Server | None:
        """The running side, or None if it does not start, which is a result too."""
        try:
            server = Server(side, self._checkpoint(model.name), model)
            stack.callback(server.close)
            server.wait_ready()
        except DidNotStart as failure:
            self._keep(part, model, "start", side.name, 0, {"failure": str(failure)})
            return None
        print(f"{side.name} serves {model.title} after {server.ready_s:.1f} s", flush=True)
        return server

    def _checkpoint(self, name: str) -> Path:
        folder = self._folder / name
        if not folder.exists():
            print(f"making the checkpoint {name}", flush=True)
            half = folder.with_suffix(".part")  # so that a folder of its name is a whole one
            subprocess.run([sys.executable, str(HERE / "checkpoints.py"), name, str(half)], check=True)
            half.rename(folder)
        return folder

    def _texts(self, model: work.Model, tokens: int, batch: int) -> Path:
        file = self._folder / f"{model.name}-{tokens}-{batch}.jsonl"
        if not file.exists():
            texts.write(file, self._checkpoint(model.name), tokens, batch)
        return file

    def _keep(
        self, part: str, model: work.Model, case: str, side: str, round: int, values: Mapping[str, object]
    ) -> None:
        record = {"part": part, "model": model.title, "case": case, "side": side, "round": round, **values}
        self.records.append(record)
        shown = ", ".join(f"{k} {v:.4g}" for k, v in values.items() if isinstance(v, float))
        print(f"{model.title}: {case}: {side}: {shown or values}", flush=True)


def _values(figures: Figures, api_seconds: float, loader_seconds: float) -> dict[str, object]:
    values: dict[str, object] = {
        "concurrency": figures.concurrency,
        "failed": figures.failed,
        "requests_per_second": figures.requests_per_second,
        "inputs_per_second": figures.inputs_per_second,
        "output_tokens_per_second": figures.output_tokens_per_second,
        "ttft_ms": figures.ttft and figures.ttft.median,
        "tpot_ms": figures.tpot and figures.tpot.median,
        "e2el_ms": figures.e2el and figures.e2el.median,
    }
    if tokens := figures.output_tokens:
        values["api_us_per_token"] = 1e6 * api_seconds / tokens
        values["loader_us_per_token"] = 1e6 * loader_seconds / tokens
    return values


def _rotated(items: Sequence[Any], by: int) -> list[Any]:
    """The order of the sides in a round: another one is first in each."""
    at = by % len(items) if items else 0
    return [*items[at:], *items[:at]]


def _machine() -> Record:
    env = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}  # torch then asks for huge pages, as we do
    script = [sys.executable, str(HERE / "machine.py")]
    return json.loads(subprocess.run(script, capture_output=True, text=True, check=True, env=env).stdout)


def _best(now: Record, before: Record) -> Record:
    """Others may have been at work while it was measured: its best is what counts."""
    return {k: max(v, before.get(k, v)) if isinstance(v, float) else v for k, v in now.items()}


def _sides(given: argparse.Namespace) -> list[Side]:
    sides = peers.ours(given.facet_options.split())
    for make, describe, folder in (
        (peers.make_vllm, peers.vllm, given.peer_venv),
        (peers.make_llama, peers.llama, given.peer_llama),
        (peers.make_infinity, peers.infinity, given.peer_infinity),
    ):
        if folder is None or given.alone:
            continue
        try:
            make(folder)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{folder.name} cannot be made here, and is left out: {error}", flush=True)
        else:
            sides += describe(folder)
    return [side for side in sides if side.name not in given.without]


def main() -> None:
    given = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through all that must be closed
    given.folder.mkdir(parents=True, exist_ok=True)
    sides = _sides(given)
    kept = given.folder / ("quick.json" if given.quick else "compare.json")
    known: Record = json.loads(kept.read_text()) if kept.exists() else {"records": []}
    comparison = Comparison(given, sides)
    for part in given.only or work.PARTS:
        comparison.run(part)
        anew = {model.title for model in comparison.models(part)}
        known["records"] = [r for r in known["records"] if r["part"] != part or r["model"] not in anew]
        known["records"] += [r for r in comparison.records if r["part"] == part]
        known["machine"] = _best(comparison.machine or _machine(), known.get("machine", {}))
        known["date"] = datetime.now(UTC).date().isoformat()
        known["sides"] = known.get("sides", {}) | {side.name: side.about for side in sides} | _NO_SERVERS
        kept.write_text(json.dumps(known, indent=1))
    target = given.folder / "quick.md" if given.quick else HERE.parents[1] / "docs" / "performance.md"
    page.write(target, known)
    print(f"wrote {target.name}")


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _arguments() -> argparse.Namespace:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "facet" / "compare"
    parser = argparse.ArgumentParser(description="We and others on the same work.")
    parser.add_argument("--only", nargs="+", choices=work.PARTS, metavar="PART", help=", ".join(work.PARTS))
    parser.add_argument(
        "--models", nargs="+", choices=work.MODELS, metavar="MODEL", help=", ".join(work.MODELS)
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a trial of a few minutes, not for the docs")
    parser.add_argument("--folder", type=Path, default=cache, help="for checkpoints and results")
    parser.add_argument("--alone", action="store_true", help="measure ourselves only")
    parser.add_argument("--without", nargs="+", default=[], metavar="SIDE", help="sides to leave out")
    parser.add_argument("--peer-venv", type=Path, help="of vLLM; made if it is not there")
    parser.add_argument("--peer-llama", type=Path, help="llama.cpp's source; fetched and built if it is not")
    parser.add_argument("--peer-infinity", type=Path, help="a venv of Infinity; made if it is not there")
    parser.add_argument("--facet-options", default="", help="more options of ours, as one word")
    given = parser.parse_args()
    given.peer_venv = given.peer_venv or given.folder / "venv"
    return given


if __name__ == "__main__":
    main()
