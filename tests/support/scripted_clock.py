"""A scheduler whose steps take as long as a script says, so that no machine disturbs what is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fake_worker import FakeWorker, facts
from msgspec.structs import replace
from scheduler_bench import add, config, pool

from engine_core.features.installed import make_scheduler
from engine_core.protocol import AddRequest, Admitted, Failed, Pooled, Tokens
from engine_core.scheduling.planned_step import PlannedStep

STEP, TOKEN = 0.006, 0.0003
"""The seconds of a step, and of each of its tokens."""
TEXT = 120


@dataclass
class Clock:
    """A scheduler whose steps take exactly what the script says."""

    gap_ms: float | None = 50
    slots: int = 64
    causal: bool = True
    device: str = "cpu"
    seconds: list[float] = field(default_factory=list)
    outputs: dict[int, list[tuple[float, Tokens | Pooled | Failed]]] = field(default_factory=dict)
    now: float = 100.0
    options: dict[str, object] = field(default_factory=dict[str, object])
    """Further options of the engine."""
    own: float = STEP
    """The seconds of a step, whatever it computes."""
    late: Callable[[], float] = lambda: 0.0
    """What disturbs the machine, in seconds by which the next step ends late."""

    def __post_init__(self) -> None:
        limits = {
            "max_num_seqs": self.slots,
            "max_num_batched_tokens": 2048,
            "max_model_len": 4096 if self.causal else 2048,
        }
        tasks = ("generate", "embed", "token_embed") if self.causal else ("embed", "token_embed")
        blocks = {"num_blocks": 3000, "block_size": 16, "tasks": tasks, "causal": self.causal}
        timed = tuple((tokens, self.own + tokens * TOKEN) for tokens in (1, 101))
        found = replace(facts(**limits, **blocks), device=self.device, timed_steps=timed)
        self.scheduler = make_scheduler(
            config(max_token_gap_ms=self.gap_ms, **self.options), found, vocab_size=50
        )
        self.worker = FakeWorker(found)
        self.planned: PlannedStep | None = None

    def add(self, request: AddRequest) -> Admitted | Failed | None:
        return self.scheduler.add(0, request, self.now)

    def add_all(self, requests: Iterable[AddRequest]) -> None:
        for request in requests:
            self.add(request)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> bool:
        plan = self.planned = self.scheduler.schedule(self.now)
        if plan is None:
            return False
        self.seconds.append(self.own + TOKEN * sum(row.count for row in plan.step.seqs) + self.late())
        self.now += self.seconds[-1]
        for output in self.scheduler.results.land(plan, self.worker.launch(plan.step).result(), self.now).get(
            0, []
        ):
            assert isinstance(output, (Tokens, Pooled, Failed))
            self.outputs.setdefault(output.id, []).append((self.now, output))
        return True

    def run(self) -> None:
        while self.step():
            pass
        assert not self.scheduler.live


def stream(id: int, prompt: int = 8, max_tokens: int = 200, **changes: object) -> AddRequest:
    return add(id, [1 + id % 40] * prompt, max_tokens=max_tokens, streams=True, **changes)


def texts(ids: range, length: int = TEXT, **changes: Any) -> list[AddRequest]:
    return [pool(id, [id % 40 + 1, id // 40 + 1] * (length // 2), **changes) for id in ids]
