"""Guesses change nothing of an answer, whether they hold or not, and give their memory back."""

import random
from collections.abc import Callable

import pytest
from fake_worker import facts, reference
from scheduler_bench import Bench, add, config
from scripted_speculator import ScriptedGuesser, use

from engine_core.engine_stats import GuessReport
from engine_core.features.states.prefix_states import PrefixStates
from engine_core.protocol import Tokens
from engine_core.scheduling.planned_step import PlannedStep
from worker.protocol import StepOutput, TokenLogprobs
from worker.worker_facts import WorkerFacts

MakeBench = Callable[..., Bench]


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch) -> MakeBench:
    """A function that makes a bench in which right tokens are guessed, six at a time."""

    def make(
        chance: float = 1.0, limits: WorkerFacts | None = None, most: int = 6, **changes: object
    ) -> Bench:
        guesser = Always(random.Random(0), most, chance)
        use(monkeypatch, guesser)
        chosen = config(**{"steps_ahead": 0, **changes})
        return Bench(chosen, limits or facts(most_rows=64), depth=chosen.depth - 1)

    return make


class Always(ScriptedGuesser):
    """Guesses as many tokens as it may, for each sequence in turn."""

    def pays(self, seqs: object) -> bool:
        return True

    def choose(self, seqs, most_rows):
        left, chosen = most_rows - len(seqs), {}
        for seq in seqs:
            if seq in self.known and (count := min(left, self.most)):
                chosen[seq] = self.guess(seq, count)
                left -= count
        return chosen


def guessed(plan: PlannedStep) -> int:
    """The number of guesses in a step."""
    return sum(len(row.guesses) for row in plan.step.seqs)


def test_right_guesses_come_several_a_step(guessing: MakeBench) -> None:
    bench = guessing()
    bench.add(add(1, [5, 7], max_tokens=16, reports_guesses=True))
    assert bench.all_rows() == [[2], [7], [7], [1]]
    assert bench.text(1) == reference([5, 7], 16)
    assert [len(each.tokens) for each in bench.outputs[0, 1] if isinstance(each, Tokens)] == [1, 7, 7, 1]
    last = bench.last(1)
    assert last.guesses == GuessReport([6, 6], [6, 6]) and last.timing is not None and last.timing.steps == 4
    stats = bench.scheduler.stats(0.0)
    assert stats.guesses is not None and stats.guesses.held == [2] * 6


def test_nothing_is_guessed_beyond_the_limit(guessing: MakeBench) -> None:
    bench = guessing()
    bench.add(add(1, [5, 7], max_tokens=5))
    assert bench.all_rows() == [[2], [4]]
    assert bench.text(1) == reference([5, 7], 5)


def test_what_follows_a_stop_is_dropped(guessing: MakeBench) -> None:
    stop = reference([5, 7], 4)[3]
    bench = guessing()
    bench.add(add(1, [5, 7], max_tokens=30, stop_token_ids=(stop,), reports_guesses=True))
    bench.run()
    assert bench.text(1) == reference([5, 7], 30, (stop,))
    assert bench.last(1).finish == "stop" and bench.last(1).guesses == GuessReport([6], [6])


@pytest.mark.parametrize("steps_ahead", [1, 2])
def test_no_step_is_planned_beside_guesses(guessing: MakeBench, steps_ahead: int) -> None:
    bench = guessing(steps_ahead=steps_ahead)
    bench.add(add(1, [5, 7], max_tokens=30))
    while bench.step():
        assert (
            not any(row.guesses for plan, _ in bench.in_flight for row in plan.step.seqs)
            or len(bench.in_flight) == 1
        )
    assert bench.text(1) == reference([5, 7], 30)
    guesses = bench.scheduler.stats(0.0).guesses
    assert guesses is not None and guesses.drafts >= 3


def test_prompts_are_read_without_guesses_beside_them(guessing: MakeBench) -> None:
    bench = guessing(limits=facts(max_num_batched_tokens=8, most_rows=8))
    bench.add(add(1, [5, 7], max_tokens=40))
    bench.steps(4)
    bench.add(add(2, list(range(1, 31)), max_tokens=3))
    rows = bench.all_rows()
    reading = [each for each in rows if len(each) == 2 and each[1] > 1 and each[0] == 1]
    assert len(reading) >= 4, "its chunks come beside single tokens"
    assert bench.text(1) == reference([5, 7], 40)
    assert bench.text(2) == reference(list(range(1, 31)), 3)


def test_a_newcomer_does_not_wait_where_nothing_is_guessed_yet(guessing: MakeBench) -> None:
    bench = guessing(steps_ahead=1)
    bench.add(add(1, [5, 7], max_tokens=9))
    bench.steps(1)
    assert bench.scheduler.may_plan(1), "the prompt is in flight"


def test_guesses_stay_within_rows_and_budget(guessing: MakeBench) -> None:
    bench = guessing(limits=facts(most_rows=5, max_num_batched_tokens=6))
    bench.add_all(add(id, [id + 1, 2], max_tokens=20) for id in range(3))
    rows = bench.all_rows()
    assert max(map(sum, rows[2:])) == 5
    assert [bench.text(id) for id in range(3)] == [reference([id + 1, 2], 20) for id in range(3)]


def test_a_reader_waits_no_longer_for_guesses_than_it_may(guessing: MakeBench) -> None:
    bench = guessing(max_token_gap_ms=1.0)
    bench.scheduler.pace.step_time._seconds = [9e-4, 1e-4, 0.0, 1e-4, 1e-4]  # pyright: ignore[reportPrivateUsage]
    bench.add(add(1, [5, 7], max_tokens=8, streams=True))
    rows = bench.all_rows()
    assert max(map(sum, rows)) <= 3, "guesses are cut to the time that is left"


def test_guesses_take_memory_from_nobody(guessing: MakeBench) -> None:
    """The last two blocks are kept for the two sequences that run."""
    bench = guessing(limits=facts(num_blocks=6, block_size=4, most_rows=64))
    bench.add_all(add(id, [id + 1, 2], max_tokens=10) for id in range(2))
    bench.run()
    assert bench.scheduler.counters.preemptions == 0
    assert [bench.text(id) for id in range(2)] == [reference([id + 1, 2], 10) for id in range(2)]


def test_suspects_are_computed_without_guesses(guessing: MakeBench) -> None:
    bench = guessing(steps_ahead=0)
    bench.add_all(add(id, [id + 1, 2], max_tokens=20) for id in range(4))
    bench.steps(2)
    plan = bench.scheduler.schedule(bench.now)
    assert plan is not None and guessed(plan)
    bench.scheduler.results.land_failed(plan, bench.now, short_of_memory=False, behind=False)
    bench.worker.failed = False
    assert bench.scheduler.only
    while bench.scheduler.only:
        bench.now += 1
        plan = bench.scheduler.schedule(bench.now)
        assert plan is not None and not guessed(plan)
        bench.collect(bench.scheduler.results.land(plan, bench.worker.launch(plan.step).result(), bench.now))
    bench.run()
    assert [bench.text(id) for id in range(4)] == [reference([id + 1, 2], 20) for id in range(4)]


def test_logprobs_come_with_each_token(guessing: MakeBench) -> None:
    bench = guessing(steps_ahead=0)
    stop = reference([5, 7], 4)[3]
    for id, stops in ((1, ()), (2, (stop,))):
        bench.add(add(id, [5, 7], max_tokens=30, logprobs=0, stop_token_ids=stops))
        bench.steps(1)
        plan = bench.scheduler.schedule(bench.now)
        assert plan is not None and [row.guesses for row in plan.step.seqs] == [reference([5, 7], 7)[1:]]
        output = bench.worker.launch(plan.step).result()
        slot = plan.step.seqs[0].slot
        entries = [TokenLogprobs([token], [-1.0], 1) for token in (*output.held[slot], *output.tokens)]
        told = StepOutput(
            plan.step.number,
            output.tokens,
            [entries[-1]],
            {},
            held=output.held,
            held_logprobs={slot: entries[:-1]},
        )
        bench.collect(bench.scheduler.results.land(plan, told, bench.now))
        last = bench.last(id)
        assert [entry.ids for entry in last.logprobs] == [[token] for token in last.tokens]
        assert len(last.tokens) == (3 if stops else 7)
        bench.abort((0, id))


def test_blocks_are_published_of_what_holds_only(guessing: MakeBench) -> None:
    for chance in (0.0, 0.6, 1.0):
        bench = guessing(chance=chance, limits=facts(block_size=2, num_blocks=200, most_rows=64))
        bench.serve(add(1, [5, 7], max_tokens=30))
        bench.serve(add(2, [5, 7, *reference([5, 7], 30)], max_tokens=5))
        assert bench.cached(2) == 30, "all of the first answer but its last token, in whole blocks"
        assert bench.text(2) == reference([5, 7, *reference([5, 7], 30)], 5)


@pytest.mark.parametrize("size", [4, 8])
def test_the_newest_state_of_an_answer_is_remembered(guessing: MakeBench, size: int) -> None:
    """Also if steps end beyond its block, and only behind guesses that hold."""
    for chance in (0.0, 0.6, 1.0):
        limits = facts(block_size=size, num_blocks=200, most_rows=64, remembered_states=20)
        bench = guessing(chance=chance, limits=limits)
        bench.serve(add(1, [5, 7], max_tokens=30))
        states = bench.find(PrefixStates).pool
        assert (len(states), states.free) == (1, 19)
        prompt = [5, 7, *reference([5, 7], 30)]
        bench.serve(add(2, prompt, max_tokens=5))
        assert bench.cached(2) == 31 // size * size
        assert bench.text(2) == reference(prompt, 5)
