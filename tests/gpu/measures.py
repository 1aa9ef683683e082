"""The figures of `make gpu-check`: kernels and steps of dummy models, each beside its floor.

A floor is the time that the card needs at least to move the bytes or to compute the products, at the rates
that it was measured to have. Everything runs on a CPU too, slowly, which is how these lines are tested.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sizes import worker_config

from models.config import read_config
from models.conversion.served_as import Conversion
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput, StepOutput
from worker.runner import Runner


@dataclass(frozen=True)
class Result:
    name: str
    text: str = ""
    value: float = 0.0
    unit: str = ""
    share: float | None = None
    """The part of what the card could do at most."""
    wrong: int = 0

    def line(self) -> str:
        figure = f"{self.value:12,.2f} {self.unit}" if self.unit else ""
        share = "" if self.share is None else f"  {self.share:6.1%} of the floor's rate"
        return f"{self.name:44}{figure}{share} {self.text}".rstrip()


@dataclass(frozen=True)
class Ceilings:
    bytes_per_second: float
    operations_per_second: float


@dataclass(frozen=True)
class Shape:
    """A dense model of the family Qwen3."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 151_936
    head_dim: int = 128

    @property
    def matrices(self) -> int:
        """Numbers of a layer's matrices and the head: those that every token is multiplied with."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocabulary * self.hidden

    def write(self, folder: Path) -> None:
        fields = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        }
        (folder / "config.json").write_text(json.dumps(fields))


SMALL = Shape("0.6B", 1024, 3072, 28, 16, 8)
LARGE = Shape("8B", 4096, 12_288, 36, 32, 8)


def finish(target: torch.device) -> None:
    if target.type == "cuda":
        torch.cuda.synchronize(target)


def seconds_of(work: Callable[[], object], target: torch.device, times: int = 20) -> float:
    """The mean of some calls, after two that compile and warm caches."""
    for _ in range(2):
        work()
    finish(target)
    started = time.perf_counter()
    for _ in range(times):
        work()
    finish(target)
    return (time.perf_counter() - started) / times


def measure_ceilings(target: torch.device, numbers: int = 1 << 28, side: int = 8192) -> Ceilings:
    source = torch.zeros(numbers, dtype=torch.bfloat16, device=target)
    copied = torch.empty_like(source)
    moved = 2 * source.nbytes / seconds_of(lambda: copied.copy_(source), target)
    matrix = torch.randn(side, side, device=target).bfloat16()
    computed = 2 * side**3 / seconds_of(lambda: matrix @ matrix, target)
    return Ceilings(moved, computed)


def measure_kernels(target: torch.device, ceilings: Ceilings) -> Iterator[Result]:
    """Attention of decoding rows in bytes, of prompts in products; norms in bytes."""
    from paged import make_cache, make_step

    from models.ops import reference
    from worker.kernels import check
    from worker.kernels.cuda import table
    from worker.kernels.cuda.card import Card

    operations = table.bind(Card.of(target))
    heads, kv_heads, dim = 32, 8, 128
    for rows, length in ((1, 1024), (1, 16_384), (32, 2048), (256, 1024)):
        step = check.moved(make_step([1] * rows, [length] * rows, 64), target)
        kv = make_cache(step, kv_heads, dim, torch.bfloat16).to(target)
        q = torch.randn(rows, heads, dim, device=target).bfloat16()
        took = seconds_of(
            lambda q=q, kv=kv, step=step: operations["attention"](q, kv, step, scale=0.1), target
        )
        rate = rows * length * kv_heads * dim * 4 / took
        yield Result(
            f"decoding, {rows} x {length}", "", rate / 1e12, "TB/s", rate / ceilings.bytes_per_second
        )
    for length in (512, 2048, 8192):
        step = check.moved(make_step([length], [length], 64), target)
        kv = make_cache(step, kv_heads, dim, torch.bfloat16).to(target)
        q = torch.randn(length, heads, dim, device=target).bfloat16()
        took = seconds_of(
            lambda q=q, kv=kv, step=step: operations["attention"](q, kv, step, scale=0.1), target
        )
        rate = 2 * length**2 * heads * dim / took
        share = rate / ceilings.operations_per_second
        yield Result(f"prompt of {length}", "", rate / 1e12, "TFLOP/s", share)
    x = torch.randn(8192, 4096, device=target).bfloat16()
    weight = torch.ones(4096, device=target)
    for name, table_of in (("ours", operations), ("torch", vars(reference))):
        took = seconds_of(lambda norm=table_of["add_rms_norm"]: norm(x, x, weight, 1e-6), target)
        rate = 4 * x.nbytes / took
        yield Result(f"norm of a sum, {name}", "", rate / 1e12, "TB/s", rate / ceilings.bytes_per_second)


class Dummy:
    """A worker with random weights that takes steps, one ahead of their results."""

    def __init__(
        self,
        shape: Shape,
        folder: Path,
        target: torch.device,
        *,
        pools: bool,
        rows: int,
        blocks: int | None = None,
        eager: bool = False,
    ) -> None:
        """`blocks` of the cache; None: what fits. `eager`: whether there are no graphs."""
        shape.write(folder)
        model = read_config(folder)
        runner = "pooling" if pools else "generate"
        convert = "embed" if pools else "none"
        conversion = Conversion(runner=runner, convert=convert, architecture=model.architecture)
        sizes = {"max_num_seqs": rows, "max_model_len": 8256, "max_num_batched_tokens": max(8192, rows)}
        self.runner = Runner(
            worker_config(
                folder=str(folder),
                model=model,
                conversion=conversion,
                device=target.type,
                load_format="dummy",
                num_gpu_blocks_override=blocks,
                enforce_eager=eager,
                **sizes,
            ),
            lambda phase, part: None,
        )
        self.block_size = self.runner.facts.block_size
        self._number = 0
        self._free = 0

    def make_graphs(self) -> Counter[str]:
        """Make all graphs, as an idle engine does; returns how many there are of each kind."""
        while self.runner.prepare():
            pass
        graphs = getattr(self.runner._compute, "_graphs", {})  # pyright: ignore[reportPrivateUsage]
        return Counter(type(form).__name__ for form in graphs)

    def layers(self) -> list[Any]:
        """The attention layers, with their caches."""
        return self.runner._model.attention_layers()  # pyright: ignore[reportPrivateUsage]

    def run(self, seqs: list[SeqStep], new: list[NewSeq]) -> StepOutput:
        return self.start(seqs, new).result()

    def start(self, seqs: list[SeqStep], new: list[NewSeq]):
        self._number += 1
        return self.runner.launch(StepInput(number=self._number, new=new, seqs=seqs))

    def blocks(self, length: int) -> list[int]:
        """Blocks for a new sequence; those of earlier ones are used again once there are no others."""
        count = -(-length // self.block_size)
        if self._free + count > self.runner.facts.num_blocks:
            self._free = 0
        self._free += count
        return list(range(self._free - count, self._free))

    def prefill(self, slot: int, length: int, room: int, params: Sampling | Pooling) -> StepOutput:
        pools = isinstance(params, Pooling)
        return self.run(
            [SeqStep(slot, 0, length, self.blocks(length + room), not pools, pools=pools)],
            [NewSeq(slot, [5] * length, length, params)],
        )

    def decode(self, rows: int, length: int, steps: int, params: Sampling) -> float:
        """Tokens in a second of rows that begin with so many."""
        for slot in range(rows):
            self.prefill(slot, length, steps + 1, params)
        pending = None
        started = time.perf_counter()
        for step in range(steps):
            seqs = [SeqStep(slot, length + step, 1, [], True, step + 1) for slot in range(rows)]
            under_way = self.start(seqs, [])
            if pending is not None:
                pending.result()
            pending = under_way
        assert pending is not None
        pending.result()
        return rows * steps / (time.perf_counter() - started)


def measure_engine(target: torch.device, ceilings: Ceilings) -> Iterator[Result]:
    for shape in (SMALL, LARGE):
        yield from measure_model(shape, target, ceilings)
    yield from measure_texts(SMALL, target, ceilings)


def measure_model(
    shape: Shape,
    target: torch.device,
    ceilings: Ceilings,
    rows: tuple[int, ...] = (1, 32, 256),
    prompts: tuple[int, ...] = (512, 2048, 8192),
    length: int = 512,
    steps: int = 50,
) -> Iterator[Result]:
    """Decoding and prompts of a dummy model, in its worker alone: no server, no scheduler."""
    with tempfile.TemporaryDirectory() as folder:
        dummy = Dummy(shape, Path(folder), target, pools=False, rows=max(rows))
        dummy.make_graphs()
        greedy = Sampling(max_tokens=10_000, temperature=0)
        drawn = Sampling(max_tokens=10_000, temperature=0.8, top_p=0.9, seed=1)
        cached = 4 * shape.layers * shape.kv_heads * shape.head_dim  # bytes of a token
        for count in rows:
            floor = (2 * shape.matrices + count * length * cached) / ceilings.bytes_per_second
            for name, params in (("likeliest", greedy), ("drawn", drawn)):
                rate = dummy.decode(count, length, steps, params)
                yield Result(
                    f"{shape.name} decoding, {count} rows, {name}", "", rate, "tok/s", rate * floor / count
                )
        for prompt in prompts:
            took = seconds_of(lambda prompt=prompt: dummy.prefill(0, prompt, 0, greedy), target, 5)
            floor = 2 * shape.matrices * prompt / ceilings.operations_per_second
            yield Result(f"{shape.name} prompt of {prompt}", "", prompt / took, "tok/s", floor / took)
        dummy.runner.close()


def measure_texts(
    shape: Shape, target: torch.device, ceilings: Ceilings, texts: int = 16, length: int = 512
) -> Iterator[Result]:
    """Embeddings of a dummy model: some texts in a step, and one short text."""
    with tempfile.TemporaryDirectory() as folder:
        dummy = Dummy(shape, Path(folder), target, pools=True, rows=texts)
        dummy.make_graphs()
        params = Pooling(task="embed")
        for count, tokens in ((texts, length), (1, 32)):

            def embed(count: int = count, tokens: int = tokens) -> None:
                rows = range(count)
                new = [NewSeq(slot, [5] * tokens, tokens, params) for slot in rows]
                seqs = [SeqStep(slot, 0, tokens, dummy.blocks(tokens), False, pools=True) for slot in rows]
                dummy.run(seqs, new)

            took = seconds_of(embed, target, 10)
            floor = 2 * shape.matrices * count * tokens / ceilings.operations_per_second
            rate = count * tokens / took
            yield Result(f"{shape.name} embeddings, {count} x {tokens}", "", rate, "tok/s", floor / took)
        dummy.runner.close()
