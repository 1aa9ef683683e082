"""A driver that runs a model step by step, as a worker would, with contexts and a cache made by hand.

The cache is hostile: blocks lie in no order, and whatever no sequence wrote is NaN. Of a model that is spread
over ranks each rank runs in a thread, and `ThreadGroup` carries tensors between them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from paged import unfit
from torch import Tensor

from models.config import read_config
from models.context import ForwardContext, StateRows, context_without_rows, use_context
from models.layers.moe import MoeMLP
from models.layers.state import state_layers
from models.loader import LoadOptions, load_model
from models.model import CausalLM
from models.ops.attention_inputs import stored_shape
from models.ops.tree_sum import add_in_pairs
from models.parallel.experts import ExpertPlace, Placement, Transport
from models.parallel.parallel import Parallel, Replicas
from models.state_rows import StateRow, state_columns
from worker.features.states.state_memory import StateMemory

Result = TypeVar("Result")


class ThreadGroup:
    """Collectives for ranks that are threads: `group.at(rank)` is what that rank gets."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._held: list[Tensor] = [torch.empty(0)] * size
        self._lists: list[Sequence[Tensor]] = [()] * size
        self.sent = 0
        """The bytes that each rank has given to others."""

    def at(self, rank: int) -> RankGroup:
        return RankGroup(self, rank)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self._held[rank] = x
        self.sent += x.nbytes if rank == 0 else 0
        self._barrier.wait()
        everyone = list(self._held)
        self._barrier.wait()  # no rank may put its next tensor down before all have read this one
        return everyone

    def swap(self, rank: int, out: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Fill `into` with what the ranks have for this one."""
        self._lists[rank] = out
        self.sent += sum(x.nbytes for to, x in enumerate(out) if to != rank == 0)
        self._barrier.wait()
        for x, from_rank in zip(into, self._lists, strict=True):
            x.copy_(from_rank[rank])
        self._barrier.wait()


class RankGroup:
    exact = True

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def all_reduce(self, x: Tensor) -> Tensor:
        return add_in_pairs(self._group.exchange(self._rank, x))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._group.exchange(self._rank, x), dim=-1)

    def exchange(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> Done:
        self._group.swap(self._rank, out, into)
        return Done()


class Done:
    def wait(self) -> None:
        """Return at once."""


def load_ranks(
    folder: Path,
    size: int = 1,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    max_len: int | None = None,
    placement: Placement | None = None,
    transport: Transport = "allgather_reducescatter",
    replicas: Sequence[Replicas] | None = None,
    overrides: Mapping[str, object] | None = None,
    **more: Any,
) -> list[Any]:
    """A model as its ranks. `overrides`: other fields of its config; `more`: further options of loading.

    `placement`: how whole experts are divided among the ranks; None means that each has pieces of all.
    `replicas`: for each rank, its place among those of its number, if experts are shared with others.
    """
    group, config = ThreadGroup(size), read_config(folder, overrides)
    expert_size = size * (replicas[0].size if replicas else 1)
    return [
        load_model(
            LoadOptions(
                config,
                folder,
                device=torch.device(device),
                dtype=dtype,
                parallel=Parallel(
                    rank,
                    size,
                    group.at(rank),
                    experts=None
                    if placement is None
                    else ExpertPlace(
                        rank + (size * replicas[rank].rank if replicas else 0),
                        expert_size,
                        placement,
                        transport,
                    ),
                    replicas=replicas[rank] if replicas else None,
                ),
                max_len=max_len,
                **more,
            )
        )
        for rank in range(size)
    ]


def load_replicas(
    folder: Path,
    count: int,
    size: int = 1,
    *,
    placement: Placement = "linear",
    transport: Transport = "allgather_reducescatter",
    dtype: torch.dtype = torch.float32,
) -> list[list[CausalLM]]:
    """The ranks of replicas that share experts."""
    groups = [ThreadGroup(count) for _ in range(size)]
    return [
        load_ranks(
            folder,
            size,
            dtype=dtype,
            placement=placement,
            transport=transport,
            replicas=[Replicas(number, count, group.at(number)) for group in groups],
        )
        for number in range(count)
    ]


class Driver:
    """A model, given as its ranks, with some sequences of up to `max_len` tokens each."""

    def __init__(
        self,
        ranks: Sequence[CausalLM],
        *,
        sequences: int = 4,
        max_len: int = 64,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self._ranks = ranks
        self._device = device
        self._block_size = block_size
        self._counts = [0] * sequences
        width = -(-max_len // block_size)
        blocks = list(range(sequences * width))
        random.Random(0).shuffle(blocks)
        self._tables = torch.tensor(blocks, dtype=torch.int32).view(sequences, width)
        for model in ranks:
            for layer in model.attention_layers():
                shape = stored_shape(layer.cache_shape(len(blocks), block_size), dtype)
                layer.kv = torch.full(shape, unfit(dtype), dtype=dtype, device=device)
            if layers := state_layers(model.modules()):
                StateMemory(layers, sequences, self._full_of_nan)

    def _full_of_nan(self, nbytes: int) -> Tensor:
        return torch.full((nbytes // 4,), torch.nan, device=self._device).view(torch.uint8)

    def step(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Gives each of the named sequences its next tokens; -> the logits after each of them [n, V]."""
        return self._run(tokens, lambda model, hidden: model.logits(hidden))

    def hidden(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """The trunk's output for each of the tokens [n, H], in a step like that of `step`."""
        return self._run(tokens, lambda model, hidden: hidden)

    def _run(
        self,
        tokens: Mapping[int, Sequence[int]],
        finish: Callable[[CausalLM, Tensor], Tensor],
        replica_tokens: list[int] | None = None,
    ) -> dict[int, Tensor]:
        if not tokens:
            _in_threads(lambda model: _take_part(model, replica_tokens or []), self._ranks)
            return {}
        rows = list(tokens)
        context = self._context(rows, [len(tokens[row]) for row in rows])
        context.replica_tokens = replica_tokens or []
        ids = torch.tensor([token for row in rows for token in tokens[row]], device=self._device)

        def run(model: CausalLM) -> Tensor:
            with torch.inference_mode(), use_context(context):
                return finish(model, model.forward(ids, context.positions))

        outputs = _in_threads(run, self._ranks)
        for other in outputs[1:]:
            torch.testing.assert_close(other, outputs[0])
        return dict(zip(rows, outputs[0].split(context.query_lens_host), strict=True))

    def step_among(self, tokens: Mapping[int, Sequence[int]], replica_tokens: list[int]) -> dict[int, Tensor]:
        """The same as `step`, in a step that other replicas take at the same time; without tokens too."""
        return self._run(tokens, lambda model, hidden: model.logits(hidden), replica_tokens)

    def _context(self, rows: list[int], counts: list[int]) -> ForwardContext:
        positions, slots = [], []
        size = self._block_size
        for row, count in zip(rows, counts, strict=True):
            places = torch.arange(self._counts[row], self._counts[row] + count)
            positions.append(places)
            slots.append(self._tables[row][places // size].long() * size + places % size)
            self._counts[row] += count
        totals = [self._counts[row] for row in rows]
        own = [StateRow(row, row) for row in rows]
        starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
        return ForwardContext(
            positions=torch.cat(positions).to(self._device),
            query_starts=starts.to(self._device),
            kv_lens=torch.tensor(totals, dtype=torch.int32, device=self._device),
            block_table=self._tables[rows].to(self._device),
            slot_mapping=torch.cat(slots).to(self._device),
            states=StateRows(torch.tensor(state_columns(own), dtype=torch.int32, device=self._device), own),
            block_size=size,
            query_lens_host=counts,
            kv_lens_host=totals,
        )


def assert_logits(
    folder: Path, expected: Tensor, prompt: list[int], *ranks: int, placement: Placement | None = None
) -> None:
    """A checkpoint has these logits after each token of a prompt, held by one rank or by so many."""
    for size in ranks or (1,):
        logits = run_in_chunks(Driver(load_ranks(folder, size, placement=placement)), 0, prompt, 7)
        torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=1e-5)


def run_in_chunks(driver: Driver, row: int, tokens: Sequence[int], size: int) -> Tensor:
    """Runs one sequence alone, `size` tokens a step; -> [T, V]."""
    chunks = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    return torch.cat([driver.step({row: chunk})[row] for chunk in chunks])


def step_together(
    drivers: Sequence[Driver], tokens: Sequence[Mapping[int, Sequence[int]]]
) -> list[dict[int, Tensor]]:
    """A step of replicas that share experts, each with its own tokens."""
    counts = [sum(map(len, own.values())) for own in tokens]
    with ThreadPoolExecutor(len(drivers)) as pool:
        return list(pool.map(lambda driver, own: driver.step_among(own, counts), drivers, tokens))


def _take_part(model: CausalLM, replica_tokens: list[int]) -> None:
    device = torch.device("cpu")
    dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
    with torch.inference_mode(), use_context(context_without_rows(replica_tokens, device)):
        for each in model.modules():
            if isinstance(each, MoeMLP):
                each.take_part(dtype, device)


def _in_threads(run: Callable[[CausalLM], Result], models: Sequence[CausalLM]) -> list[Result]:
    if len(models) == 1:
        return [run(models[0])]
    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(run, models))
