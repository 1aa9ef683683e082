"""A CUDA device without a card: its kernels are taken instead of started, on tensors without memory.

Tests import `interpreted` before this module, as before any kernel; programs that compile kernels do not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from meta_device import Meta, NoMixing

from models import ops
from worker import runner as runner_module
from worker.config import WorkerConfig
from worker.devices.cpu import Cpu
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.draw_kernel import draw, draw_into
from worker.kernels.cuda.launch import KernelLaunch, taking
from worker.kernels.cuda.operations import cuda_operations
from worker.kernels.cuda.steps.step_graphs import open_graphs
from worker.ranks.process_groups import Groups
from worker.runner import Runner
from worker.steps.compute import Compute, Computing
from worker.steps.warmup import warm_up_steps


class MetaCuda(Meta):
    """A card that is not there. Graphs are captured by computing once, and replayed by counting."""

    def __init__(self, most_tokens: int = 0, card: Card = Card(90, 132), *, joins: bool = False) -> None:
        """`most_tokens`: those of the largest step that is replayed. `joins`: whether kernels are joined."""
        super().__init__()
        self.joins = joins
        self.card = card
        self.kernels, self.draw = cuda_operations(card), draw
        self.replays = 0
        self.launched: list[list[str]] = []
        """The kernels and operations of each graph, without views and memory that is only taken."""
        self.most_tokens = most_tokens

    def quickened(self, compute: Compute, groups: Groups) -> Computing:
        most, joins = self.most_tokens, self.joins
        return open_graphs(compute, self.card, lambda: self, draw_into, groups, most=most, joins=joins)

    def warm_up(self, work: Callable[[], object]) -> None:
        """Do nothing: there is nothing to compile. This device is its own `Capture`."""

    def __call__(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        def replay() -> None:
            self.replays += 1

        with NoMixing():
            return work(), replay

    def seconds(self, replay: Callable[[], None]) -> float:
        """Nothing, so that what is recorded last stays."""
        return 0.0


class Counted(NoMixing):
    """Counts operations that are not views, and the copies from the host among them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.sent = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.sent += args[0].is_meta and not args[1].is_meta
        if not getattr(func, "is_view", False):
            self.operations.append(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def opened(config: WorkerConfig, device: Cpu) -> Iterator[tuple[Runner, list[KernelLaunch]]]:
    """A worker on a device, which has taken its first steps, and the kernels that it would start.

    A device with memory starts them.
    """

    def open_device(_: object) -> Cpu:
        ops.use(device.kernels)
        return device

    def warm_up(self: Runner) -> tuple[()]:
        slot = self._slots.dummy  # pyright: ignore[reportPrivateUsage]
        for step in warm_up_steps(self.facts, slot):
            self.launch(step)  # no result is read: there may be none
        return ()

    calls: list[KernelLaunch] = []
    patched = ((runner_module, "open_device", open_device), (Runner, "_warm_up", warm_up))
    before = [getattr(owner, name) for owner, name, _ in patched]
    for owner, name, value in patched:
        setattr(owner, name, value)
    try:
        with taking(calls.append) if isinstance(device, Meta) else nullcontext():
            yield Runner(config, lambda phase, part: None), calls
    finally:
        for (owner, name, _), value in zip(patched, before, strict=True):
            setattr(owner, name, value)
        ops.use({})
