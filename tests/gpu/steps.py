"""Steps as graphs on this card: the same bits as the same work as it comes, and what a step costs."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measures import SMALL, Ceilings, Dummy, Result, Shape, seconds_of

from worker.protocol import Sampling, SeqStep

GREEDY = Sampling(max_tokens=10_000, temperature=0)
DRAWN = Sampling(max_tokens=10_000, temperature=0.8, top_p=0.9, seed=1)
REPORTED = Sampling(max_tokens=10_000, temperature=1.1, top_k=50, seed=2, logprobs=2, presence_penalty=0.5)
KINDS = {"from form to token": [GREEDY, DRAWN, DRAWN], "up to the logits": [GREEDY, DRAWN, REPORTED]}


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


def measure_steps(
    target: torch.device, ceilings: Ceilings, shape: Shape = SMALL, steps: int = 200
) -> Iterator[Result]:
    """Steps of three rows, and a prompt: in graphs, and as they come."""
    for name, rows in KINDS.items():
        replayed, caches, graphs = _run(shape, target, rows, steps)
        with _no_graphs(target):
            eager, others, _ = _run(shape, target, rows, steps)
        differ = sum(one != other for one, other in zip(replayed, eager, strict=True))
        differ += sum(not torch.equal(one, other) for one, other in zip(caches, others, strict=True))
        yield Result(f"graphs {name}, {steps} steps", "differ" if differ else "the same bits", wrong=differ)
        yield from graphs
    yield from _measure_prompt(shape, target)


def _measure_prompt(shape: Shape, target: torch.device, length: int = 128) -> Iterator[Result]:
    """A short prompt alone: in a graph, by the same work anew, and as it comes."""
    replayed = _run_prompt(shape, target, length)
    with _no_graphs(target):
        anew = _run_prompt(shape, target, length)
    as_it_comes = _run_prompt(shape, target, length, eager=True)
    pairs = zip(replayed.bits, anew.bits, strict=True)
    differ = sum(not torch.equal(one, other) for one, other in pairs)
    name = f"graphs of a prompt of {length}"
    if target.type == "cuda" and not replayed.graphs:
        yield Result(name, "none was made", wrong=1)
    yield Result(name, "differ" if differ else "the same bits", wrong=differ)
    yield Result(f"{name}, to its token", "replayed", 1e3 * replayed.seconds, "ms")
    yield Result(f"a prompt of {length}, to its token", "as it comes", 1e3 * as_it_comes.seconds, "ms")


@dataclass(frozen=True)
class _Prompt:
    bits: list[torch.Tensor]
    """The logprobs of all tokens at its first one, all caches, and a token that is drawn."""
    seconds: float
    graphs: int
    """The graphs of steps with prompts that were there."""


def _run_prompt(shape: Shape, target: torch.device, length: int, *, eager: bool = False) -> _Prompt:
    with tempfile.TemporaryDirectory() as folder:
        dummy = Dummy(shape, Path(folder), target, pools=False, rows=1, blocks=512, eager=eager)
        made = dummy.make_graphs()
        for layer in dummy.layers():
            layer.bound().zero_()
        (told,) = dummy.prefill(0, length, 1, Sampling(max_tokens=9, logprobs=-1)).logprobs
        assert told is not None
        bits = [torch.tensor(told.ids), torch.tensor(told.values)]
        bits += [layer.bound().clone() for layer in dummy.layers()]
        drawn = dummy.prefill(0, length, 1, Sampling(max_tokens=9, temperature=0.9, seed=7))
        bits.append(torch.tensor(drawn.tokens))
        seconds = seconds_of(lambda: dummy.prefill(0, length, 1, GREEDY), target)
        dummy.runner.close()
        return _Prompt(bits, seconds, made["MixedForm"])


def _no_graphs(target: torch.device) -> Any:
    """Let workers compute what graphs would."""
    if target.type != "cuda":
        return patch.dict(sys.modules)
    from worker.kernels.cuda.steps import capture

    return patch.object(capture, "CudaCapture", Eager)


def _run(
    shape: Shape, target: torch.device, rows: list[Sampling], steps: int
) -> tuple[list[Any], list[torch.Tensor], list[Result]]:
    """The outputs of decoding steps, the cache at the end, and what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        dummy = Dummy(shape, Path(folder), target, pools=False, rows=len(rows), blocks=512)
        started = time.perf_counter()
        made = dummy.make_graphs()
        seconds, missing = time.perf_counter() - started, target.type == "cuda" and not made["Form"]
        shown = ", ".join(f"{count} {kind}" for kind, count in made.items()) or "none"
        results = [Result("graphs made when idle", shown, seconds, "s", wrong=int(missing))]
        for layer in dummy.layers():
            layer.bound().zero_()  # what nobody writes shall be equal, too
        for slot, params in enumerate(rows):
            dummy.prefill(slot, 20, steps + 1, params)
        outputs: list[Any] = []
        host = 0.0
        for step in range(steps):
            seqs = [SeqStep(slot, 20 + step, 1, [], True, step + 1) for slot in range(len(rows))]
            started = time.perf_counter()
            under_way = dummy.start(seqs, [])
            host += time.perf_counter() - started
            output = under_way.result()
            outputs.append((output.tokens, output.logprobs))
        results.append(Result("the host's part of a step", "", 1e6 * host / steps, "us"))
        caches = [layer.bound().clone() for layer in dummy.layers()]
        dummy.runner.close()
        return outputs, caches, results
