"""A device in the host's memory that computes with the kernels of CUDA, interpreted, and may replay steps."""

from dataclasses import replace

from interpreted import DEVICE  # before any kernel is imported
from recorded_graphs import RecordedGraphs
from torch import Tensor

from worker.devices.cpu import Cpu
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.draw_kernel import draw, draw_into
from worker.kernels.cuda.operations import cuda_operations
from worker.kernels.cuda.steps.step_graphs import open_graphs
from worker.ranks.process_groups import Groups
from worker.sampling.grouped_logits import BY_TORCH
from worker.steps.compute import Compute, Computing
from worker.steps.output import Fetch

CARD = Card(90, 132)
ON_A_CARD = DEVICE.type != "cpu"
"""Whether workers use these kernels anyway."""


class Interpreted(Cpu):
    """What is sent to this device reaches its tables by the packets of steps, as on a card."""

    def __init__(self, most_tokens: int = 0, *, draws: bool = True, joins: bool = False) -> None:
        """`most_tokens`: those of the largest step that is replayed. `joins`: whether kernels are joined."""
        super().__init__(1)
        self.card = replace(CARD, processors=2) if joins else CARD  # the fewer, the fewer programs there are
        self.kernels, self.scan, self.draw = cuda_operations(self.card), BY_TORCH, draw
        self.graphs = RecordedGraphs()
        self.most_tokens, self.joins = most_tokens, joins
        self._draw_into = draw_into if draws else None

    def fetch(self, values: Tensor) -> Fetch:
        """Copy: the next replay writes to the same memory, and comes after this on a card."""
        return values.clone().numpy

    def quickened(self, compute: Compute, groups: Groups) -> Computing:
        compute.slots.host_tables = None
        opened = self.graphs.with_own_pool
        drawn, most = self._draw_into, self.most_tokens
        return open_graphs(compute, self.card, opened, drawn, groups, most=most, joins=self.joins)
