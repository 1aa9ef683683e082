"""What all parts of `make gpu-check` share: the device, sizes, a clock, and what the card can do at most.

On a CPU everything is tiny, and kernels run in Triton's interpreter: so the parts are tried without a card.
Names of results tell the sizes of a card all the same.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from results import Result
from shapes import SHAPES, TINY, Shape

BF16 = torch.bfloat16
_SHORT = 3e-3
"""Seconds of a call under which the host, which starts it, would be measured: such calls become a graph.

A layer of experts took the host 0.3 ms to start, and what was measured then was the host."""


class NoDevice(Exception):
    """There is no card here."""


@dataclass(frozen=True)
class Part:
    """A part of a section, which can fail, hang or be skipped without the others."""

    name: str
    work: Callable[[Workbench], Iterator[Result]]
    seconds: float = 60
    """The time after which it is ended."""
    fresh: bool = False
    """Whether it needs a process of its own."""


@dataclass(frozen=True)
class Ceilings:
    """What the card can do at most, as it was measured."""

    bytes_per_second: float
    operations_per_second: float


@dataclass
class Workbench:
    target: torch.device
    tell: Callable[..., None]
    folder: Path
    """A folder for files of this run, which is removed at its end."""
    peer: str | None = None
    """The Python of another server to measure."""
    known: Ceilings | None = None
    """What the section of the card has measured."""

    @classmethod
    def open(cls, context: dict[str, Any], tell: Callable[..., None]) -> Workbench:
        device = context["device"]
        if device == "cuda":
            if not torch.cuda.is_available():
                raise NoDevice("torch finds no CUDA device here")
            torch.cuda.set_device(0)
            target = torch.device("cuda", 0)
        else:
            torch.set_num_threads(1)
            target = torch.device(device)
        torch.manual_seed(0)
        ceilings = context.get("ceilings")
        known = None if ceilings is None else Ceilings(**ceilings)
        return cls(target, tell, Path(context["folder"]), context.get("peer"), known)

    @property
    def on_card(self) -> bool:
        return self.target.type == "cuda"

    # Sizes.

    def size(self, of_card: int, most: int) -> int:
        """A size on a card; without one, `most` at most."""
        return of_card if self.on_card else min(of_card, most)

    def rows(self, count: int) -> int:
        return self.size(count, 2)

    def tokens(self, count: int) -> int:
        return self.size(count, 24)

    def shape(self, name: str) -> Shape:
        return SHAPES[name] if self.on_card else TINY[name]

    def some(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """All values on a card; without one, the first."""
        return values if self.on_card else values[:1]

    # The device.

    @cached_property
    def card(self) -> Any:
        """What kernels must know of the card; without one, of an H200."""
        self._import_kernels()
        from worker.kernels.cuda.capabilities import Card

        return Card.of(self.target) if self.on_card else Card(90, 132)

    @cached_property
    def operations(self) -> dict[str, Any]:
        """Our kernels by the names of operations."""
        self._import_kernels()
        from worker.kernels.cuda.operations import cuda_operations

        return cuda_operations(self.card)

    def _import_kernels(self) -> None:
        if not self.on_card:
            import interpreted  # noqa: F401  # before any kernel is imported

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.target).to(BF16)

    def finish(self) -> None:
        if self.on_card:
            torch.cuda.synchronize(self.target)

    def give_memory_back(self) -> None:
        if self.on_card:
            torch.cuda.empty_cache()

    def memory(self) -> tuple[int, int]:
        """Bytes that tensors of this process hold on the device, and those that are in use by anyone."""
        if not self.on_card:
            return 0, 0
        free, total = torch.cuda.mem_get_info(self.target)
        return torch.cuda.memory_allocated(self.target), total - free

    @contextmanager
    def poisoned(self) -> Iterator[None]:
        """Fill memory with NaN that is taken for results: who forgets to write a number is found out."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        before, torch.utils.deterministic.fill_uninitialized_memory = (
            torch.utils.deterministic.fill_uninitialized_memory,
            True,
        )
        try:
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = before
            torch.use_deterministic_algorithms(False)

    # The clock.

    def seconds_of(self, work: Callable[[], object], times: int = 20) -> float:
        """The device's seconds of work that waits for nothing: the mean of some calls, after others.

        Many short calls are replayed as one graph, or the host would be measured, which starts them.
        """
        if not self.on_card:
            return self.mean_of(work, 1)
        for _ in range(2):  # they compile kernels and warm caches
            work()
        once = self.mean_of(work, 2)
        if once < _SHORT and (replay := self.repeated(work, times)) is not None:
            replay()
            return self.mean_of(replay, 5) / times
        return self.mean_of(work, max(2, min(times, int(0.2 / once))))

    def median_of(self, work: Callable[[], object], times: int = 10) -> float:
        """The median of calls that wait for their results, after two others."""
        for _ in range(self.size(2, 1)):
            work()
        return statistics.median(self.mean_of(work, 1) for _ in range(self.size(times, 1)))

    def mean_of(self, work: Callable[[], object], times: int) -> float:
        """The mean of calls that have been made before."""
        self.finish()
        started = time.perf_counter()
        for _ in range(times):
            work()
        self.finish()
        return (time.perf_counter() - started) / times

    def repeated(self, work: Callable[[], object], times: int) -> Callable[[], None] | None:
        """A graph of so many calls; None if they cannot be captured."""

        def many() -> None:
            for _ in range(times):
                work()

        if not self.on_card:
            return many
        from worker.kernels.cuda.steps.graph_capture import CudaCapture

        try:
            return CudaCapture(self.target)(many)[1]
        except RuntimeError as error:
            print(f"not captured: {error}", flush=True)
            torch.cuda.synchronize(self.target)
            return None

    # What the card can do at most.

    @property
    def ceilings(self) -> Ceilings:
        """What the card can do at most, which is measured if no section has."""
        if self.known is None:
            self.known = self.measure_ceilings()
            self.tell(known="ceilings", value=asdict(self.known))
        return self.known

    def measure_ceilings(self) -> Ceilings:
        source = torch.randint(100, (self.size(1 << 28, 1000),), dtype=torch.int32, device=self.target)
        copied = torch.empty_like(source)
        moved = 2 * source.nbytes / self.seconds_of(lambda: copied.copy_(source))
        side = self.size(8192, 16)
        matrix = self.random(side, side)
        computed = 2 * side**3 / self.seconds_of(lambda: matrix @ matrix)
        return Ceilings(moved, computed)

    def bandwidth(self, name: str, nbytes: float, seconds: float) -> Result:
        """A result in bytes per second."""
        rate = nbytes / seconds
        return Result(name, "", rate / 1e12, "TB/s", rate / self.ceilings.bytes_per_second)

    def computing(self, name: str, operations: float, seconds: float) -> Result:
        """A result in operations per second."""
        rate = operations / seconds
        return Result(name, "", rate / 1e12, "TFLOP/s", rate / self.ceilings.operations_per_second)

    def floor(self, nbytes: float, operations: float) -> float:
        """The seconds that moving so many bytes, or so many operations, take at least."""
        return max(nbytes / self.ceilings.bytes_per_second, operations / self.ceilings.operations_per_second)
