"""A rank's process with CUDA's kernels, interpreted, whose steps are replayed by the stand-in for graphs.

Its first argument is a folder. `plan.json` there says how models are opened from then on, and what goes
wrong: for each rank the numbers of the forms whose rehearsal or capture runs short of memory. When a model is
closed, the rank writes down there what it has recorded and replayed.
"""

import json
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rank_process
import recorded_nccl
import torch
from interpreted_device import Interpreted
from recorded_graphs import RecordedGraphs

from models import ops
from worker import runner
from worker.config import WorkerConfig
from worker.ranks.process_groups import DeviceGroup, Group, Membership


class _Graphs(RecordedGraphs):
    """Recordings that fail as planned."""

    def __init__(self, plan: dict[str, list[int]]) -> None:
        super().__init__()
        self._plan = plan
        self._form = -1
        self._replays: list[weakref.ref[Callable[[], None]]] = []
        self.group: _Group | None = None
        self.alive_at_close = 0
        """The recordings that could still be replayed when a group was closed."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Each form is warmed up in a rehearsal, and then together with the others."""
        if self.group is not None and self.group.rehearses:
            self._form += 1
            self._fail_at("rehearsals")
        super().warm_up(work)

    def __call__(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self._fail_at("captures")
        result, replay = super().__call__(work)
        self._replays.append(weakref.ref(replay))
        return result, replay

    @property
    def alive(self) -> int:
        """How many recordings could still be replayed."""
        return sum(each() is not None for each in self._replays)

    def _fail_at(self, where: str) -> None:
        if self._form in self._plan.get(where, []):
            raise torch.OutOfMemoryError


class _Group(DeviceGroup):
    def __init__(self, member: Membership, graphs: _Graphs) -> None:
        super().__init__(member)
        self._graphs = graphs

    @property
    def rehearses(self) -> bool:
        return self._rehearses

    def close(self) -> None:
        self._graphs.alive_at_close = self._graphs.alive
        super().close()


class _Device(Interpreted):
    def __init__(self, folder: Path, rank: int) -> None:
        plan = json.loads((folder / "plan.json").read_text())
        super().__init__(plan["most_tokens"])
        self.graphs = self._graphs = _Graphs(plan.get(str(rank), {}))
        self._report = folder / f"{rank}.json"

    def open_group(self, member: Membership) -> Group:
        self._graphs.group = _Group(member, self._graphs)
        return self._graphs.group

    def close(self) -> None:
        graphs = self._graphs
        report = {
            "captured": len(graphs.captured),
            "replayed": graphs.replayed,
            "alive": graphs.alive_at_close,
        }
        self._report.write_text(json.dumps(report))


def main(folder: Path, descriptors: Sequence[str]) -> int:
    def open_device(config: WorkerConfig) -> _Device:
        device = _Device(folder, config.place.rank)
        ops.use(device.kernels)
        return device

    recorded_nccl.install()
    runner.open_device = open_device
    return rank_process.fork_ranks(descriptors)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
