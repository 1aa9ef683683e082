"""Servers of the same quantized files, side by side: a table in Markdown.

    python tests/bench/same_files.py [--llama TREE] [--vllm VENV] FILE... [--rounds N] [--options "--x 1"]
    python tests/bench/same_files.py --llama TREE FOLDER --make KIND...

Beside Facet a GGUF file is served by llama.cpp out of TREE, its source with `llama-server` built, and a
folder, of GPTQ or AWQ for instance, by vLLM out of VENV. The servers take turns in each round, and those that
are not measured are stopped. --make writes a checkpoint as GGUF files beside it, as FOLDER.Q4_0.gguf.
"""

import argparse
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import peers
import uvloop
import work
from servers import NAME, Server, Side

from server.bench.serve_benchmark import measure

_LONG = 1200
"""Tokens of the slot of llama.cpp for a prompt of 1,024: it has no others then."""


def make(tree: Path, folder: Path, kinds: list[str]) -> None:
    """Write a checkpoint as files of these kinds."""
    exact = Path(f"{folder}.BF16.gguf")
    if not exact.exists():
        script = [sys.executable, Path(__file__).with_name("gguf_of.py"), tree, folder, exact, "bf16"]
        subprocess.run(script, check=True)
    for kind in kinds:
        program = tree / peers.LLAMA_SERVER.parent / "llama-quantize"
        subprocess.run([program, exact, f"{folder}.{kind}.gguf", kind], check=True)


def facet(options: Sequence[str]) -> Side:
    def command(file: Path, model: work.Model, port: int) -> list[str]:
        program = [sys.executable, "-P", "-m", "server.main", str(file), "--served-model-name", NAME]
        sizes = ["--max-model-len", "1200", "--kv-cache-memory-bytes", f"{model.cache_mib}M"]
        return [*program, "--port", str(port), *sizes, *options]

    return Side("Facet", "", command)


def llama(tree: Path, slots: int, room: int, *options: str) -> Side:
    def command(file: Path, model: work.Model, port: int) -> list[str]:
        server = [tree / peers.LLAMA_SERVER, "--model", file, "--alias", NAME, "--port", port]
        sizes = ["--parallel", slots, "--ctx-size", slots * room, "--cache-ram", 0, "--threads", 2]
        return [str(word) for word in (*server, *sizes, *options)]

    return Side(f"llama.cpp, slots: {slots}", "", command, room=room)


def sides(file: Path, given: argparse.Namespace) -> list[Side]:
    """Facet, and the servers that can serve this file or folder."""
    found = [facet(given.options.split())]
    if file.is_dir() and given.vllm:
        found += [replace(side, room=1200) for side in peers.vllm(given.vllm) if side.name == "vLLM tuned"]
    if not file.is_dir() and given.llama:
        found += [llama(given.llama, 32, 384, "--no-kv-unified"), llama(given.llama, 1, _LONG)]
    return found


def able(side: Side, case: work.Case) -> bool:
    """Whether a side is measured with this work; llama.cpp has a server of its own for a long prompt."""
    return side.room >= case.tokens and (side.room != _LONG or case.tokens > 384 or "llama" not in side.name)


def compare(file: Path, given: argparse.Namespace) -> None:
    """Measure all with one file, and print the rows of the table: medians of the rounds."""
    with ExitStack() as stack:
        servers: list[Server] = []
        for side in sides(file, given):
            servers.append(server := Server(side, file, work.Model(file.stem)))
            stack.callback(server.close)
            server.wait_ready()
            server.first_answer()
            server.pause()
        for case in work.generation(quick=False):
            if given.at_once and case.concurrency not in given.at_once:
                continue
            found: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for round in range(given.rounds):
                for server in servers:
                    if able(server.side, case):
                        server.resume()
                        [figures] = uvloop.run(measure(case.options(server.url, round, quick=False))).points
                        server.pause()
                        if figures.failed or not figures.output_tokens_per_second:
                            raise SystemExit(f"{server.side.name}: {figures.failed} requests failed")
                        first = figures.ttft.median if figures.ttft else 0.0
                        found[server.side.name].append((figures.output_tokens_per_second, first))
            ours = found["Facet"]
            for name, theirs in found.items():
                print(_row(file, case, name, ours, theirs), flush=True)


def _row(
    file: Path, case: work.Case, name: str, ours: list[tuple[float, float]], theirs: list[tuple[float, float]]
) -> str:
    rate, first = (statistics.median(each) for each in zip(*theirs, strict=True))
    pairs = [(a / b, c / d) for (a, c), (b, d) in zip(ours, theirs, strict=True)]
    gain, sooner = (statistics.median(each) for each in zip(*pairs, strict=True))
    return f"| {file.name} | {case.title} | {name} | {rate:.1f} | {gain:.2f} | {first:.0f} | {sooner:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Servers of the same quantized files.")
    parser.add_argument("places", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--llama", type=Path, metavar="TREE")
    parser.add_argument("--vllm", type=Path, metavar="VENV")
    parser.add_argument("--make", nargs="+", metavar="KIND")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--at-once", type=int, nargs="+", help="leave out work with other numbers at once")
    parser.add_argument("--options", default="", help="more options for Facet, in one word")
    given = parser.parse_args()
    if given.make:
        make(given.llama, given.places[0], given.make)
        return
    print("| file | work | server | tokens/s | Facet/it | first token, ms | Facet/it |")
    print("|---|---|---|---:|---:|---:|---:|")
    for file in given.places:
        compare(file, given)


if __name__ == "__main__":
    main()
