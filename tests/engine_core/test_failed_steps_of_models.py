"""Real engines with a request that makes steps fail: the bits of all others do not change."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bits_lost_engines import SUBJECTS
from bits_schedule import PLAINEST, difference, open_engine
from bits_traffic import answers, write_traffic

from engine_core.protocol import AddRequest
from worker.protocol import Sampling, StepInput
from worker.runner import Runner
from worker.steps.compute import Compute

POISON = 3
"""The first token of one prompt, and of no other."""
PLACES = ((Runner, "_finish"), (Compute, "choose"), (Runner, "launch"))
"""Methods in which a step with that prompt fails."""


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let steps fail in every place in turn; returns the numbers of those that did."""
    failed: list[int] = []
    poisoned: set[int] = set()
    launch = Runner.launch

    def fail_at(owner: type, place: str) -> None:
        original = getattr(owner, place)

        def faulty(self: Any, *given: Any) -> Any:
            if failed and failed[-1] < 0 and PLACES[-failed[-1] % len(PLACES)][1] == place:
                failed[-1] = -failed[-1]
                raise RuntimeError("a fault of this test")
            return original(self, *given)

        monkeypatch.setattr(owner, place, faulty)

    def launch_or_fail(self: Runner, step: StepInput, *rest: Any) -> Any:
        for new in step.new:
            (poisoned.add if new.tokens[0] == POISON else poisoned.discard)(new.slot)
        if any(row.slot in poisoned for row in step.seqs):
            failed.append(-step.number)
        return launch_with_faults(self, step, *rest)

    for owner, place in PLACES:
        fail_at(owner, place)
    launch_with_faults = Runner.launch
    assert launch_with_faults is not launch
    monkeypatch.setattr(Runner, "launch", launch_or_fail)
    return failed


@pytest.mark.parametrize("number", range(3))
def test_the_bits_of_all_others_are_the_same(tmp_path: Path, poison: list[int], number: int) -> None:
    subject, rnd = SUBJECTS[number], random.Random(number)
    with open_engine(tmp_path, subject, PLAINEST) as engine:
        traffic = write_traffic(rnd, subject, 15, engine)
    turns = [conversation[0] for conversation in traffic][:15]
    requests = [AddRequest(id, turn.prompt, turn.params) for id, turn in enumerate(turns)]
    bad = AddRequest(99, [POISON, 7, 9], Sampling(max_tokens=5))
    requests.insert(rnd.randrange(15), bad)
    limits = replace(PLAINEST, max_num_seqs=16, num_gpu_blocks_override=700, enable_prefix_caching=True)
    with open_engine(tmp_path, subject, limits) as engine:
        results = answers(engine, requests)
    assert (results[99].finish or "").startswith("failed: the engine fails whenever")
    assert 2 <= len(poison) <= 6 and min(poison) > 0, "each of these steps failed"
    assert [difference(turn, results[id], aborted=False) for id, turn in enumerate(turns)] == [""] * 15
