"""A model in several stages: as many steps at a time, with the sequences spread over them."""

from __future__ import annotations

import pytest
from fake_worker import facts, reference, vectors_of
from scheduler_bench import Bench, add, config, pool

from worker.protocol import Pooling
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
