"""Facet's server and llama.cpp on the same GGUF file, side by side: a table in Markdown.

    python tests/bench/same_gguf.py VENV FILE... [--read N] [--written N] [--rounds N]
    python tests/bench/same_gguf.py VENV FOLDER --make TREE KIND...

VENV is an environment with llama-cpp-python. llama.cpp is measured within its process (`llama_batches.py`),
without HTTP, a scheduler or a sampler, which favours it. The two take turns in each round, and the one that
is not measured is stopped; the best of all rounds counts. --make writes a checkpoint as files beside it, as
FOLDER.Q4_0.gguf, by the converter in TREE, which is llama.cpp's source.
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import uvloop
import work
from servers import NAME, Server, Side

from server.bench.serve_benchmark import measure

HERE = Path(__file__).parent
_AT_ONCE = (1, 8, 32)
_CORES = os.cpu_count() or 1
_KINDS = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15}
"""llama.cpp's numbers of kinds of files."""
_QUANTIZE = """
import sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = int(sys.argv[3])
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


def make(python: Path, folder: Path, tree: Path, kinds: list[str]) -> None:
    """Write a checkpoint as files of these kinds."""
    exact = Path(f"{folder}.BF16.gguf")
    if not exact.exists():
        script = [sys.executable, HERE / "gguf_of.py", tree, folder, exact, "bf16"]
        subprocess.run(script, check=True)
    for kind in kinds:
        words = [exact, f"{folder}.{kind}.gguf", str(_KINDS[kind])]
        subprocess.run([python, "-c", _QUANTIZE, *words], check=True)


class Peer:
    """llama.cpp with a file, stopped while it is not asked."""

    def __init__(self, python: Path, file: Path) -> None:
        self._process = subprocess.Popen(
            [python, HERE / "llama_batches.py", file],
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer()
        self._process.send_signal(signal.SIGSTOP)

    def speed(self, at_once: int, read: int, written: int) -> float:
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{at_once} {read} {written} {_CORES}\n")
        found = float(self._answer())
        self._process.send_signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"llama.cpp ended with {self._process.wait()}")
        return line


def facet(most: int) -> Side:
    def command(file: Path, model: work.Model, port: int) -> list[str]:
        program = [sys.executable, "-P", "-m", "server.main", str(file), "--served-model-name", NAME]
        sizes = ["--max-model-len", str(most), "--kv-cache-memory-bytes", f"{model.cache_mib}M"]
        return [*program, "--port", str(port), *sizes]

    return Side("Facet", "", command)


def compare(python: Path, file: Path, given: argparse.Namespace) -> list[str]:
    """Measure both with one file; returns the rows of the table."""
    rows: dict[int, list[tuple[float, float]]] = {at_once: [] for at_once in _AT_ONCE}
    lengths = {"random_input_len": given.read, "random_output_len": given.written}
    server, peer = Server(facet(given.read + given.written + 16), file, work.Model(file.stem)), None
    try:
        server.wait_ready()
        server.first_answer()
        server.pause()
        peer = Peer(python, file)
        for round in range(given.rounds):
            for at_once in _AT_ONCE:
                case = work.Case("", at_once, {**lengths, "num_prompts": at_once})
                server.resume()
                [figures] = uvloop.run(measure(case.options(server.url, round, quick=False))).points
                server.pause()
                if figures.failed or not figures.output_tokens_per_second:
                    raise SystemExit(f"{figures.failed} requests failed")
                theirs = peer.speed(at_once, given.read, given.written)
                rows[at_once].append((figures.output_tokens_per_second, theirs))
    finally:
        server.close()
        if peer is not None:
            peer.close()
    return [_row(file, at_once, found) for at_once, found in rows.items()]


def _row(file: Path, at_once: int, found: list[tuple[float, float]]) -> str:
    """The best of each: whoever else is at work on the machine slows llama.cpp's threads more, which spin."""
    ours, theirs = (max(each) for each in zip(*found, strict=True))
    return f"| {file.stem} | {at_once} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Facet and llama.cpp on the same GGUF file.")
    parser.add_argument("venv", type=Path)
    parser.add_argument("places", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--make", nargs="+", metavar=("TREE", "KIND"))
    parser.add_argument("--read", type=int, default=32)
    parser.add_argument("--written", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    python = given.venv / "bin" / "python"
    if given.make:
        make(python, given.places[0], Path(given.make[0]), given.make[1:])
        return
    print("| file | at once | Facet, tokens/s | llama.cpp | ratio |", "|---|---:|---:|---:|---:|", sep="\n")
    for file in given.places:
        print(*compare(python, file, given), sep="\n", flush=True)


if __name__ == "__main__":
    main()
