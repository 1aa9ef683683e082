"""Media items after failed steps: what the worker holds then, and what comes from disk meanwhile."""

import random
from collections import Counter, deque
from collections.abc import Callable

from fake_media import picture, seen_tokens
from fake_worker import FakeWorker, Landed, facts, reference
from msgspec.structs import replace
from scheduler_bench import Bench, add, config

from engine_core.protocol import AddRequest, Failed, Tokens
from engine_core.scheduling.planned_step import PlannedStep
from worker.protocol import StepBounds, StepInput

CAT, DOG, OWL = b"cat", b"dog", b"owl"


def asks(id: int, *hashes: bytes, streams: bool) -> AddRequest:
    """A request with pictures of four tokens, a token of text before each of them, and one at the end."""
    items = tuple(picture(each, 1 + 5 * at, 4) for at, each in enumerate(hashes))
    return add(id, [7] * (5 * len(hashes)) + [9], media=items, streams=streams)


class FaultyWorker(FakeWorker):
    """Fails some steps after it has forgotten and encoded what they say, or half of it."""

    chance: random.Random

    def launch(self, step: StepInput, following: Callable[[], StepBounds] | None = None) -> Landed:
        try:
            if (step.fresh or not self.failed) and self.chance.random() < 0.06:
                if self.chance.random() < 0.5:
                    self.media.follow(replace(step, seqs=[]), {})
                raise RuntimeError("this step fails by chance")
            return super().launch(step, following)
        except Exception as error:
            self.failed = True
            return Landed(error)


class FaultyBench(Bench):
    failing = False

    def step(self) -> bool:
        self.now += 1
        waits = self.failing and self.in_flight
        may_plan = not waits and self.scheduler.may_plan(len(self.in_flight))
        plan = self.scheduler.schedule(self.now) if may_plan else None
        if plan is not None:
            step = replace(plan.step, fresh=self.failing)
            self.failing = False
            self.in_flight.append((plan, self.worker.launch(step)))
        elif self.in_flight:
            self._land(*self.in_flight.popleft())
        return bool(plan or self.scheduler.live or self.in_flight)

    def _land(self, plan: PlannedStep, landed: Landed) -> None:
        results = self.scheduler.results
        if isinstance(landed.output, Exception):
            assert "chance" in str(landed.output) or self.failing, landed.output
            behind, self.failing = self.failing, True
            self.collect(results.land_failed(plan, self.now, short_of_memory=False, behind=behind))
        else:
            self.collect(results.land(plan, landed.output, self.now))


def test_after_failed_steps_items_are_encoded_again() -> None:
    seen = Counter()
    for seed in range(150):
        rnd = random.Random(seed)
        limits = facts(
            most_embeddings=rnd.choice([4, 9, 40]),
            kept_embeddings=rnd.choice([0, 0, 5]),
            max_num_batched_tokens=rnd.choice([8, 64]),
            num_blocks=20,
        )
        limits = replace(limits, tower_layers=rnd.choice([0, 1, 3, 9]))
        gap = rnd.choice([None, 0.5])
        made = FaultyBench(config(steps_ahead=rnd.choice([0, 1, 2]), max_token_gap_ms=gap), limits)
        made.worker = FaultyWorker(limits)
        made.worker.chance = rnd
        reads = rnd.random() < 0.5
        todo = deque(
            asks(id, *rnd.choices((CAT, DOG, OWL), k=rnd.randint(0, 3)), streams=reads) for id in range(10)
        )
        requests = list(todo)
        while todo or made.scheduler.live or made.in_flight:
            if todo and rnd.random() < 0.5:
                made.add(todo.popleft())
            made.step()
            assert made.now < 3000, f"no end with seed {seed}"
        for request in requests:
            last = made.outputs[0, request.id][-1]
            seen[type(last)] += 1
            assert not isinstance(last, Tokens) or made.text(request.id) == reference(
                seen_tokens(request), 4
            ), f"seed {seed}"
        seen["encoded"] += made.media.encoded
    assert seen[Tokens] > 1000 and seen[Failed] > 20 and seen["encoded"] > 800, seen
