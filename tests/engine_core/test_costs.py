"""The cost of a step for the engine in counts, so that it cannot grow unnoticed.

Limits are about a quarter above what was counted when they were written. Whoever exceeds one has made
something dearer by mistake, or has a reason and raises it. Whoever makes something cheaper lowers it.
"""

import asyncio
from typing import Any

import msgspec
import pytest
from counted import counted
from fake_worker import FakeWorker, facts
from model_facts import READY

from engine_core.client.dispatcher import Dispatcher
from engine_core.client.in_flight import InFlight, Stream
from engine_core.client.replica_routing import ReplicaTable
from engine_core.config import EngineConfig, Replicas
from engine_core.features.installed import make_scheduler
from engine_core.protocol import AddRequest, Outputs, Tokens
from engine_core.scheduling.planned_step import PlannedStep
from worker.protocol import Sampling, StepOutput

ROWS, NOW = 64, 2.0
CALLS_TO_PLAN, CALLS_TO_LAND = 24, 17
"""Calls of Python and C functions for each decoding row."""
BETWEEN_FITS = 32
"""The steps after which the line of their time is fitted anew (`step_time_model.py`)."""
FIXED_CALLS = 62
"""Calls for each step, whatever its rows."""
CALLS_TO_ASK_FOR_GUESSES = 18
"""More calls for each row of a step if guesses are asked for and none is worth while."""
CALLS_TO_DELIVER = 9
"""Calls with which the client puts a token into its stream, and keeps it in case the engine ends."""
BYTES_TO_WORKER, BYTES_TO_SERVER = 75, 34
"""Bytes for each decoding row."""


class Decoding:
    """A scheduler with so many sequences, each of which gets one token a step."""

    def __init__(self, rows: int, servers: int = 1, **options: object) -> None:
        limits: dict[str, Any] = {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "max_model_len": 256}
        found = facts(num_blocks=4000, block_size=16, most_rows=128, **limits)
        options = {"speculative_config": None, **options}
        self.scheduler = make_scheduler(EngineConfig(model="fake", **options), found, vocab_size=50)  # pyright: ignore[reportArgumentType]
        self.worker = FakeWorker(found)
        for id in range(rows):
            prompt = [1 + (id + i) % 40 for i in range(20)]
            self.scheduler.add(
                id % servers, AddRequest(id=id, tokens=prompt, params=Sampling(max_tokens=99)), 1.0
            )
        self.land(*self.launch())

    def plan(self) -> PlannedStep:
        plan = self.scheduler.schedule(NOW)
        assert plan is not None
        return plan

    def launch(self) -> tuple[PlannedStep, StepOutput]:
        plan = self.plan()
        return plan, self.worker.launch(plan.step).result()

    def land(self, plan: PlannedStep, output: StepOutput) -> dict[int, Outputs]:
        outputs = self.scheduler.results.land(plan, output, NOW + 0.01)
        return {server: Outputs(list(each)) for server, each in outputs.items()}


def calls_of_a_step(rows: int, **options: Any) -> tuple[float, float]:
    """The calls with which a step is planned and lands, in the mean of all between two fits of their time."""
    decoding, planning, landing = Decoding(rows, **options), 0, 0
    for _ in range(BETWEEN_FITS):
        decoding.land(*decoding.launch())
    for _ in range(BETWEEN_FITS):
        with counted() as calls:
            plan = decoding.plan()
        planning += calls.python + calls.c
        output = decoding.worker.launch(plan.step).result()
        with counted() as calls:
            decoding.scheduler.results.land(plan, output, NOW + 0.01)
        landing += calls.python + calls.c
    return planning / BETWEEN_FITS, landing / BETWEEN_FITS


def test_a_row_costs_so_many_calls_and_no_more() -> None:
    few, many = calls_of_a_step(8), calls_of_a_step(8 + ROWS)
    planning, landing = ((after - before) / ROWS for before, after in zip(few, many, strict=True))
    assert planning <= CALLS_TO_PLAN
    assert landing <= CALLS_TO_LAND


def test_guesses_that_gain_nothing_cost_little() -> None:
    options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    without = calls_of_a_step(ROWS)
    planning, landing = calls_of_a_step(ROWS, **options)
    assert planning + landing <= sum(without) + CALLS_TO_ASK_FOR_GUESSES * ROWS


def test_a_step_itself_costs_little() -> None:
    planning, landing = calls_of_a_step(1)
    assert planning + landing <= CALLS_TO_PLAN + CALLS_TO_LAND + FIXED_CALLS


def test_a_step_is_a_small_message() -> None:
    """A row of a step holds no parameters: they were sent once."""
    assert len(msgspec.msgpack.encode(Decoding(ROWS).plan().step)) <= BYTES_TO_WORKER * ROWS


def test_what_a_step_gave_is_a_small_message() -> None:
    decoding = Decoding(ROWS)
    [outputs] = decoding.land(*decoding.launch()).values()
    assert len(outputs.outputs) == ROWS
    assert len(msgspec.msgpack.encode(outputs)) <= BYTES_TO_SERVER * ROWS


@pytest.mark.parametrize("servers", [1, 2])
def test_a_step_is_one_frame_for_each_server(servers: int) -> None:
    decoding = Decoding(ROWS, servers)
    assert sorted(decoding.land(*decoding.launch())) == list(range(servers))


async def test_a_token_costs_the_client_so_many_calls() -> None:
    table = ReplicaTable(Replicas(), servers=1)
    replica = table.replicas[0]
    replica.reachable = True
    table.set_ready(replica, READY)
    dispatcher = Dispatcher(table, lambda number, request: None, restart_wait=0.0)
    stream = Stream(1, asyncio.get_running_loop())
    dispatcher.dispatch([InFlight(AddRequest(1, [1, 2], Sampling(max_tokens=99)), stream)])
    dispatcher.deliver(replica, Tokens(id=1, tokens=[1]))
    outputs = [Tokens(id=1, tokens=[token]) for token in range(ROWS)]
    with counted() as calls:
        for output in outputs:
            dispatcher.deliver(replica, output)
    assert (calls.python + calls.c) / ROWS <= CALLS_TO_DELIVER
