"""Requests that make steps fail: they end, and all others get what they would have got."""

import random
from collections.abc import Callable
from pathlib import Path

import driven
import pytest
from driven import text
from fake_worker import Landed, reference
from faulty_executor import FaultyExecutor, prompt_of
from sizes import engine_config

from engine_core.engine import Engine
from engine_core.executor import ExecutorDead
from engine_core.protocol import ALONE_TOKENS, AddRequest, Failed, Output, RunsAlone
from engine_core.reason_codes import QUARANTINED
from worker.config import WorkerConfig
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput


def open_engine(model: Path, **changes: object) -> tuple[Engine, FaultyExecutor]:
    made: list[FaultyExecutor] = []

    def make(config: WorkerConfig, report: Callable[[str, float], None]) -> FaultyExecutor:
        made.append(FaultyExecutor(config, report))
        return made[0]

    engine = Engine.start(engine_config(model, **changes), lambda _: None, make)
    return engine, made[0]


def run(engine: Engine) -> dict[int, list[Output]]:
    told = driven.run(engine)
    assert engine.stats().kv_usage == 0 and engine.stats().running == 0
    return told


def is_convicted(outputs: list[Output]) -> bool:
    last = outputs[-1]
    return isinstance(last, Failed) and (last.code, last.error) == (500, QUARANTINED)


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
@pytest.mark.parametrize("place", [0, 1, 7, 15])
def test_one_among_sixteen_is_found_in_six_steps(model: Path, place: int, steps_ahead: int) -> None:
    engine, executor = open_engine(model, max_num_seqs=16, steps_ahead=steps_ahead)
    executor.fault = lambda entered, row: prompt_of(entered)[0] == 40
    for id in range(16):
        engine.add(0, AddRequest(id, [40 if id == place else id + 1, 7], Sampling(max_tokens=6)))
    told = run(engine)
    in_flight = steps_ahead  # steps that were on their way when the first one failed
    assert is_convicted(told[place]) and len(executor.failed) <= 6 + in_flight
    for id in set(range(16)) - {place}:
        assert text(told[id]) == reference([id + 1, 7], 6)


def test_one_that_comes_to_fifteen_that_run_is_found_at_once(model: Path) -> None:
    engine, executor = open_engine(model, max_num_seqs=16)
    executor.fault = lambda entered, row: prompt_of(entered)[0] == 40
    told: dict[int, list[Output]] = {}
    for id in range(15):
        engine.add(0, AddRequest(id, [id + 1, 7], Sampling(max_tokens=20)))
    for _ in range(8):
        for output in engine.step().get(0, []):
            told.setdefault(output.id, []).append(output)
    engine.add(0, AddRequest(15, [40, 7], Sampling(max_tokens=20)))
    for id, outputs in run(engine).items():
        told.setdefault(id, []).extend(outputs)
    assert is_convicted(told[15]) and executor.failed[-1] == 1 and len(executor.failed) <= 3
    for id in range(15):
        assert text(told[id]) == reference([id + 1, 7], 20)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_breaks_all_others_are_right(model: Path, seed: int) -> None:
    rnd = random.Random(seed)
    engine, executor = open_engine(
        model,
        max_num_seqs=rnd.choice([1, 3, 8, 16]),
        steps_ahead=rnd.choice([None, 0, 1, 2]),
        enable_prefix_caching=rnd.random() < 0.5,
        scheduling_policy=rnd.choice(["fcfs", "priority"]),
        max_token_gap_ms=rnd.choice([0.0, 1.0]),
    )
    executor.random = rnd
    kind, at = rnd.choice(["always", "token", "position"]), rnd.randrange(5)

    def fault(entered: NewSeq, row: SeqStep) -> bool:
        if prompt_of(entered)[0] != 40:
            return False
        if kind == "token":
            return row.samples and row.output_index == at
        return kind == "always" or row.start <= at < row.start + row.count

    executor.fault = fault
    asked: dict[int, AddRequest] = {}
    most: dict[int, int] = {}
    told: dict[int, list[Output]] = {}
    aborted: set[int] = set()
    while len(asked) < 20 or engine.busy:
        if len(asked) < 20 and rnd.random() < 0.6:
            id = len(asked)
            prompt = [40 if rnd.random() < 0.15 else rnd.randint(1, 3) for _ in range(rnd.randint(1, 12))]
            alone = rnd.random() < 0.1
            most[id] = rnd.randint(5, 15)
            params, priority = Sampling(max_tokens=most[id]), rnd.randint(0, 2)
            owner = rnd.choice("ab")
            asked[id] = AddRequest(id, prompt, params, priority, owner=owner, streams=True, alone=alone)
            engine.add(0, asked[id])
        if asked and rnd.random() < 0.03:
            aborted.add(rnd.choice(sorted(asked)))
            engine.abort(0, aborted)
        for output in engine.step().get(0, []):
            told.setdefault(output.id, []).append(output)
    assert engine.stats().kv_usage == 0
    for id, add in asked.items():
        if id in aborted:
            continue
        guilty = add.tokens[0] == 40 and (kind != "position" or at < len(add.tokens) + most[id] - 1)
        assert is_convicted(told[id]) == guilty, f"request {id} of {add.tokens}: {kind} {at}"
        whole = reference(add.tokens, most[id])
        assert text(told[id]) == (whole[: len(text(told[id]))] if guilty else whole)


def test_too_little_memory_for_a_step_is_nobody_s_fault(model: Path) -> None:
    engine, executor = open_engine(model, max_num_seqs=8)
    executor.most_tokens = 10
    for id in range(8):
        engine.add(0, AddRequest(id, [id + 1] * 4, Sampling(max_tokens=6)))
    engine.add(0, AddRequest(8, [9] * 11, Sampling(max_tokens=6)))
    told = run(engine)
    assert [text(told[id]) for id in range(8)] == [reference([id + 1] * 4, 6) for id in range(8)]
    assert told[8] == [Failed(8, 503, "there is too little memory for this request now")]


def test_a_lost_device_is_no_request_s_fault(model: Path) -> None:
    engine, executor = open_engine(model)
    executor.submit = lambda step: Landed(ExecutorDead("gone"))  # pyright: ignore
    engine.add(0, AddRequest(1, [1, 2], Sampling(max_tokens=2)))
    with pytest.raises(ExecutorDead):
        run(engine)


def test_one_that_runs_alone_has_no_neighbours_until_it_has_some_tokens(model: Path) -> None:
    engine, executor = open_engine(model, steps_ahead=2)
    rows: list[set[int]] = []

    def watch(entered: NewSeq, row: SeqStep) -> bool:
        rows[-1].add(prompt_of(entered)[0])
        return False

    def submit(step: StepInput) -> Landed:
        rows.append(set())
        return FaultyExecutor.submit(executor, step)

    executor.fault, executor.submit = watch, submit
    for id in (1, 2):
        engine.add(0, AddRequest(id, [id], Sampling(max_tokens=30)))
    told: dict[int, list[Output]] = {}
    for _ in range(3):
        engine.step()
    for id in (3, 4):
        engine.add(0, AddRequest(id, [id], Sampling(max_tokens=30), alone=True))
    told = run(engine)
    begin = next(index for index, row in enumerate(rows) if 3 in row)
    assert rows[begin - 1] == {1, 2}
    assert rows[begin : begin + 2 * ALONE_TOKENS] == [{3}] * ALONE_TOKENS + [{4}] * ALONE_TOKENS
    assert rows[begin + 2 * ALONE_TOKENS] == {1, 2, 3, 4}
    assert isinstance(told[3][0], RunsAlone) and isinstance(told[4][0], RunsAlone)
    assert text(told[3]) == reference([3], 30) and text(told[4]) == reference([4], 30)


def test_the_server_knows_that_a_request_runs_alone_before_it_does(model: Path) -> None:
    engine, executor = open_engine(model)
    engine.add(0, AddRequest(1, [1], Sampling(max_tokens=3), alone=True))
    assert engine.step() == {0: [RunsAlone(1)]}
    assert executor.steps == 0, "the notice has left this process before a step may end it"
    assert text(run(engine)[1]) == reference([1], 3)


def test_those_who_run_give_way_to_suspects_when_memory_is_short(model: Path) -> None:
    engine, _ = open_engine(model, max_num_seqs=2)
    told: dict[int, list[Output]] = {}
    for id in (1, 2):
        engine.add(0, AddRequest(id, [id], Sampling(max_tokens=40)))
    for _ in range(6):
        for output in engine.step().get(0, []):
            told.setdefault(output.id, []).append(output)
    engine.add(0, AddRequest(3, [3], Sampling(max_tokens=40), alone=True))
    for id, outputs in run(engine).items():
        told.setdefault(id, []).extend(outputs)
    assert [text(told[id]) for id in (1, 2, 3)] == [reference([id], 40) for id in (1, 2, 3)]
