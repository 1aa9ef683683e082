"""Thinking budgets in an engine: the marker comes when the budget is spent, however steps are planned."""

from __future__ import annotations

from collections import deque

import pytest
from bound_life import BoundExecutor, Life
from fake_worker import VOCAB, facts, text_after
from hypothesis import given
from hypothesis import strategies as st
from toy_language import Language, ToyMatcher
from untimed import untimed

from engine_core.protocol import AddRequest, Failed, Thinking
from worker.protocol import Pooling, Sampling

PROMPT = [3, 4, 5]


def reference(thinking: Thinking, language: Language | None, most: int) -> list[int]:
    """The answer of a FakeWorker, by the rules read aloud. The marker has one token, and so have openings."""
    answer: list[int] = []
    thinks, spent = thinking.open, 0
    while len(answer) < most:
        token = text_after([*PROMPT, *answer])
        text = None if language is None else language.written(answer)
        if thinks and spent >= thinking.budget:
            token = thinking.marker[0]
        elif language is not None and text is not None:
            allowed = language.allowed(text)
            token = token if token in allowed else allowed[token % len(allowed)]
        answer.append(token)
        if thinks:
            spent += 1
            thinks = token != thinking.marker[0] and (token,) not in thinking.ends
        else:
            thinks = (token,) in thinking.opens
        if language is not None and text is not None and language.complete([*text, token]):
            break
    return answer


sets = st.sets(st.integers(5, VOCAB - 1), max_size=6).map(lambda ids: tuple((id,) for id in sorted(ids)))


@untimed(200)
@given(
    thinking=st.builds(
        Thinking,
        budget=st.integers(0, 12),
        marker=st.sampled_from([(1,), (2,)]),
        open=st.booleans(),
        opens=sets,
        ends=sets,
    ),
    grammar=st.booleans(),
    steps_ahead=st.integers(0, 3),
    stages=st.sampled_from([1, 1, 2]),
    busy=st.lists(st.booleans(), max_size=20),
)
def test_answers_are_those_of_the_rules(
    thinking: Thinking, grammar: bool, steps_ahead: int, stages: int, busy: list[bool]
) -> None:
    executor = BoundExecutor(facts(), busy=deque(busy))
    life = Life.of(executor, steps_ahead=steps_ahead, pipeline_parallel_size=stages)
    language = None
    if grammar:  # it wakes behind the marker, so nothing may open thinking again
        thinking = Thinking(thinking.budget, thinking.marker, open=True)
        language = Language(wakes=thinking.marker[0])
    expected = reference(thinking, language, 24)
    matcher = None if language is None else ToyMatcher(language)
    life.engine.intake.add(0, AddRequest(0, PROMPT, Sampling(max_tokens=24), thinking=thinking), matcher)
    begun = len(expected) // 2
    if begun:  # another engine has begun it
        again = AddRequest(
            1, PROMPT + expected[:begun], Sampling(max_tokens=24), prompt_len=len(PROMPT), thinking=thinking
        )
        life.engine.intake.add(0, again, None if language is None else ToyMatcher(language))
    life.run()
    assert life.text(0) == expected
    if begun:
        assert expected[:begun] + life.text(1) == expected


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_only_the_last_steps_before_it_is_spent_are_bound(steps_ahead: int) -> None:
    executor = BoundExecutor(facts())
    life = Life.of(executor, steps_ahead=steps_ahead)
    marker = (1, 2, 1)
    add = AddRequest(0, PROMPT, Sampling(max_tokens=40), thinking=Thinking(20, marker, open=True))
    life.engine.add(0, add)
    life.run()
    text = life.text(0)
    assert tuple(text[20:23]) == marker and len(text) == 40
    bound = [each.number for each in executor.told]
    assert set(range(21, 24)) <= set(bound) and len(bound) <= len(marker) + 2 * steps_ahead


@pytest.mark.parametrize(
    ("thinking", "words"),
    [
        (Thinking(1, (VOCAB,)), "outside of the vocabulary"),
        (Thinking(1, (1,), ends=((-1,),)), "outside of the vocabulary"),
    ],
)
def test_budgets_that_cannot_be_kept_are_refused(thinking: Thinking, words: str) -> None:
    life = Life.of(BoundExecutor(facts()))
    life.engine.intake.add(0, AddRequest(0, PROMPT, Sampling(max_tokens=4), thinking=thinking))
    life.engine.add(0, AddRequest(1, PROMPT, Pooling(task="embed"), thinking=Thinking(1, (1,))))
    life.collect(life.engine.take_outputs())
    [failed], [pooled] = life.answers[0], life.answers[1]
    assert isinstance(failed, Failed) and failed.code == 400 and words in failed.message
    assert isinstance(pooled, Failed) and "takes no grammar" in pooled.message
