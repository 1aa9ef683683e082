"""Requests whose grammar is compiled before they are scheduled: where they are, and what sees them there."""

import time
from typing import Any

import pytest
import zmq
from bound_life import BoundExecutor
from driven import run_all
from fake_worker import VOCAB, facts
from model_facts import READY, changed
from scheduler_bench import config

from engine_core.engine import Engine
from engine_core.features.installed import make_scheduler
from engine_core.grammar.compiler import GrammarCompiler, Outcome
from engine_core.grammar.grammar_threads import GrammarJob
from engine_core.protocol import AddRequest, Failed, Grammar, OutputsByClient, Spelling, Tokens
from worker.protocol import Sampling

LONG_MS = 20_000
SPELLING = Spelling([bytes([65 + id]) for id in range(VOCAB)], [], [0], "")
"""Tokens 0 to 49 are A to r, and A ends answers."""
ANSWERS = Grammar("regex", "[B-D]{3}")


@pytest.fixture
def engine() -> Engine:
    return start()


def start(*, spelled: bool = True, **changes: object) -> Engine:
    found = facts(max_num_seqs=4)
    ready = changed(READY, vocab_size=VOCAB, folder="")
    engine = Engine(ready, make_scheduler(config(**changes), found, VOCAB), BoundExecutor(found))
    if spelled:
        engine.intake.spell(SPELLING)
    return engine


def add(id: int, grammar: Grammar | None = ANSWERS, **more: Any) -> AddRequest:
    return AddRequest(id=id, tokens=[id + 1, 7], params=Sampling(max_tokens=9), grammar=grammar, **more)


def text(outputs: OutputsByClient, id: int, client: int = 0) -> list[int]:
    found = [one for one in outputs[client] if isinstance(one, Tokens) and one.id == id]
    assert found[-1].finish == "stop"
    return [token for one in found for token in one.tokens]


class SlowCompiler(GrammarCompiler):
    """A compiler that compiles nothing before it is told to."""

    held: list[GrammarJob[Outcome]] = []

    def compile(self, grammar: Grammar, owner: str = "") -> GrammarJob[Outcome]:
        self.real = super().compile(grammar, owner)
        self.held.append(GrammarJob(owner, lambda *_: self.real.outcome()))
        return self.held[-1]

    def finish(self) -> None:
        self.real.wait()
        for one in self.held:
            one.result = self.real.outcome()
            one.finish()
        self.held.clear()
        self._compiling._on_done()  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr("engine_core.grammar.compiler.GrammarCompiler", SlowCompiler)
    SlowCompiler.held.clear()
    return start()


def compiler_of(engine: Engine) -> SlowCompiler:
    queue = engine.intake._compile_queue  # pyright: ignore[reportPrivateUsage]
    compiler = queue and queue._compiler  # pyright: ignore[reportPrivateUsage]
    assert isinstance(compiler, SlowCompiler)
    return compiler


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_answers_are_in_the_language(steps_ahead: int) -> None:
    engine = start(steps_ahead=steps_ahead)
    for id in range(3):
        engine.add(0, add(id))
    engine.add(0, add(3, None))
    told = run_all(engine)
    for id in range(3):
        tokens = text(told, id)
        assert len(tokens) == 3 and set(tokens) <= {1, 2, 3}


def test_a_grammar_that_cannot_be_used_fails_alone(engine: Engine) -> None:
    engine.add(0, add(1, Grammar("regex", "(a")))
    engine.add(0, add(2))
    told = run_all(engine)
    [failed] = [one for one in told[0] if isinstance(one, Failed)]
    assert (failed.id, failed.code) == (1, 400)
    assert len(text(told, 2)) == 3


def test_without_a_spelling_a_grammar_is_refused() -> None:
    engine = start(spelled=False)
    engine.add(0, add(1))
    [failed] = run_all(engine)[0]
    assert isinstance(failed, Failed) and failed.code == 500


def test_others_run_while_a_grammar_is_compiled(slow: Engine) -> None:
    slow.add(0, add(1))
    slow.add(0, add(2, None))
    told: list[int] = []
    while not told:
        told = [one.id for one in slow.step(wait=False).get(0, []) if isinstance(one, Tokens) and one.finish]
    assert told == [2] and slow.busy and slow.idle
    assert slow.stats().waiting == 1
    compiler_of(slow).finish()
    assert len(text(run_all(slow), 1)) == 3


def test_the_loop_wakes_when_a_grammar_is_compiled(slow: Engine) -> None:
    poller = zmq.Poller()
    slow.register(poller)
    slow.add(0, add(1))
    slow.register(poller)
    while poller.poll(0):
        slow.step(wait=False)
    compiler_of(slow).finish()
    assert poller.poll(LONG_MS)
    slow.step(wait=False)
    assert not slow.idle
    slow.stop()


def test_who_leaves_gets_an_end_and_leaves_nothing(slow: Engine) -> None:
    for client in (0, 1):
        slow.add(client, add(1))
        slow.add(client, add(2))
    slow.abort(0, [1, 5])
    assert slow.take_outputs() == {0: [Tokens(id=1, tokens=[], finish="abort")]}
    slow.abort_all(1)
    assert sorted(one.id for one in slow.take_outputs()[1]) == [1, 2]
    slow.abort_all()
    assert [one.id for one in slow.take_outputs()[0]] == [2]
    assert not slow.busy


def test_draining_ends_with_the_last_grammar(slow: Engine) -> None:
    slow.add(0, add(1))
    slow.drain()
    slow.add(0, add(2))
    [refused] = slow.take_outputs()[0]
    assert isinstance(refused, Failed) and (refused.id, refused.code) == (2, 503)
    assert slow.busy
    compiler_of(slow).finish()
    assert len(text(run_all(slow), 1)) == 3


def test_a_paused_request_is_paused_when_it_is_forged(slow: Engine) -> None:
    slow.add(0, add(1))
    slow.pause(0, [1])
    compiler_of(slow).finish()
    for _ in range(3):
        assert slow.step(wait=False) == {}
    slow.pause(0, [1], paused=False)
    assert len(text(run_all(slow), 1)) == 3


def test_what_is_wrong_is_said_before_a_grammar_is_compiled(slow: Engine) -> None:
    slow.add(0, add(1))
    slow.add(0, add(1))
    slow.add(0, AddRequest(id=2, tokens=[99], params=Sampling(max_tokens=4), grammar=ANSWERS))
    duplicate, foreign = slow.take_outputs()[0]
    assert isinstance(duplicate, Failed) and "same id" in duplicate.message
    assert isinstance(foreign, Failed) and foreign.code == 400
    assert len(SlowCompiler.held) == 1


def test_they_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_core.grammar.compiler.GrammarCompiler", SlowCompiler)
    SlowCompiler.held.clear()
    engine = start(max_num_queued_reqs=1)
    for id in range(6):  # there are four slots, and one may wait
        engine.add(0, add(id))
    [refused] = engine.take_outputs()[0]
    assert isinstance(refused, Failed) and (refused.id, refused.code) == (5, 503)


def test_a_grammar_that_takes_seconds_ends_alone_and_holds_no_step(engine: Engine) -> None:
    alike = " | ".join(["s s"] * 400)
    engine.add(0, add(1, Grammar("lark", f'start: "B" "C" s\ns: {alike} | "D"'), owner="bad"))
    engine.add(0, add(2, owner="good"))
    told = list[Any]()
    while engine.busy:
        told += engine.step(wait=False).get(0, [])
        if engine.idle:  # as the engine's process waits
            time.sleep(0.01)
    [failed] = [one for one in told if isinstance(one, Failed)]
    assert (failed.id, failed.code) == (1, 400) and "make it simpler" in failed.message
    assert len(text({0: told}, 2)) == 3
    ended = [one.id for one in told if isinstance(one, Failed) or one.finish]
    assert ended == [2, 1], "the other one has its whole answer meanwhile"
