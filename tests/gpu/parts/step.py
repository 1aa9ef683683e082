"""Whole steps: as graphs and as they come, planned ahead, in chunks, and beside float32."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from dummy import DRAWN, GREEDY, PROMPTS, SINGLE_TOKENS, Dummy, measure_idle_share, opened
from kernel_profile import measure_kernels
from results import Result
from scheduled import Loop
from shapes import Shape, shallow
from torch import Tensor
from workbench import Part, Workbench

from engine_core.protocol import AddRequest
from worker.protocol import NewSeq, Sampling, SeqStep

REPORTED = Sampling(max_tokens=10_000, temperature=1.1, top_k=50, seed=2, logprobs=2, presence_penalty=0.5)
KINDS = {"from form to token": [GREEDY, DRAWN, DRAWN], "up to the logits": [GREEDY, DRAWN, REPORTED]}
ALL_LOGPROBS = Sampling(max_tokens=9, temperature=0, logprobs=-1)
_STEPS, _LONG = 200, 20_000
_MODELLED = {("0.6B", 1): "0.78 by the model, of which 0.50 are bytes and launches"}
"""What docs/cuda.md expects of joined kernels."""
_NEAR, _FAR = 0.03, 0.05
"""How far logprobs may be apart, by their norm: from those of other chunks, and from those in float32."""


class Eager:
    """A stand-in for the capture of graphs: each replay computes anew, and puts results in their place."""

    def __init__(self, target: torch.device) -> None:
        """Like `CudaCapture`."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Like `CudaCapture`."""

    def __call__(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        result = work()

        def replay() -> None:
            for old, new in zip(result, work(), strict=True):
                old.copy_(new)

        return result, replay

    def seconds(self, replay: Callable[[], None]) -> float:
        """Like `CudaCapture`: what is chosen by it is set beside."""
        return 0.0


def joining(bench: Workbench, joins: bool) -> Any:
    """Let steps of few rows be graphs of joined kernels, or of single ones, whichever are faster."""
    if not bench.on_card:
        return patch.dict(sys.modules)
    from worker.kernels.cuda.steps.graph_capture import Recorder

    return patch.object(Recorder, "compare", lambda self, one, other: (joins, (0.0, 0.0)))


def no_graphs(bench: Workbench) -> Any:
    """Let workers compute what graphs would."""
    if not bench.on_card:
        return patch.dict(sys.modules)
    from worker.kernels.cuda.steps import graph_capture

    return patch.object(graph_capture, "CudaCapture", Eager)


def compare_graphs(bench: Workbench) -> Iterator[Result]:
    """Steps of three rows, in graphs and computed anew: the same bits, of joined kernels and single ones."""
    steps = bench.size(_STEPS, 4)
    for joins, (name, rows) in enumerate(KINDS.items()):
        with joining(bench, bool(joins)):
            replayed, caches, made = _run(bench, rows, steps)
            with no_graphs(bench):
                anew, others, _ = _run(bench, rows, steps)
        differ = sum(one != other for one, other in zip(replayed, anew, strict=True))
        differ += sum(not torch.equal(one, other) for one, other in zip(caches, others, strict=True))
        text = f"{differ} steps or caches differ" if differ else "the same bits"
        yield Result(f"graphs {name}, {_STEPS} steps", text, wrong=differ)
        yield made


def compare_joined(bench: Workbench) -> Iterator[Result]:
    """Steps by joined kernels beside those by single ones: equal greedy tokens in float32, and the times."""
    steps = bench.size(_STEPS, 2)
    for rows in bench.some((1, 4)):
        told: list[list[Any]] = []
        for joins in (True, False):
            with joining(bench, joins):
                told.append(_run(bench, [GREEDY] * rows, steps, dtype="float32")[0])
        pairs = enumerate(zip(*told, strict=True))
        first = next((number for number, (one, other) in pairs if one != other), None)
        text = "equal tokens" if first is None else f"other tokens from step {first} on"
        yield Result(f"joined kernels, {rows} rows, {_STEPS} steps", text, wrong=int(first is not None))
    for name, rows in bench.some((("0.6B", 1), ("0.6B", 4), ("0.6B", 8), ("8B", 1))):
        shape = bench.shape(name)
        for joins in bench.some((True, False)):
            with (
                joining(bench, joins),
                opened(bench, shape, rows=rows, longest=bench.size(1024, 300)) as dummy,
            ):
                dummy.make_graphs()
                dummy.decode(rows, bench.tokens(512), bench.size(20, 2), GREEDY)
                seconds = dummy.replayed_seconds(rows)
            way = "joined" if joins else "single"
            expected = _MODELLED.get((name, rows), "") if joins else ""
            yield Result(f"{name} step of {rows} rows by {way} kernels", expected, 1e3 * (seconds or 0), "ms")


def _run(
    bench: Workbench, rows: list[Sampling], steps: int, **options: Any
) -> tuple[list[Any], list[Tensor], Result]:
    """The outputs of decoding steps, the cache at the end, and which graphs were made."""
    length, longest = 20, 20 + steps + 65
    with opened(bench, bench.shape("0.6B"), rows=len(rows), longest=longest, **options) as dummy:
        started = time.perf_counter()
        made = dummy.make_graphs(whole_only=False)
        took = time.perf_counter() - started
        shown = ", ".join(f"{count} {kind}" for kind, count in made.items()) or "none"
        result = Result("graphs made when idle", shown, took, "s", wrong=_missing(bench, made[SINGLE_TOKENS]))
        dummy.clear()
        for slot, params in enumerate(rows):
            dummy.prefill(slot, [5] * length, steps + 1, params)
        outputs: list[Any] = []
        for step in range(steps):
            seqs = [SeqStep(slot, length + step, 1, [], True, step + 1) for slot in range(len(rows))]
            output = dummy.run(seqs, [])
            outputs.append((output.tokens, output.logprobs))
        return outputs, [layer.bound().clone() for layer in dummy.layers()], result


def _missing(bench: Workbench, graphs: int) -> int:
    """Whether graphs are missing that a card makes."""
    return int(bench.on_card and not graphs)


def compare_prompts(bench: Workbench) -> Iterator[Result]:
    """A short prompt alone: in a graph, by the same work anew, and as it comes."""
    length = 128
    replayed = _run_prompt(bench, length)
    with no_graphs(bench):
        anew = _run_prompt(bench, length)
    as_it_comes = _run_prompt(bench, length, enforce_eager=True)
    differ = sum(not torch.equal(one, other) for one, other in zip(replayed.bits, anew.bits, strict=True))
    name = f"graphs of a prompt of {length}"
    if _missing(bench, replayed.graphs):
        yield Result(name, "none was made", wrong=1)
    yield Result(name, f"{differ} tensors differ" if differ else "the same bits", wrong=differ)
    yield Result(f"{name}, to its token", "replayed", 1e3 * replayed.seconds, "ms")
    yield Result(f"a prompt of {length}, to its token", "as it comes", 1e3 * as_it_comes.seconds, "ms")


@dataclass(frozen=True)
class _Prompt:
    bits: list[Tensor]
    """The logprobs of all tokens at its first one, all caches, and a token that is drawn."""
    seconds: float
    graphs: int
    """The graphs of steps with prompts that were there."""


def _run_prompt(bench: Workbench, length: int, **options: Any) -> _Prompt:
    with opened(bench, bench.shape("0.6B"), rows=1, longest=2 * length, **options) as dummy:
        made = dummy.make_graphs(whole_only=False)
        dummy.clear()
        bits = [read_logprobs(dummy.prompt(length, ALL_LOGPROBS))]
        bits += [layer.bound().clone() for layer in dummy.layers()]
        bits.append(torch.tensor(dummy.prompt(length, DRAWN).tokens))
        return _Prompt(bits, bench.median_of(lambda: dummy.prompt(length)), made[PROMPTS])


def read_logprobs(output: Any) -> Tensor:
    """The logprobs of all tokens, in the order of their ids."""
    (told,) = output.logprobs
    logprobs = torch.empty(max(told.ids) + 1)
    logprobs[torch.tensor(told.ids)] = torch.tensor(told.values)
    return logprobs


def apart(one: Tensor, other: Tensor) -> float:
    """How far logprobs are from others, relative to their spread."""
    return float((one - other).norm() / (other - other.mean()).norm())


def compare_depths(bench: Workbench) -> Iterator[Result]:
    """Steps that are planned none, one and two ahead of results: the same tokens.

    All requests come at once and run to their full length, so that the rows of steps are the same.
    """
    count, length = bench.size(16, 3), bench.tokens(300)
    answers: list[list[list[int]]] = []
    for ahead in (0, 1, 2):
        with opened(bench, bench.shape("0.6B"), rows=count, longest=2 * length, steps_ahead=ahead) as dummy:
            dummy.make_graphs()
            requests = [
                AddRequest(
                    id=number,
                    tokens=[(7 * number + at) % 2000 + 3 for at in range(1 + number * length // count)],
                    params=Sampling(max_tokens=length // 4, temperature=number % 2, seed=number),
                )
                for number in range(count)
            ]
            answers.append(
                Loop(dummy.runner.launch, dummy.facts, dummy.shape.vocabulary, ahead).run(requests)
            )
    for ahead in (1, 2):
        differ = sum(one != other for one, other in zip(answers[0], answers[ahead], strict=True))
        text = f"{differ} of {count} requests differ" if differ else "the same tokens"
        yield Result(f"steps planned {ahead} ahead", text, wrong=int(differ > 0))


def compare_chunks(bench: Workbench) -> Iterator[Result]:
    """A long prompt in large chunks and in smaller ones."""
    length = bench.size(_LONG, 70)
    tokens = [at % 1999 + 3 for at in range(length)]
    with opened(bench, bench.shape("0.6B"), rows=2, longest=length + 64) as dummy:
        logprobs: list[Tensor] = []
        for chunk, few in ((8192, 40), (3000, 15)):
            started = time.perf_counter()
            logprobs.append(read_logprobs(_in_chunks(dummy, tokens, bench.size(chunk, few))))
            took = time.perf_counter() - started
            yield Result(f"prompt of {_LONG} in chunks of {chunk}", "the first time", length / took, "tok/s")
    far = apart(*logprobs)
    yield Result(f"prompt of {_LONG}, in other chunks", f"differs by {far:.2%}", wrong=int(not far < _NEAR))


def _in_chunks(dummy: Dummy, tokens: list[int], chunk: int) -> Any:
    """Read a prompt in chunks -> the output of the last step."""
    output, new, blocks = None, [NewSeq(0, tokens, len(tokens), ALL_LOGPROBS)], dummy.blocks(len(tokens) + 1)
    for start in range(0, len(tokens), chunk):
        count = min(chunk, len(tokens) - start)
        ends = start + count == len(tokens)
        output = dummy.run([SeqStep(0, start, count, blocks, samples=ends)], new)
        new, blocks = [], []
    return output


def compare_with_float32(bench: Workbench) -> Iterator[Result]:
    """A small model with real files: our kernels in bfloat16, the reference in float32, and transformers."""
    shape = shallow(bench.shape("0.6B"), 4)
    tokens = [at % 1999 + 3 for at in range(bench.tokens(100))]
    with TemporaryDirectory(dir=bench.folder) as name:
        folder = shape.write(Path(name))
        shape.write_weights(folder, bench.target)
        ours = _logprobs_of(bench, shape, folder, tokens)
        with no_kernels(bench):
            expected = _logprobs_of(bench, shape, folder, tokens, dtype="float32", enforce_eager=True)
        yield _compared("kernels in bfloat16, and the reference in float32", ours, expected)
        in_float32 = _logprobs_of(bench, shape, folder, tokens, dtype="float32", enforce_eager=True)
        yield _compared("kernels in float32, and the reference in float32", in_float32, expected)
        yield _compared("transformers in float32, and ours", _by_transformers(folder, tokens), expected)


def _compared(name: str, one: Tensor, other: Tensor) -> Result:
    far = apart(one[: len(other)], other)
    return Result(name, f"logprobs differ by {far:.3%}", wrong=int(not far < _FAR))


def _logprobs_of(bench: Workbench, shape: Shape, folder: Path, tokens: list[int], **options: Any) -> Tensor:
    longest = 2 * len(tokens)
    dummy = Dummy(bench, shape, folder, rows=1, longest=longest, load_format="auto", **options)
    try:
        return read_logprobs(dummy.prefill(0, tokens, 1, ALL_LOGPROBS))
    finally:
        dummy.close()


def no_kernels(bench: Workbench) -> Any:
    """Let workers compute by the reference alone."""
    if not bench.on_card:
        return patch.dict(sys.modules)
    from worker.kernels.cuda import operations

    return patch.object(operations, "cuda_operations", lambda *arguments, **options: {})


def _by_transformers(folder: Path, tokens: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)


def measure_step(bench: Workbench) -> Iterator[Result]:
    """The parts of a step: the host's, the device's, and what the device waits."""
    for rows in (1, 32):
        shape = bench.shape("0.6B")
        with opened(bench, shape, rows=bench.rows(rows), longest=bench.size(1024, 300)) as dummy:
            dummy.make_graphs()
            seconds = dummy.decode(bench.rows(rows), bench.tokens(512), bench.size(100, 3), GREEDY)
            yield from measure_idle_share(dummy, f"{rows} x 512 alone", bench.rows(rows), *seconds)


PARTS = (
    Part("graphs of single tokens", compare_graphs, 40),
    Part("joined kernels", compare_joined, 60),
    Part("graphs of prompts", compare_prompts, 25),
    Part("depths", compare_depths, 25),
    Part("chunks", compare_chunks, 20),
    Part("float32", compare_with_float32, 30),
    Part("idle share", measure_step, 20),
    Part("profile", measure_kernels, 15),
)
