"""The engine in this process, without HTTP: prefill, decode steps, embeddings.

python tests/bench/offline.py [MODEL] [--embed] [options] [serve options]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
from programs import run_program

from server.bench.serve_options import BenchError, write_result
from server.model_facts import GENERATE
from server.offline.llm import LLM
from server.options.option_parsing import flatten
from server.options.parse_server_options import parse
from server.requests.sampling_params import SamplingParams
from server.terminal.console import check_folder, parser_of
from worker import logs


class GenerationSpeed(msgspec.Struct, frozen=True):
    concurrency: int
    input_len: int
    output_len: int
    prefill_tokens_per_second: float
    step_ms: float
    """Milliseconds of one decode step, on average."""
    output_tokens_per_second: float
    """While decoding."""

    def __str__(self) -> str:
        return (
            f"{self.concurrency:4} at once: prefill {self.prefill_tokens_per_second:8.0f} tokens/s, "
            f"step {self.step_ms:7.2f} ms, output {self.output_tokens_per_second:8.1f} tokens/s"
        )


class EmbeddingSpeed(msgspec.Struct, frozen=True):
    batch: int
    input_len: int
    inputs_per_second: float
    tokens_per_second: float

    def __str__(self) -> str:
        return (
            f"{self.batch:4} texts of {self.input_len}: {self.inputs_per_second:8.1f} inputs/s, "
            f"{self.tokens_per_second:8.0f} tokens/s"
        )


def run(arguments: Sequence[str], command: str) -> int:
    given, serve_options = _parser(command).parse_known_args(arguments)
    _check(given)
    with _open(given.model, _llm_options(serve_options, command)) as llm:
        _check_model(llm, given)
        measure = _embedding_speed if given.embed else _generation_speed
        dice = random.Random(given.seed)
        rows: list[GenerationSpeed | EmbeddingSpeed] = []
        for count in given.batch:
            texts = [
                [dice.randrange(llm.facts.vocab_size) for _ in range(given.input_len)] for _ in range(count)
            ]
            rows.append(measure(llm, texts, given))
            print(rows[-1], flush=True)
    write_result(given.output, {"model": given.model, "rows": rows})
    return 0


def _generation_speed(llm: LLM, texts: list[list[int]], given: argparse.Namespace) -> GenerationSpeed:
    def generate(tokens: int, runs: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return _seconds(lambda: llm.generate(texts, params, use_tqdm=False), runs)

    count, steps = len(texts), given.output_len - 1
    generate(2, 1)
    prefill = generate(1, given.runs)
    decode = generate(given.output_len, given.runs) - prefill
    if decode <= 0:
        raise BenchError("this machine is too busy to be measured: stop what else runs, or raise --runs")
    return GenerationSpeed(
        concurrency=count,
        input_len=given.input_len,
        output_len=given.output_len,
        prefill_tokens_per_second=count * given.input_len / prefill,
        step_ms=1000 * decode / steps,
        output_tokens_per_second=count * steps / decode,
    )


def _embedding_speed(llm: LLM, texts: list[list[int]], given: argparse.Namespace) -> EmbeddingSpeed:
    def embed() -> object:
        return llm.embed(texts, use_tqdm=False)

    _seconds(embed, 1)
    rate = len(texts) / _seconds(embed, given.runs)
    return EmbeddingSpeed(len(texts), given.input_len, rate, rate * given.input_len)


def _seconds(work: Callable[[], object], runs: int) -> float:
    """The seconds of the shortest of several runs: other work on the machine only makes runs longer."""
    times: list[float] = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _check(given: argparse.Namespace) -> None:
    if given.output_len < 2 or given.input_len < 1 or given.runs < 1 or min(given.batch) < 1:
        raise BenchError("--output-len must be at least 2, and --input-len, --runs and --batch at least 1")
    check_folder("--output", given.output)


def _open(model: str, options: dict[str, object]) -> LLM:
    try:
        return LLM(model, **options)
    except (ValueError, OSError) as error:  # which are those that explain themselves
        raise BenchError(logs.one_line(error)) from error


def _check_model(llm: LLM, given: argparse.Namespace) -> None:
    tokens, most = given.input_len + (0 if given.embed else given.output_len), llm.facts.max_model_len
    if tokens > most:
        lengths = "--input-len" if given.embed else "--input-len and --output-len together"
        raise BenchError(f"{lengths} may be {most} tokens here, as --max-model-len, not {tokens}")
    if not given.embed and GENERATE not in llm.facts.tasks:
        raise BenchError(f"this model does not generate; it does {', '.join(llm.facts.tasks)}: try --embed")


def _llm_options(serve_options: Sequence[str], command: str) -> dict[str, object]:
    """The given options, without a prefix cache, which would make every run but the first too short."""
    given = flatten(parse(["--no-enable-prefix-caching", *serve_options], {}, command=command))
    plain = flatten(parse([], {}))
    return {name: value for name, value in given.items() if name != "model" and value != plain[name]}


def _parser(command: str) -> argparse.ArgumentParser:
    usage = "[MODEL] [--embed] [options] [serve options]"
    parser = parser_of(command, "Measure the engine in this process.", usage)
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL", help="Folder or hub id.")
    parser.add_argument("--embed", action="store_true", help="Vectors in place of texts.")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="Texts at once (1 8 32)."
    )
    parser.add_argument("--input-len", type=int, default=256, metavar="N", help="Tokens of a text (256).")
    parser.add_argument("--output-len", type=int, default=33, metavar="N", help="Tokens of an answer (33).")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="How often; the best counts (3).")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Of the random texts.")
    parser.add_argument("--output", metavar="FILE", help="File for the result as JSON.")
    return parser


if __name__ == "__main__":
    sys.exit(run_program(run, "offline.py"))
