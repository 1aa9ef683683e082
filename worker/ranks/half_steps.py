"""Steps of replicas that share experts, cut into two halves, so that exchanges are hidden behind computing.

Two threads compute the halves in turns, one at a time. Where it would wait for an exchange with other
replicas, the other one runs first. That depends on nothing else, so the order of exchanges is the same on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Semaphore
from typing import Protocol

import torch
from torch import Tensor

from models.context import ForwardContext, MediaRows, StateRows
from models.parallel.parallel import Collectives, Exchange
from models.state_rows import StateRow, state_columns

ComputeHalf = Callable[[], Tensor]


class OtherHalfFailedError(Exception):
    """Ends a half whose step cannot be completed, because the other half has failed."""


class _Halves:
    """The state of two threads, 0 and 1, of which 0 begins."""

    def __init__(self) -> None:
        self._running = 0
        self._may_run = (Semaphore(0), Semaphore(0))
        self._ended = [False, False]
        self.error: BaseException | None = None
        """The error of the half that failed first."""

    def hand_over(self) -> None:
        """Let the other thread run until it hands over or ends. Raises if it has failed."""
        own, other = self._running, 1 - self._running
        if self._ended[other]:
            return
        self._pass_to(other)
        self._await_turn(own)

    def run(self, own: int, compute: ComputeHalf) -> Tensor | None:
        """Compute a half in this thread; None if one of the halves fails."""
        try:
            if own:
                self._await_turn(own)
            return compute()
        except BaseException as error:  # whatever ends this half must end the other one, which waits for it
            self.error = self.error or error
            return None
        finally:
            self._ended[own] = True
            self._pass_to(1 - own)

    def _pass_to(self, other: int) -> None:
        self._running = other
        self._may_run[other].release()

    def _await_turn(self, own: int) -> None:
        self._may_run[own].acquire()
        if self.error is not None:
            raise OtherHalfFailedError


@dataclass(frozen=True, slots=True)
class _AfterTurn:
    """An exchange of one half. Who waits for it lets the other half compute first."""

    exchange: Exchange
    turns: _Halves

    def wait(self) -> None:
        self.turns.hand_over()
        self.exchange.wait()


class ClosableCollectives(Collectives, Protocol):
    """A group that is closed at the end."""

    def close(self) -> None: ...


class HalfStepGroup:
    """A group of ranks, one of each replica, which may compute a step in two halves."""

    def __init__(self, group: ClosableCollectives, rank: int) -> None:
        self.rank = rank
        self.exact = group.exact
        self._group = group
        self._turns: _Halves | None = None
        """The turns of the step under way, if it has two halves."""
        self._thread = ThreadPoolExecutor(1, "second half")

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._group.all_gather(x)

    def exchange(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> Exchange:
        exchange = self._group.exchange(out, into)
        return exchange if self._turns is None else _AfterTurn(exchange, self._turns)

    def compute_both(self, first: ComputeHalf, second: ComputeHalf) -> tuple[Tensor, Tensor]:
        """Compute two halves that exchange equally often. The second may read what the first has written."""
        self._turns = turns = _Halves()
        try:
            later = self._thread.submit(turns.run, 1, second)
            one, two = turns.run(0, first), later.result()
        finally:
            self._turns = None
        if turns.error is not None or one is None or two is None:
            raise turns.error or RuntimeError("a half of a step has no result")
        return one, two

    def close(self) -> None:
        self._thread.shutdown()
        self._group.close()


def cut_step(
    context: ForwardContext, first_halves: Sequence[int], replica: int
) -> tuple[ForwardContext, ForwardContext]:
    """Cut a step behind the tokens of its replica's first half. A cut row goes on in the second."""
    totals = context.replica_tokens
    if len(first_halves) != len(totals) or not all(
        0 < first < total for first, total in zip(first_halves, totals, strict=True)
    ):
        raise ValueError(f"steps of {totals} tokens cannot have first halves of {list(first_halves)}")
    tokens, lens, ends = first_halves[replica], context.query_lens_host, context.kv_lens_host
    starts = [0, *accumulate(lens)]
    row = next(row for row, start in enumerate(starts) if start + lens[row] > tokens)
    inside = tokens - starts[row]  # the tokens in the first half of the row with which the second begins
    cut = [inside] if inside else []
    last = [ends[row] - lens[row] + inside] if inside else []
    rows = row + len(cut)
    first = _piece(context, slice(tokens), slice(rows), [*lens[:row], *cut], [*ends[:row], *last])
    rest = [lens[row] - inside, *lens[row + 1 :]]
    second = _piece(context, slice(tokens, None), slice(row, None), rest, ends[row:])
    if context.states is not None:
        first.states, second.states = _cut_states(context.states, row, inside)
    left = [total - first for first, total in zip(first_halves, totals, strict=True)]
    return replace(first, replica_tokens=list(first_halves)), replace(second, replica_tokens=left)


def _piece(
    context: ForwardContext, tokens: slice, rows: slice, counts: list[int], ends: list[int]
) -> ForwardContext:
    """Some tokens and rows of a step. `counts`, `ends`: the tokens of each row here, and until its end."""
    target = context.positions.device
    types, axes, last = context.token_types, context.axes, context.last
    return replace(
        context,
        positions=context.positions[tokens],
        query_starts=_on_device([0, *accumulate(counts)], target),
        kv_lens=_on_device(ends, target),
        # Copies begin at addresses for which kernels are compiled, pieces may begin anywhere.
        block_table=context.block_table[rows].clone(),
        slot_mapping=context.slot_mapping[tokens].clone(),
        query_lens_host=counts,
        kv_lens_host=ends,
        token_types=None if types is None else types[tokens],
        media=None if context.media is None else _cut_media(context.media, tokens, len(context.positions)),
        axes=None if axes is None else axes[:, tokens].contiguous(),
        last=None if last is None else last[tokens].clone(),
        plan=None,
        others=[_piece(each, tokens, rows, counts, ends) for each in context.others],
    )


def _cut_media(media: MediaRows, tokens: slice, count: int) -> MediaRows:
    """The embeddings of some of a step's `count` tokens."""
    first, stop, _ = tokens.indices(count)
    kept = (media.places >= first) & (media.places < stop)
    deeper = tuple(rows[kept] for rows in media.deeper)
    return MediaRows(media.places[kept] - first, media.rows[kept], deeper)


def _cut_states(states: StateRows, row: int, inside: int) -> tuple[StateRows, StateRows]:
    """The states of both halves, if the second begins behind so many tokens of a row."""
    before, own, after = states.host[:row], states.host[row], states.host[row + 1 :]
    early = StateRow(own.source, own.target, tuple(each for each in own.kept if each[0] <= inside))
    late = tuple((count - inside, place) for count, place in own.kept if count > inside)
    second = [own if not inside else StateRow(own.target, own.target, late), *after]
    first = [*before, *([early] if inside else [])]
    target = states.table.device
    made = [StateRows(_on_device(state_columns(rows), target), rows) for rows in (first, second)]
    return made[0], made[1]


def _on_device(values: Sequence[int] | Sequence[list[int]], target: torch.device) -> torch.Tensor:
    """These numbers as int32, without waiting for what the device has to do."""
    pinned = target.type == "cuda"
    return torch.tensor(values, dtype=torch.int32, pin_memory=pinned).to(target, non_blocking=True)
