"""A worker of its own for each measurement: no server, no scheduler, and random weights as a rule."""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from results import Result
from shapes import Shape
from sizes import worker_config
from workbench import Workbench

from models.config import read_config
from models.conversion.conversion_choice import Conversion
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput, StepOutput
from worker.runner import Runner

GREEDY = Sampling(max_tokens=100_000, temperature=0)
DRAWN = Sampling(max_tokens=100_000, temperature=0.8, top_p=0.9, seed=1)
_TOKEN = 5
"""The token of which prompts are made."""
_SPARE = 100
"""Steps for which rows have room beyond those that are measured."""
SINGLE_TOKENS, PROMPTS, _TO_LOGITS = "of single tokens", "of prompts and texts", "up to the logits"
"""Kinds of graphs."""
Report = Callable[[str, float], None]


class Dummy:
    """A worker that takes steps, one ahead of their results."""

    def __init__(
        self,
        bench: Workbench,
        shape: Shape,
        folder: Path,
        *,
        rows: int,
        longest: int,
        blocks: int | None = None,
        pools: bool = False,
        report: Report = lambda phase, part: None,
        **options: Any,
    ) -> None:
        """`folder`: the checkpoint. `longest`: the tokens of a sequence at most.

        `blocks` of the cache; None: as many as all rows can fill. `options`: those of `serve`.
        """
        self.bench, self.shape = bench, shape
        model = read_config(folder)
        runner, convert = ("pooling", "embed") if pools else ("generate", "none")
        conversion = Conversion(runner=runner, convert=convert, architecture=model.architecture)
        sizes = {"max_num_seqs": rows, "max_model_len": longest, "num_gpu_blocks_override": blocks}
        sizes["disable_hybrid_kv_cache_manager"] = True  # blocks are those of whole sequences
        self.config = worker_config(
            folder=str(folder),
            model=model,
            conversion=conversion,
            device=bench.target.type,
            **{"load_format": "dummy", "max_num_batched_tokens": max(8192, rows), **sizes, **options},
        )
        self.runner = Runner(self.config, report)
        self.facts = self.runner.facts
        self._number = 0
        self._free = 0

    def make_graphs(self, *, whole_only: bool = True) -> Counter[str]:
        """Make graphs as an idle engine does; returns how many there are of each kind.

        `whole_only`: leave out those that end before tokens are chosen, which are made last.
        """
        while self.runner.prepare():
            if whole_only and _TO_LOGITS in self.graphs():
                break
        return self.graphs()

    def graphs(self) -> Counter[str]:
        """The number of graphs of each kind."""
        return Counter(map(_kind, self._graphs()))

    def _graphs(self) -> dict[Any, Any]:
        return getattr(self.runner._compute, "_graphs", {})  # pyright: ignore[reportPrivateUsage]

    def clear(self) -> None:
        """Fill the cache with zeros, so that what nobody has computed can be read and compared."""
        for layer in self.layers():
            layer.bound().zero_()

    def layers(self) -> list[Any]:
        """The attention layers, with their caches."""
        return [*self.runner._model.attention_layers()]  # pyright: ignore[reportPrivateUsage]

    def run(self, seqs: list[SeqStep], new: list[NewSeq]) -> StepOutput:
        return self.start(seqs, new).result()

    def start(self, seqs: list[SeqStep], new: list[NewSeq]) -> Any:
        self._number += 1
        return self.runner.launch(StepInput(number=self._number, new=new, seqs=seqs))

    def blocks(self, length: int) -> list[int]:
        """Blocks for a new sequence; those of earlier ones are used again once there are no others."""
        if not self.facts.causal:
            return []
        count = -(-length // self.facts.block_size)
        if self._free + count > self.facts.num_blocks:
            self._free = 0
        self._free += count
        return list(range(self._free - count, self._free))

    def prefill(self, slot: int, tokens: list[int], room: int, params: Sampling | Pooling) -> StepOutput:
        pools, count = isinstance(params, Pooling), len(tokens)
        return self.run(
            [SeqStep(slot, 0, count, self.blocks(count + room), not pools, pools=pools)],
            [NewSeq(slot, tokens, count, params)],
        )

    def prompt(self, length: int, params: Sampling = GREEDY) -> StepOutput:
        """Read a prompt and sample a token."""
        return self.prefill(0, [_TOKEN] * length, 1, params)

    def embed(self, texts: int, length: int) -> StepOutput:
        new = [NewSeq(slot, [_TOKEN] * length, length, Pooling(task="embed")) for slot in range(texts)]
        seqs = [SeqStep(slot, 0, length, self.blocks(length), False, pools=True) for slot in range(texts)]
        return self.run(seqs, new)

    def decode(
        self, rows: int, length: int, steps: int, params: Sampling, adapters: int = 0
    ) -> tuple[float, float]:
        """The seconds of a step of rows that begin with so many tokens, and of the host to launch it.

        `adapters`: how many different ones the rows have. The tokens before the last one are not computed:
        reading zeros takes as long.
        """
        room = length + steps + _SPARE
        blocks = [self.blocks(room) for _ in range(rows)]
        own = [slot % adapters + 1 if adapters else 0 for slot in range(rows)]
        new = [NewSeq(slot, [_TOKEN] * length, length, params, adapter=own[slot]) for slot in range(rows)]
        self.run([SeqStep(slot, length - 1, 1, blocks[slot], True) for slot in range(rows)], new)
        warm = min(5, steps)
        self._step_on(rows, length, range(warm))
        self.bench.finish()
        started = time.perf_counter()
        host = self._step_on(rows, length, range(warm, warm + steps))
        return (time.perf_counter() - started) / steps, statistics.median(host)

    def _step_on(self, rows: int, length: int, steps: range) -> list[float]:
        """Take steps, each launched before the last one's result is read -> the seconds of each launch."""
        pending, host = None, list[float]()
        for step in steps:
            seqs = [SeqStep(slot, length + step, 1, [], True, step + 1) for slot in range(rows)]
            began = time.perf_counter()
            under_way = self.start(seqs, [])
            host.append(time.perf_counter() - began)
            if pending is not None:
                pending.result()
            pending = under_way
        if pending is not None:
            pending.result()
        return host

    def replay_of(self, rows: int) -> Callable[[], None] | None:
        """What takes a step of so many rows again, as it was taken last; None if it is no graph."""
        graphs = self._graphs()
        found = [form for form in graphs if _kind(form) == SINGLE_TOKENS and form.rows == rows]
        return torch.inference_mode()(graphs[found[0]].replay) if found else None

    def replayed_seconds(self, rows: int, times: int = 20) -> float | None:
        """The device's seconds of such a step; None if it is no graph."""
        replay = self.replay_of(rows)
        if replay is None:
            return None
        replay()
        return self.bench.mean_of(replay, times)

    def close(self) -> None:
        self.runner.close()
        del self.runner
        gc.collect()
        self.bench.give_memory_back()


def _kind(form: Any) -> str:
    if not hasattr(form, "rows"):
        return PROMPTS
    return SINGLE_TOKENS if form.whole else _TO_LOGITS


@contextmanager
def opened(
    bench: Workbench, shape: Shape, *, saved: dict[str, Any] | None = None, **arguments: Any
) -> Iterator[Dummy]:
    """A worker with random weights, until the end of the block. `saved`: how the checkpoint is quantized."""
    with TemporaryDirectory(dir=bench.folder) as folder:
        dummy = Dummy(bench, shape, shape.write(Path(folder), saved), **arguments)
        try:
            yield dummy
        finally:
            dummy.close()


def measure_idle_share(dummy: Dummy, case: str, rows: int, step: float, host: float) -> Iterator[Result]:
    """The parts of a step that took `step` seconds, of which the host took `host` to launch it."""
    name = dummy.shape.name
    yield Result(f"{name} host's part of a step, {case}", "", 1e6 * host, "us")
    device = dummy.replayed_seconds(rows)
    if device is None:
        missing = int(dummy.bench.on_card)
        yield Result(f"{name} idle share of a step, {case}", "the step is not a graph", wrong=missing)
        return
    yield Result(f"{name} device's part of a step, {case}", "", 1e3 * device, "ms")
    yield Result(f"{name} idle share of a step, {case}", "", 100 * max(0.0, 1 - device / step), "%")
