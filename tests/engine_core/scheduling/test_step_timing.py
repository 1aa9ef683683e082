"""Steps are bounded in time while somebody reads a stream. The clock is a script: no machine disturbs it."""

import itertools
import random

import pytest
from msgspec.structs import replace
from scheduler_bench import add, pool
from scripted_clock import STEP, TEXT, TOKEN, Clock, stream, texts

from engine_core.protocol import AddRequest, Admitted, Failed, Pooled, Tokens
from engine_core.scheduling.queue.shares import WorkClass


def test_no_step_takes_longer_than_the_gap_while_a_stream_is_read() -> None:
    clock = Clock()
    clock.add(stream(1))
    clock.step()
    clock.add_all([*texts(range(100, 160)), stream(2, prompt=3000, max_tokens=4)])
    before = len(clock.seconds)
    while 1 in {key[1] for key in clock.scheduler.live}:
        clock.step()
    assert max(clock.seconds[before:-1]) <= 0.0505  # a token more is a fraction of a millisecond
    gaps = [after[0] - now[0] for now, after in itertools.pairwise(clock.outputs[1])]
    assert len(gaps) == 199 and max(gaps) <= 0.0505
    busy = clock.seconds[before : before + 60]
    assert sum(busy) / len(busy) > 0.04  # what is left of a gap is used, but for the first margin
    clock.run()


def test_a_disturbed_machine_keeps_gaps_and_short_steps_make_it_no_more_cautious() -> None:
    """3 % of steps end 12 ms late: which doubles those of a single token, and is a quarter of a gap."""
    rng = random.Random(1)
    clock = Clock(late=lambda: rng.expovariate(1000) + 0.012 * (rng.random() < 0.03))
    clock.add(stream(1, max_tokens=1000))
    clock.steps(300)
    assert clock.scheduler.pace.step_time.margin < 1.25, "nothing has filled a gap yet"
    clock.add_all(texts(range(100, 1100)))
    begun = len(clock.seconds)
    clock.steps(700)
    busy = sorted(clock.seconds[begun:])
    assert busy[693] < 0.053, "99 of 100 gaps are as long as they may be"
    assert sum(busy) / len(busy) > 0.035, "of which a sixth is the step itself"


def test_a_log_of_steps_says_what_they_held_and_took(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for logs in (False, True):
        clock = Clock(options={"enable_logging_iteration_details": logs})
        clock.add(stream(1))
        clock.step()
        clock.add_all(texts(range(100, 102)))
        clock.step()
    first, second = caplog.messages
    assert "6.0 of them for itself: 0 rows that decode, 1 that read prompts, 0 texts, 8 tokens" in first
    assert "a margin of 1.20: 1 rows that decode, 0 that read prompts, 1 texts" in second
    assert second.startswith(f"step 2: {1000 * clock.seconds[1]:.1f} ms, expected 41.")


@pytest.mark.parametrize(("asked", "most"), [(50, 512), (0, 2048)])
def test_without_a_reader_steps_use_the_processor_fully_and_are_no_longer(asked: int, most: int) -> None:
    """Whoever comes meanwhile waits for one of them."""
    clock = Clock(gap_ms=asked)
    clock.add(add(1, [1] * 8, max_tokens=50))  # nobody reads it as it comes
    clock.step()
    clock.add_all(texts(range(100, 120)))
    clock.step()
    assert clock.seconds[-1] == pytest.approx(STEP + TOKEN * most, abs=8 * TOKEN)


@pytest.mark.parametrize(
    ("own", "prompt", "most"), [(STEP, 510, 510), (STEP, 530, 499), (0.06, 1600, 1600), (0.06, 1900, 1488)]
)
def test_steps_read_weights_seldom_and_not_for_the_rest_of_a_prompt(
    own: float, prompt: int, most: int
) -> None:
    """A step takes as long for itself as 20 tokens, or 200: eight times as many, and a rest of fewer."""
    clock = Clock(gap_ms=None, own=own)
    clock.add(add(1, [1] * prompt, max_tokens=1))
    clock.step()
    assert clock.planned is not None
    assert clock.planned.tokens == pytest.approx(most, rel=0.02)
    clock.run()
    assert len(clock.seconds) == 1 + (most < prompt)


def test_a_short_prompt_shares_the_step_that_a_long_one_fills() -> None:
    clock = Clock(gap_ms=None)
    clock.add(add(1, [1] * 3000, max_tokens=1))
    clock.step()
    clock.add(add(2, [2] * 15, max_tokens=1))
    clock.step()
    assert clock.outputs[2] and 1 not in clock.outputs


def test_several_prompts_share_no_long_step() -> None:
    clock = Clock(gap_ms=None, own=0.06)
    for id in range(1, 9):
        clock.add(add(id, [id] * 256, max_tokens=1))
    clock.step()
    assert len(clock.outputs) == 2


def test_a_first_token_does_not_wait_for_texts_that_fill_its_step() -> None:
    clock = Clock()
    clock.add_all(texts(range(100, 160)))
    clock.step()
    assert clock.seconds[-1] > 0.15
    clock.add(stream(1, prompt=32))
    clock.step()
    assert clock.seconds[-1] < 0.0505 and clock.outputs[1]


@pytest.mark.parametrize(("asked", "most"), [(None, 512), (0, 2048)])
def test_first_tokens_come_one_after_the_other(asked: int | None, most: int) -> None:
    """Prompts together in one long step would all be answered at its end."""
    clock = Clock(gap_ms=asked)
    for id in range(1, 9):
        clock.add(add(id, [id] * 256, max_tokens=2))
    clock.step()
    assert clock.seconds[-1] <= STEP + TOKEN * most + 1e-9
    assert clock.seconds[-1] > STEP + TOKEN * (most - 64)


def test_the_bound_ends_with_the_stream() -> None:
    clock = Clock()
    clock.add(stream(1, max_tokens=3))
    clock.step()
    clock.add_all(texts(range(100, 160)))
    clock.step()
    clock.step()
    assert clock.seconds[-1] < 0.0505
    clock.step()
    assert clock.seconds[-1] > 0.15


def test_texts_of_an_encoder_are_limited_and_none_is_cut() -> None:
    """The bound of an encoder's steps: it has no streams, but a model may have both one day."""
    clock = Clock(causal=False)
    clock.scheduler.pace.step_bound.readers = 1
    clock.add_all(texts(range(100, 140), length=400))
    for _ in range(40):
        clock.step()
        assert clock.planned is not None
        assert [row.count for row in clock.planned.step.seqs] == [400]
        assert clock.seconds[-1] <= 0.05 + STEP + 400 * TOKEN  # the target, and one text
    assert not clock.scheduler.live


def test_prompts_get_a_part_of_each_step_even_if_many_streams_take_all_of_the_gap() -> None:
    clock = Clock(gap_ms=10)
    clock.add_all(stream(id, max_tokens=300) for id in range(1, 33))
    clock.step()
    clock.step()
    clock.add(stream(99, prompt=400, max_tokens=2))
    clock.run()
    first = clock.outputs[99][0][0] - 100
    assert first < 1.5
    assert max(clock.seconds[2:300]) <= STEP + 33 * TOKEN + 0.0025 + TOKEN


@pytest.mark.parametrize(
    ("gap_ms", "device", "longest"), [(None, "cpu", 0.051), (None, "cuda:0", 1.0), (0, "cpu", 1.0)]
)
def test_the_gap_is_on_by_default_on_a_cpu_alone(gap_ms: float | None, device: str, longest: float) -> None:
    clock = Clock(gap_ms=gap_ms, device=device)
    clock.add(stream(1))
    clock.step()
    clock.add_all(texts(range(100, 160)))
    clock.step()
    assert longest / 2 < clock.seconds[-1] <= longest


def test_whoever_comes_beside_background_work_waits_for_short_steps() -> None:
    clock = Clock()
    clock.add_all(add(id, [1 + id % 40] * 1000, max_tokens=50, priority=1, weight=0.001) for id in range(90))
    clock.steps(20)
    pace, begun = clock.scheduler.pace, clock.now
    plan = clock.scheduler.schedule(begun)
    assert plan is not None
    assert begun + plan.expected / 2 < pace.plan_at < begun + plan.expected, "the next step is planned late"
    landed = clock.worker.launch(plan.step).result()
    clock.now += plan.expected
    clock.scheduler.results.land(plan, landed, clock.now)
    assert not pace.plan_at, "nothing is in flight"
    clock.add(stream(100, prompt=100, owner="someone"))
    before = clock.now
    while 100 not in clock.outputs:
        clock.step()
    assert clock.now - before < 0.1 and max(clock.seconds) < 0.034, "a step and a half fill the gap"
    clock.run()
    assert not clock.scheduler.pace.step_bound.background


def test_no_class_of_work_starves() -> None:
    clock = Clock(gap_ms=37.5)  # steps of 25 ms
    clock.add(stream(1, max_tokens=1000))
    clock.step()
    ids = itertools.count(1000)
    clock.add_all(texts(range(100, 110), priority=1))  # background
    done: dict[WorkClass, int] = dict.fromkeys(WorkClass, 0)
    live = {WorkClass.FIRST_TOKEN: 0, WorkClass.POOLING: 0}
    for _ in range(600):
        for work_class in live:
            waiting = sum(seq.work_class is work_class for seq in clock.scheduler.live.values())
            for _ in range(5 - waiting):
                id = next(ids)
                one = stream(id, prompt=600, max_tokens=1) if work_class is WorkClass.FIRST_TOKEN else None
                clock.add(one or pool(id, [id % 40 + 1] * TEXT))
        clock.step()
        assert clock.planned is not None
        for seq, row in zip(clock.planned.seqs, clock.planned.step.seqs, strict=True):
            done[seq.work_class] += row.count
    first, pooled, background = (done[each] for each in WorkClass)
    assert 1.6 < first / pooled < 2.4
    assert background == 10 * TEXT


def test_a_single_text_waits_for_two_steps_at_most_beside_a_call_of_thousands() -> None:
    clock = Clock(causal=False)
    clock.add_all(texts(range(1000, 3000), length=64, group=1000))
    for id in range(10, 20):
        clock.step()
        clock.add(pool(id, [id] * 8))
        steps = len(clock.seconds)
        while id not in clock.outputs:
            clock.step()
        assert len(clock.seconds) - steps <= 2


def test_calls_of_many_texts_share_and_single_texts_do_not_shut_them_out() -> None:
    clock = Clock(causal=False)
    clock.add_all(texts(range(1000, 1400), length=64, group=1000))
    for id in range(10, 700):
        clock.add(pool(id, [id % 40] * 64))  # a new call each
        if id % 16 == 0:
            clock.step()
    order = sorted(clock.outputs, key=lambda id: clock.outputs[id][0][0])
    assert 50 < sum(id >= 1000 for id in order) < len(order) - 50


def test_the_shares_of_all_requests_add_up_to_the_time_that_the_engine_was_busy() -> None:
    rng = random.Random(7)
    clock = Clock()
    todo: list[AddRequest] = []
    for id in range(1, 60):
        kind = rng.random()
        if kind < 0.4:
            todo.append(stream(id, prompt=rng.randint(1, 900), max_tokens=rng.randint(1, 60)))
        elif kind < 0.6:
            todo.append(add(id, [id % 40] * rng.randint(1, 300), max_tokens=rng.randint(1, 60), top_p=0.9))
        else:
            todo += texts(range(id, id + 1), length=rng.choice([2, 80, 600]))
    while todo or clock.scheduler.live:
        if todo and rng.random() < 0.3:
            clock.add(todo.pop())
        if not clock.step():
            clock.now += 0.1
    ends = [outputs[-1][1] for outputs in clock.outputs.values()]
    assert len(ends) == 59
    timings = [end.timing for end in ends if not isinstance(end, Failed) and end.timing is not None]
    assert len(timings) == 59 and all(timing.steps for timing in timings)
    busy = clock.scheduler.stats(clock.now).busy
    assert busy == pytest.approx(sum(clock.seconds))
    assert sum(timing.compute for timing in timings) == pytest.approx(busy, rel=1e-6)


def test_a_sequence_pays_for_its_row_of_a_step_that_was_planned_ahead() -> None:
    clock = Clock()
    clock.add(stream(1, stop_token_ids=tuple(range(50))))  # ends with its first token, whatever that is
    first, second = clock.scheduler.schedule(clock.now), clock.scheduler.schedule(clock.now)
    assert first is not None and second is not None
    outputs = [clock.worker.launch(plan.step).result() for plan in (first, second)]
    clock.now += STEP + 8 * TOKEN
    [end] = clock.scheduler.results.land(first, outputs[0], clock.now)[0]
    clock.now += STEP + TOKEN
    assert clock.scheduler.results.land(second, outputs[1], clock.now) == {}
    assert isinstance(end, Tokens) and end.finish == "stop" and end.timing is not None
    assert end.timing.compute == pytest.approx(clock.scheduler.pace.busy, rel=0.01)


def test_a_row_that_reads_more_pays_more() -> None:
    clock = Clock()
    clock.add(stream(1, max_tokens=20))
    clock.step()
    clock.add(texts(range(100, 101), length=400)[0])
    clock.run()
    small, large = clock.outputs[1][-1][1], clock.outputs[100][-1][1]
    assert isinstance(small, Tokens) and isinstance(large, Pooled)
    assert small.timing and large.timing
    assert large.timing.compute > 400 * TOKEN > small.timing.compute / 2


def test_a_request_waits_from_the_moment_in_which_it_was_sent() -> None:
    clock = Clock()
    clock.now = 100.3  # a step ran meanwhile
    clock.add(replace(stream(1, max_tokens=1), sent=100.0))
    clock.run()
    [(_, end)] = clock.outputs[1]
    assert isinstance(end, Tokens) and end.timing is not None and end.expected is not None
    assert end.timing.queued == pytest.approx(0.3)
    assert end.expected == pytest.approx(0.3 + clock.seconds[0], rel=0.02)


def test_a_request_that_will_wait_is_told_how_long() -> None:
    clock = Clock()
    assert clock.add(stream(1, prompt=16)) is None  # begins at once
    clock.step()
    clock.add(stream(2, prompt=3000, max_tokens=2))
    told = clock.add(stream(3, prompt=2000, max_tokens=2))
    at = clock.now
    assert isinstance(told, Admitted) and told.id == 3
    assert clock.add(add(4, [7] * 64, max_tokens=2)) is None  # nobody would read it
    clock.run()
    waited = clock.outputs[3][0][0] - at
    assert told.expected == pytest.approx(waited, rel=0.2)


@pytest.mark.parametrize("seed", range(4))
def test_first_answers_come_when_they_were_expected(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    arrived: dict[int, float] = {}
    for id in range(1, 300):
        length = rng.choice([4, 20, 100, 400])
        kind = rng.random()
        if kind < 0.3:
            request = stream(id, prompt=length, max_tokens=rng.randint(5, 60))
        elif kind < 0.5:
            request = add(id, [id % 40] * length, max_tokens=rng.randint(5, 60))
        else:
            request = texts(range(id, id + 1), length=length)[0]
        arrived[id] = clock.now
        clock.add(request)
        until = clock.now + rng.expovariate(1 / 0.08)
        while clock.now < until:
            if not clock.step():
                clock.now = until
    clock.run()
    good = 0
    for id, outputs in clock.outputs.items():
        at, first = outputs[0]
        assert not isinstance(first, Failed) and first.expected is not None
        waited = at - arrived[id]
        good += abs(first.expected - waited) <= max(0.2 * waited, 0.005)
    assert good / len(arrived) > 0.6


def test_a_cpu_plans_ahead_for_sequences_that_decode_alone() -> None:
    clock = Clock()
    clock.add(stream(1, max_tokens=3))
    assert clock.scheduler.may_plan(0) and not clock.scheduler.may_plan(1)
    clock.step()
    assert clock.scheduler.may_plan(1) and not clock.scheduler.may_plan(2)
    clock.run()
    assert not clock.scheduler.may_plan(1)
    clock = Clock(device="cuda:0")
    clock.add(stream(1, max_tokens=3))
    assert clock.scheduler.may_plan(1)


def test_times_come_with_every_token_if_asked_for() -> None:
    clock = Clock()
    clock.add(stream(1, max_tokens=3, times_each=True))
    clock.add(stream(2, max_tokens=3))
    clock.run()
    timings = [output.timing for _, output in clock.outputs[1] if isinstance(output, Tokens)]
    assert all(timing is not None for timing in timings)
    assert [timing.steps for timing in timings if timing] == [1, 2, 3]
    others = [output.timing for _, output in clock.outputs[2] if isinstance(output, Tokens)]
    assert others[0] is None and others[1] is None and others[2] is not None
