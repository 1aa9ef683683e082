"""Steps that wait for their bounds, in engines with every accident: all are told, once, in order, in time."""

import random
from collections import deque
from math import inf

import pytest
from bound_life import POISON, BoundExecutor, Life
from fake_worker import VOCAB, facts, reference
from hypothesis import given
from hypothesis import strategies as st
from scripted_speculator import ScriptedGuesser, use
from toy_language import Language, ToyMatcher
from untimed import untimed

from engine_core.protocol import AddRequest, Grammar, Tokens
from worker.protocol import Sampling

languages = st.one_of(
    st.none(),
    st.builds(
        Language,
        width=st.sampled_from([1, 4, 20]),
        shortest=st.integers(1, 8),
        wakes=st.sampled_from([None, None, *range(0, VOCAB, 9)]),
        breaks=st.sampled_from([0, 0, 0, 0, 1, 2, 3, -1, -2]),
    ),
)
prompts = st.lists(st.sampled_from([*range(1, 40), POISON]), min_size=1, max_size=12)


@untimed(60)
@given(data=st.data())
def test_every_bound_step_is_told_its_bounds_and_every_text_is_in_its_language(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patched:
        if guesses := data.draw(st.booleans()):
            chance = data.draw(st.sampled_from([0.5, 0.9, 1.0]))
            use(patched, ScriptedGuesser(random.Random(data.draw(st.integers(0, 99))), chance=chance))
        run(data, most_rows=4 if guesses else 0)


def run(data: st.DataObject, most_rows: int) -> None:
    found = facts(
        most_rows=most_rows,
        num_blocks=data.draw(st.sampled_from([12, 16, 64])),
        max_num_seqs=data.draw(st.sampled_from([1, 2, 4])),
        max_num_batched_tokens=data.draw(st.sampled_from([4, 9, 64])),
        max_model_len=40,
    )
    failing = data.draw(st.sets(st.integers(-40, 40), max_size=4))
    executor = BoundExecutor(found, failing, deque(data.draw(st.lists(st.booleans(), max_size=40))))
    life = Life.of(
        executor,
        steps_ahead=data.draw(st.integers(0, 3)),
        pipeline_parallel_size=data.draw(st.sampled_from([1, 1, 2, 3])),
        scheduling_policy=data.draw(st.sampled_from(["fcfs", "priority"])),
    )
    aborted: set[int] = set()
    for id in range(data.draw(st.integers(1, 7))):
        begin(life, id, data)
        for _ in range(data.draw(st.integers(0, 6))):
            life.step(wait=data.draw(st.booleans()))
        some = data.draw(st.sets(st.integers(0, id), max_size=2))
        match data.draw(st.sampled_from(["", "", "abort", "pause", "resume"])):
            case "abort":
                aborted |= some
                life.engine.abort(0, some)
            case "pause":
                life.engine.pause(0, some)
            case "resume":
                life.engine.pause(0, some, paused=False)
            case _:
                pass
    life.engine.pause(0, life.requests, paused=False)
    for _ in range(3000):
        if not life.engine.busy:
            break
        life.step(wait=True)
    assert not life.engine.busy, "stuck"
    life.check(aborted)


def begin(life: Life, id: int, data: st.DataObject) -> None:
    """Add a request, which another engine may have begun."""
    prompt, language = data.draw(prompts), data.draw(languages)
    most = data.draw(st.integers(1, 20))
    whole = reference(prompt, most) if language is None else language.reference(prompt, most)
    begun = 0
    if language is None or not language.breaks:
        begun = data.draw(st.integers(0, len(whole) - 1))
    request = AddRequest(
        id,
        prompt + whole[:begun],
        Sampling(max_tokens=most),
        priority=data.draw(st.integers(0, 2)),
        prompt_len=len(prompt) if begun else 0,
    )
    slow = data.draw(st.sets(st.integers(begun, begun + 9), max_size=4))
    life.add(request, language, frozenset(slow))


def test_who_is_late_sits_steps_out_and_others_go_on() -> None:
    executor = BoundExecutor(facts())
    life = Life.of(executor, steps_ahead=1)
    language = Language(width=20, shortest=50)
    life.add(AddRequest(0, [3, 4], Sampling(max_tokens=9)), language, frozenset({2, 5}))
    life.add(AddRequest(1, [5, 6], Sampling(max_tokens=9)), None)
    while 1 not in life.answers or getattr(life.answers[1][-1], "finish", "failed") is None:
        life.matchers[0].looks *= 100  # it stays late
        life.step(wait=True)
    assert len(life.text(0)) == 2 and life.matchers[0].late
    life.run()
    life.check(set())


def test_who_is_paused_while_it_is_late_stands_still_until_it_is_resumed() -> None:
    life = Life.of(BoundExecutor(facts()))
    life.add(AddRequest(0, [3, 4], Sampling(max_tokens=9)), Language(width=20, shortest=50), frozenset({1}))
    while 0 not in life.matchers or not life.matchers[0].late:
        life.step(wait=False)
    life.engine.pause(0, [0])
    for _ in range(20):
        life.step(wait=False)
    assert not life.matchers[0].late and len(life.text(0)) == 1 and life.engine.idle
    life.engine.pause(0, [0], paused=False)
    life.run()
    life.check(set())


def test_who_leaves_while_it_is_late_leaves_nothing() -> None:
    life = Life.of(BoundExecutor(facts()))
    life.add(AddRequest(0, [3, 4], Sampling(max_tokens=9)), Language(width=20, shortest=50), frozenset({1}))
    while 0 not in life.matchers or not life.matchers[0].late:
        life.step(wait=False)
    life.engine.abort(0, [0])
    life.step(wait=False)
    assert not life.engine.busy and life.engine.next_deadline == inf


def test_bounds_are_told_when_the_step_before_has_landed_and_never_twice() -> None:
    executor = BoundExecutor(facts())
    life = Life.of(executor, steps_ahead=2)
    life.add(AddRequest(0, [3, 4], Sampling(max_tokens=9)), Language(width=20, shortest=50))
    life.step(wait=False)
    assert [each.number for each in executor.told] == [1], "the first waits for no token"
    life.step(wait=False)
    life.step(wait=False)
    assert len(executor.submitted) == 4, "as many as may be in flight, and one behind that which has landed"
    assert [each.number for each in executor.told] == [1, 2], "the third waits for the token of the second"
    life.run()
    assert life.matchers[0].asked == list(range(9)), "one mask for each token"
    life.check(set())


def test_a_complete_text_stops_without_another_token() -> None:
    executor = BoundExecutor(facts())
    life = Life.of(executor, steps_ahead=0)
    language = Language(shortest=2, width=20)
    life.add(AddRequest(0, [3, 4], Sampling(max_tokens=30)), language)
    life.run()
    last = life.answers[0][-1]
    assert isinstance(last, Tokens) and last.finish == "stop" and len(last.tokens) == 1
    assert len(executor.submitted) == len(life.text(0)) < 30


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("shortest", "finish"), [(1, "stop"), (50, "length")])
def test_an_answer_that_has_all_its_tokens_is_ended_by_the_engine_that_takes_it_over(
    shortest: int, finish: str, late: bool
) -> None:
    life = Life.of(BoundExecutor(facts(max_model_len=21)))
    language = Language(shortest=shortest)
    whole = language.reference([1], 20)
    matcher = ToyMatcher(language, slow=frozenset({len(whole)} if late else ()))
    grammar = Grammar("regex", ".*")
    request = AddRequest(0, [1, *whole], Sampling(max_tokens=20), prompt_len=1, grammar=grammar)
    life.engine.intake.add(0, request, matcher)
    life.engine.pause(0, [0], paused=False)  # as if its reader had just gone on
    life.run()
    [answer] = life.answers[0]
    assert isinstance(answer, Tokens) and (answer.tokens, answer.finish) == ([], finish)
    assert not life.executor.submitted
