"""Copies and moves the experts of this rank's layers by measured load, in step with all that share them.

Nobody decides for others: ranks that share experts take the same steps, count them alike, exchange what they
have measured, and compute the same maps. Those come from the published algorithm that DeepSeek named EPLB,
for the ranks of one machine: experts with much load get copies, and copies are packed onto ranks, the
heaviest first. The same loads always give the same map.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.layers.expert_transport import ApartTransport
from models.layers.experts import Experts
from models.layers.stages import Layers
from models.model import ServedModel
from models.parallel.experts import ExpertPlace
from models.parallel.parallel import Collectives
from worker.config import Balancing
from worker.features.experts.moving import bytes_at, choose_sources, form_of, move
from worker.protocol import Balancedness, ExpertReport


@dataclass(frozen=True)
class ExpertMap:
    """The places of a layer, rank by rank, and the experts whose copies lie there."""

    experts: tuple[int, ...]
    """The expert at each place. Every rank has equally many places."""
    copies: tuple[tuple[int, ...], ...]
    """The places of each expert's copies, in the order in which the copies were given."""

    def loads_of_ranks(self, loads: Sequence[float], ranks: int) -> list[float]:
        """What each rank has to compute, if the copies of an expert share its load evenly."""
        held = len(self.experts) // ranks
        shares = [loads[expert] / len(self.copies[expert]) for expert in self.experts]
        return [sum(shares[rank * held : (rank + 1) * held]) for rank in range(ranks)]

    def balancedness(self, loads: Sequence[float], ranks: int) -> float:
        """The mean load of the ranks by the largest: 1 if all have the same, 1 / ranks if one has all."""
        shares = self.loads_of_ranks(loads, ranks)
        largest = max(shares)
        return sum(shares) / ranks / largest if largest else 1.0


def balance(loads: Sequence[float], places: int, *, ranks: int) -> ExpertMap:
    """The map of a layer for these loads of its experts."""
    if places < len(loads):
        raise ValueError(f"{len(loads)} experts need as many places, and there are {places}")
    if places % ranks:
        raise ValueError(f"places cannot be divided evenly among ranks: {places} by {ranks}")
    copied = _replicate(loads, places)
    shares = [loads[expert] / copied.count(expert) for expert in copied]
    order = [copy for on_rank in _pack(shares, ranks) for copy in on_rank]  # the copy at each place
    copies: list[list[int]] = [[] for _ in loads]
    for place in sorted(range(places), key=order.__getitem__):
        copies[copied[order[place]]].append(place)
    return ExpertMap(tuple(copied[copy] for copy in order), tuple(map(tuple, copies)))


def improve(current: ExpertMap, loads: Sequence[float], *, ranks: int) -> ExpertMap:
    """The balanced map, or the current one where that is no worse: experts are moved for a gain only."""
    found = balance(loads, len(current.experts), ranks=ranks)
    gains = found.balancedness(loads, ranks) > current.balancedness(loads, ranks)
    return found if gains else current


def keep_places(current: ExpertMap, found: ExpertMap, ranks: int) -> ExpertMap:
    """The map `found`, with experts that remain on a rank at their places there, so that fewer are moved."""
    held = len(current.experts) // ranks
    experts = list(current.experts)
    for start in range(0, len(experts), held):
        coming = list(found.experts[start : start + held])
        left: list[int] = []
        for place in range(start, start + held):
            if current.experts[place] in coming:
                coming.remove(current.experts[place])
            else:
                left.append(place)
        for place, expert in zip(left, coming, strict=True):
            experts[place] = expert
    return map_of(experts, len(current.copies))


def map_of(layout: Sequence[int], experts: int) -> ExpertMap:
    """The map that has these of so many experts at its places."""
    copies: list[list[int]] = [[] for _ in range(experts)]
    for place, expert in enumerate(layout):
        copies[expert].append(place)
    return ExpertMap(tuple(layout), tuple(map(tuple, copies)))


def _pack(weights: Sequence[float], packs: int) -> list[list[int]]:
    """Pack things into packs of equally many: the heaviest first, each into the lightest pack with room."""
    room = len(weights) // packs
    if room == 1:
        return [[number] for number in range(packs)]
    packed: list[list[int]] = [[] for _ in range(packs)]
    totals = [0.0] * packs
    for number in sorted(range(len(weights)), key=lambda number: -weights[number]):
        open_packs = (pack for pack in range(packs) if len(packed[pack]) < room)
        lightest = min(open_packs, key=totals.__getitem__)
        packed[lightest].append(number)
        totals[lightest] += weights[number]
    return packed


def _replicate(loads: Sequence[float], places: int) -> list[int]:
    """The expert of each copy: all experts once, and then, one by one, that with the most load for a copy."""
    copied = list(range(len(loads)))
    counts = [1] * len(loads)
    while len(copied) < places:
        most = max(range(len(loads)), key=lambda expert: loads[expert] / counts[expert])
        copied.append(most)
        counts[most] += 1
    return copied


logger = logging.getLogger(__name__)

SHOWN_EVERY = 32
"""The number of steps after which totals of tokens are fetched again, if they are to be shown."""
BUCKETS = 8
"""The parts of a window: totals are remembered so often in it, and it may be longer by one of them."""


@dataclass(slots=True)
class _Layer:
    """A layer with experts, and where they lie now."""

    number: int
    experts: Experts
    transport: ApartTransport
    map: ExpertMap
    moves: bool = True
    """Whether bytes of its experts may be exchanged."""


class Balancer:
    def __init__(
        self,
        model: ServedModel,
        place: ExpertPlace,
        group: Collectives,
        tensor_size: int,
        balancing: Balancing,
    ) -> None:
        """`group`: all ranks that share experts, of which each `tensor_size` have the same tokens."""
        self._place, self._group, self._options = place, group, balancing
        self._tensor_size = tensor_size
        self._layers = _find(model, place)
        self._totals = _count(self._layers)
        self._window = LoadWindow(self._totals, balancing.window_size)
        self._steps = self._shown = 0
        self._loads: list[list[int]] = []
        self._left: deque[int] = deque()
        """The layers that are still to be rearranged for the loads of the last measurement."""
        self._moved, self._seconds = 0, 0.0
        """What the rearrangement under way has done: layers, and the time of their moves."""
        self._balancedness: Balancedness | None = None
        self._rearrangements: list[float] = []
        self._compare_forms()

    @torch.inference_mode()
    def before_step(self) -> None:
        """Do what is due before a step: measure, or rearrange a layer, or all."""
        self._window.advance()
        self._steps += 1
        since = self._steps - self._options.first_step
        if since >= 0 and since % self._options.step_interval == 0 and not self._left:
            self._measure()
        while self._left:
            self._rearrange(self._left.popleft())
            if not self._left and self._moved:
                self._rearrangements.append(self._seconds)
                if self._place.rank == 0:
                    logger.info("rearranged %d layers of experts in %.3f s", self._moved, self._seconds)
                self._moved, self._seconds = 0, 0.0
            if self._options.use_async:
                return

    def take_report(self) -> ExpertReport | None:
        """What has not been reported yet; None if there is nothing."""
        shows = self._options.show_load and self._steps - self._shown >= SHOWN_EVERY
        if self._balancedness is None and not self._rearrangements and not shows:
            return None
        tokens: dict[int, list[int]] = {}
        if shows:
            self._shown = self._steps
            numbers = [layer.number for layer in self._layers]
            tokens = dict(zip(numbers, self._by_expert(self._totals), strict=True))
        report = ExpertReport(self._balancedness, tuple(self._rearrangements), tokens)
        self._balancedness, self._rearrangements = None, []
        return report

    def _compare_forms(self) -> None:
        """Leave alone layers whose experts differ in form, on this rank or between ranks."""
        device = self._totals.device
        own = torch.tensor([form_of(layer.experts) for layer in self._layers], device=device)
        for others in self._of_all(own):
            for layer, mine, other in zip(self._layers, own.tolist(), others.tolist(), strict=True):
                layer.moves = layer.moves and mine == other != 0
        fixed = [layer.number for layer in self._layers if not layer.moves]
        if fixed and self._place.rank == 0:
            logger.warning("experts of the layers %s differ in form: they stay where they are", fixed)

    def _measure(self) -> None:
        everyone = self._of_all(self._window.loads())
        self._loads = self._by_expert(torch.stack(everyone[:: self._tensor_size]).sum(0))
        pairs = zip(self._layers, self._loads, strict=True)
        found = [layer.map.balancedness(loads, self._place.size) for layer, loads in pairs]
        self._balancedness = summary = summarize(found)
        if self._options.log_balancedness and self._place.rank == 0:
            logger.info(
                "balancedness of experts over %d ranks: %.3f on average, %.3f in half of the layers, %.3f in "
                "nine of ten, at least %.3f",
                *(self._place.size, summary.average, summary.p50, summary.p90, summary.least),
            )
        self._left.extend(number for number, layer in enumerate(self._layers) if layer.moves)

    def _by_expert(self, table: Tensor) -> list[list[int]]:
        """The numbers of each layer's experts, from a table [L, E] of the most that a layer has."""
        return [row[: layer.experts.count] for layer, row in zip(self._layers, table.tolist(), strict=True)]

    def _rearrange(self, number: int) -> None:
        """Move the experts of a layer, if that spreads its load better."""
        layer, size = self._layers[number], self._place.size
        found = improve(layer.map, self._loads[number], ranks=size)
        if found is layer.map:
            return
        found = keep_places(layer.map, found, size)
        started = time.monotonic()
        held = len(found.experts) // size
        sources = choose_sources(layer.map.experts, found.experts, held)
        move(bytes_at(layer.experts), sources, held, self._place.rank, size, self._group)
        layer.transport.place_experts(found.experts)
        layer.map = found
        self._moved += 1
        self._seconds += time.monotonic() - started

    def _of_all(self, own: Tensor) -> list[Tensor]:
        """The tensors of all ranks that share experts."""
        everyone = [torch.empty_like(own) for _ in range(self._place.size)]
        self._group.exchange([own] * self._place.size, everyone).wait()
        return everyone


class LoadWindow:
    """The tokens of experts in the last steps: totals, which layers add to in place, less earlier totals."""

    def __init__(self, totals: Tensor, size: int) -> None:
        """`totals` [L, E]; `size`: the number of steps of the window."""
        self._totals = totals
        self._bucket = -(-size // BUCKETS)
        self._steps = 0
        self._before = deque([totals.clone()], maxlen=-(-size // self._bucket) + 1)

    def advance(self) -> None:
        """Notice that a step begins."""
        if self._steps and self._steps % self._bucket == 0:
            self._before.append(self._totals.clone())
        self._steps += 1

    def loads(self) -> Tensor:
        """The tokens of each expert in the window [L, E], the step that begins now not among them."""
        return self._totals - self._before[0]


def summarize(layers: Sequence[float]) -> Balancedness:
    """The balancedness of layers in four numbers."""
    falling = sorted(layers, reverse=True)

    def of_share(tenths: int) -> float:
        """The value that so many tenths of the layers reach."""
        return falling[-(-len(falling) * tenths // 10) - 1]

    return Balancedness(falling[-1], of_share(5), of_share(9), sum(falling) / len(falling))


def _find(model: ServedModel, place: ExpertPlace) -> list[_Layer]:
    """The layers with whole experts, under their numbers in the whole model."""
    found: list[_Layer] = []
    for run in model.modules():
        if not isinstance(run, Layers):
            continue
        for number, layer in zip(run.numbers, run, strict=True):
            for each in layer.modules():
                if isinstance(each, Experts) and each.apart is not None:
                    layout = map_of(place.layout(each.count), each.count)
                    found.append(_Layer(number, each, each.apart, layout))
    return found


def _count(layers: Sequence[_Layer]) -> Tensor:
    """Let layers count their tokens from now on, in one table [L, E]."""
    device = layers[0].experts.gate_up[0].device
    totals = torch.zeros(len(layers), max(layer.experts.count for layer in layers), device=device).long()
    for layer, row in zip(layers, totals, strict=True):
        layer.transport.tokens = row[: layer.experts.count]
    return totals
