"""Measures Facet beside faster-whisper and whisper.cpp, with Whisper in real shapes and random weights.

    PYTHONPATH=. python tests/bench/speech.py PEERS [--folder FOLDER] [--only tiny-float32 small-int8]
        [--tokens 100] [--rounds 3]

PEERS: the python of an environment with faster-whisper and pywhispercpp. Recordings are noise of 30 s, of
which each side writes as many tokens, greedily and without a second try. All sides are loaded, and take turns
within each round; ratios are taken within a round. "8 at once" are eight recordings that are read together.
Checkpoints and what is converted of them stay in FOLDER for the next time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CASES = {
    "tiny-float32": ("tiny", "float32", ("faster-whisper", "whisper.cpp")),
    "small-int8": ("small", "int8", ("faster-whisper",)),
    "small-int8-dynamic": ("small", "int8-dynamic", ("faster-whisper",)),
    "small-bfloat16": ("small", "bfloat16", ("faster-whisper",)),
}
"""Case -> shape, what Facet computes with, peers. faster-whisper has one int8, whose inputs are rounded too;
whisper.cpp has matrices in float16, since its convolutions have no other form."""
AT_ONCE = 8


class Side:
    """A process of tests/bench/speech_sides.py."""

    def __init__(self, python: str, name: str, path: Path, kind: str) -> None:
        self.name = name
        program = [python, str(HERE / "speech_sides.py"), name, str(path), kind]
        with open(f"{path}.{name}.log", "wb") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            self._process = subprocess.Popen(program, text=True, bufsize=1, **pipes)

    def seconds(self, count: int, tokens: int) -> float:
        assert self._process.stdin and self._process.stdout
        print(json.dumps([count, tokens]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended; its log lies beside its model")
        seconds, written = json.loads(answer)
        if set(written) != {tokens}:
            raise SystemExit(f"{self.name} has written {written} tokens, not {tokens}")
        return seconds

    def close(self) -> None:
        self._process.communicate()


def prepared(python: str, shape: str, kind: str, folder: Path, side: str) -> Path:
    """The model in the form of a side, which is made if it is not there."""
    plain, ggml = folder / shape, folder / f"{shape}.ggml"
    converted = folder / f"{shape}-{kind}"
    if not (plain / "tokenizer_config.json").exists():
        from speech_checkpoints import make

        make(shape, plain)
    if side == "whisper.cpp" and not ggml.exists():
        from speech_checkpoints import write_ggml

        write_ggml(plain, ggml)
    if side == "faster-whisper" and not converted.exists():
        packages = "import sysconfig; print(sysconfig.get_path('purelib'))"
        found = subprocess.run([python, "-c", packages], capture_output=True, text=True, check=True)
        from speech_checkpoints import convert

        convert(plain, converted, kind, found.stdout.strip())
    return {"whisper.cpp": ggml, "faster-whisper": converted}.get(side, plain)


def spread(values: Iterable[float]) -> str:
    values = list(values)
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def measure(case: str, given: argparse.Namespace, folder: Path) -> None:
    shape, kind, peers = CASES[case]
    with ExitStack() as stack:
        sides = list[Side]()
        for name in ("facet", *peers):
            form = kind if name == "facet" or kind == "float32" else "int8"
            path = prepared(given.peers, shape, form, folder, name)
            sides.append(Side(sys.executable if name == "facet" else given.peers, name, path, form))
            stack.callback(sides[-1].close)
        for side in sides:
            side.seconds(1, 4)  # what comes first is slower
        rounds = [{side.name: side.seconds(1, given.tokens) for side in sides} for _ in range(given.rounds)]
        together = [sides[0].seconds(AT_ONCE, given.tokens) for _ in range(given.rounds)]
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{case}: 30 s of noise, {given.tokens} tokens, {os.cpu_count()} cores, load {load}")
    for name in rounds[0]:
        print(f"  {name:15} {spread(each[name] for each in rounds)} s", end="")
        beside = "" if name == "facet" else spread(each[name] / each["facet"] for each in rounds)
        print(f", facet's {beside} times" if beside else "")
    alone = statistics.median(each["facet"] for each in rounds)
    times = spread(each / alone for each in together)
    print(f"  facet, {AT_ONCE} at once {spread(together)} s, {times} times one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=["tiny-float32", "small-int8"])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for case in given.only:
            measure(case, given, folder)


if __name__ == "__main__":
    main()
