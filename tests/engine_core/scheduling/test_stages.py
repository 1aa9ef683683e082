"""A model in several stages: as many steps at a time, with the sequences spread over them."""

from __future__ import annotations

from collections import deque

import pytest
import zmq
from fake_worker import FakeWorker, Landed, facts, reference, vectors_of
from model_facts import READY
from no_calls import NoCalls
from scheduler_bench import Bench, add, config, pool

from engine_core.config import EngineConfig
from engine_core.engine import Engine
from engine_core.features.installed import make_scheduler
from engine_core.protocol import AddRequest, Failed
from worker.protocol import Pooling, Sampling, StepBounds, StepInput, StepOutput
from worker.worker_facts import WorkerFacts


def staged(stages: int, limits: WorkerFacts, **changes: object) -> Bench:
    chosen = config(pipeline_parallel_size=stages, **changes)
    return Bench(chosen, limits, depth=chosen.depth - 1)


def fill(bench: Bench) -> list[list[int]]:
    """Plan until no further step may be in flight; returns the number of rows of each."""
    rows = []
    while len(bench.in_flight) < bench.config.depth:
        plan = bench.scheduler.schedule(0.0)
        if plan is None:
            break
        bench.check_stages(plan)
        rows.append([row.count for row in plan.step.seqs])
        bench.in_flight.append((plan, bench.worker.launch(plan.step)))
    return rows


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_stage_has_its_share_of_the_sequences(stages: int) -> None:
    bench = staged(stages, facts())
    bench.add_all(add(id, [id + 1, 2], max_tokens=20) for id in range(8))
    shares = [len(rows) for rows in fill(bench)]
    assert len(shares) == stages and sum(shares) == 8
    assert max(shares) - min(shares) <= 1
    bench.run()
    for id in range(8):
        assert bench.text(id) == reference([id + 1, 2], 20)


def test_one_stage_takes_all_at_once() -> None:
    bench = staged(1, facts(), steps_ahead=1)
    bench.add_all(add(id, [id + 1, 2], max_tokens=20) for id in range(8))
    assert fill(bench) == [[2] * 8, [1] * 8]


def test_a_sequence_waits_for_its_token_but_not_for_its_chunks() -> None:
    bench = staged(3, facts(max_num_batched_tokens=8))
    bench.add(add(1, list(range(1, 21)), max_tokens=2))
    assert fill(bench) == [[8], [8], [4]]
    bench.run()
    assert bench.text(1) == reference(list(range(1, 21)), 2)


def test_texts_to_be_pooled_are_spread_too() -> None:
    bench = staged(2, facts(causal=False, tasks=("embed",), max_model_len=16))
    bench.add_all(pool(id, [id + 1, 7]) for id in range(5))
    assert fill(bench) == [[2, 2, 2], [2, 2]]
    bench.run()
    assert bench.pooled(4).vectors == vectors_of([5, 7], Pooling(task="embed"))


def test_steps_that_became_unequal_become_equal_again() -> None:
    bench = staged(2, facts())
    bench.add_all(add(id, [id + 1], max_tokens=40) for id in range(8))
    fill(bench)
    first, second = ([seq.key for seq in plan.seqs] for plan, _ in bench.in_flight)
    assert len(first) == len(second) == 4
    bench.abort(*second[1:])
    sizes = []
    for _ in range(8):
        bench.step()
        sizes.append(len(bench.rows))
    assert sizes[-4:] in ([3, 2, 3, 2], [2, 3, 2, 3])


def test_nobody_starves_while_a_long_prompt_is_read() -> None:
    bench = staged(2, facts(max_num_batched_tokens=8, max_model_len=128))
    bench.add_all(add(id, [id + 1], max_tokens=40) for id in range(5))
    bench.steps(6)
    bench.add(add(9, list(range(1, 41)), max_tokens=1))
    for _ in range(60):
        bench.step()
        if (0, 9) in bench.outputs:
            break
    assert bench.text(9) == reference(list(range(1, 41)), 1)
    assert all(len(bench.outputs[0, id]) < 40 for id in range(5)), "it was read while the others ran"


class Pipeline(NoCalls):
    """An executor that counts the most steps in flight, and lets them land in order."""

    def __init__(self) -> None:
        self.worker = FakeWorker(facts())
        self.in_flight: deque[int] = deque()
        self.most = 0

    def start(self) -> WorkerFacts:
        return self.worker.facts

    def submit(self, step: StepInput) -> PipelineStep:
        self.in_flight.append(step.number)
        self.most = max(self.most, len(self.in_flight))
        return PipelineStep(self, step.number, self.worker.launch(step))

    def bind(self, bounds: StepBounds) -> None: ...

    def idle(self, *, wait: bool = False) -> bool:
        return False

    def register(self, poller: zmq.Poller) -> None:
        pass

    def stop(self) -> None:
        pass

    def check(self) -> None:
        pass


class PipelineStep:
    def __init__(self, pipeline: Pipeline, number: int, landed: Landed) -> None:
        self.pipeline, self.number, self.landed = pipeline, number, landed

    def done(self) -> bool:
        return True

    def result(self) -> StepOutput:
        assert self.pipeline.in_flight.popleft() == self.number
        return self.landed.result()


@pytest.mark.parametrize(
    ("stages", "ahead", "depth"), [(1, 0, 1), (1, 1, 2), (2, 1, 2), (4, 1, 4), (2, 2, 3)]
)
def test_the_engine_keeps_as_many_steps_in_flight_as_there_are_stages(
    stages: int, ahead: int, depth: int
) -> None:
    chosen = EngineConfig(model="", pipeline_parallel_size=stages, steps_ahead=ahead)
    pipeline = Pipeline()
    engine = Engine(READY, make_scheduler(chosen, facts(), 50), pipeline)
    for id in range(8):
        engine.add(0, AddRequest(id=id, tokens=[id + 1, 3], params=Sampling(max_tokens=12)))
    told: dict[int, list[int]] = {id: [] for id in range(8)}
    while engine.busy:
        for output in engine.step().get(0, []):
            assert not isinstance(output, Failed)
            told[output.id] += output.tokens  # pyright: ignore[reportAttributeAccessIssue]
    assert pipeline.most == depth
    assert told == {id: reference([id + 1, 3], 12) for id in range(8)}
