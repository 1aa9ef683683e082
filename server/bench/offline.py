"""`facet bench offline`: the engine in this process, without HTTP: prefill, decode steps, embeddings."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from server.bench.serve_options import BenchError, check_folder, write_result
from server.offline.llm import LLM
from server.options.option_table import Parser, flatten
from server.options.server_options import parse
from server.requests.sampling import SamplingParams
from server.task_names import GENERATE
from worker import logs


class Generation(msgspec.Struct, frozen=True):
    concurrency: int
    input_len: int
    output_len: int
    prefill_tokens_per_second: float
    step_ms: float
    """Milliseconds of one decode step, on average."""
    output_tokens_per_second: float
    """While decoding."""


class Embeddings(msgspec.Struct, frozen=True):
    batch: int
    input_len: int
    inputs_per_second: float
    tokens_per_second: float


def run(arguments: Sequence[str], command: str) -> int:
    given, serve_options = _parser(command).parse_known_args(arguments)
    _check(given)
    with _open(given.model, _llm_options(serve_options, command)) as llm:
        _check_model(llm, given)
        measure = embeddings(llm, given) if given.embed else generation(llm, given)
        rows: list[Generation | Embeddings] = []
        for row in measure:
            rows.append(row)
            print(_line(row), flush=True)
    write_result(given.output, {"model": given.model, "rows": rows})
    return 0


def generation(llm: LLM, given: argparse.Namespace) -> Iterator[Generation]:
    dice = random.Random(given.seed)

    def generate(prompts: list[list[int]], tokens: int) -> Callable[[], object]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return lambda: llm.generate(prompts, params, use_tqdm=False)

    for count in given.batch:
        texts = [_ids(dice, llm, given.input_len) for _ in range(count)]
        _seconds(generate(texts, 2), 1)
        prefill = _seconds(generate(texts, 1), given.runs)
        steps = given.output_len - 1
        decode = _seconds(generate(texts, given.output_len), given.runs) - prefill
        if decode <= 0:
            raise BenchError("this machine is too busy to be measured: stop what else runs, or raise --runs")
        yield Generation(
            concurrency=count,
            input_len=given.input_len,
            output_len=given.output_len,
            prefill_tokens_per_second=count * given.input_len / prefill,
            step_ms=1000 * decode / steps,
            output_tokens_per_second=count * steps / decode,
        )


def embeddings(llm: LLM, given: argparse.Namespace) -> Iterator[Embeddings]:
    dice = random.Random(given.seed)
    for count in given.batch:
        texts = [_ids(dice, llm, given.input_len) for _ in range(count)]

        def embed(texts: list[list[int]] = texts) -> object:
            return llm.embed(texts, use_tqdm=False)

        _seconds(embed, 1)
        rate = count / _seconds(embed, given.runs)
        yield Embeddings(count, given.input_len, rate, rate * given.input_len)


def _seconds(work: Callable[[], object], runs: int) -> float:
    """The seconds of the shortest of several runs: other work on the machine only makes runs longer."""
    times: list[float] = []
    for _ in range(runs):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _ids(dice: random.Random, llm: LLM, count: int) -> list[int]:
    return [dice.randrange(llm.facts.vocab_size) for _ in range(count)]


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


def _line(row: Generation | Embeddings) -> str:
    if isinstance(row, Embeddings):
        return (
            f"{row.batch:4} texts of {row.input_len}: {row.inputs_per_second:8.1f} inputs/s, "
            f"{row.tokens_per_second:8.0f} tokens/s"
        )
    return (
        f"{row.concurrency:4} at once: prefill {row.prefill_tokens_per_second:8.0f} tokens/s, "
        f"step {row.step_ms:7.2f} ms, output {row.output_tokens_per_second:8.1f} tokens/s"
    )


def _parser(command: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=command,
        usage=f"{command} [MODEL] [--embed] [options] [serve options]",
        description="Measure the engine in this process.",
        allow_abbrev=False,
    )
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
