from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from spelled import allowed_by, byte_spelling

from engine_core.grammar import compiler
from engine_core.grammar.compile_queue import CompileQueue, QueuedRequest
from engine_core.grammar.compiler import GrammarCompiler
from engine_core.grammar.matcher import TokenMatcher
from engine_core.protocol import AddRequest, Failed, Grammar
from worker.protocol import Sampling

SIZE = 260
LONG_MS = 20_000


def request(id: int, grammar: Grammar, **more: Any) -> AddRequest:
    return AddRequest(id=id, tokens=[1, 2, 3], params=Sampling(max_tokens=9), grammar=grammar, **more)


@pytest.fixture
def queue():
    queue = CompileQueue(SIZE, "")
    queue.spell(byte_spelling(b"<end>", special=1, ends=(256,)))
    yield queue
    queue.stop()


def add(queue: CompileQueue, *requests: AddRequest) -> None:
    for one in requests:
        assert one.grammar is not None
        queue.add(0, one, one.grammar)


def all_of(queue: CompileQueue) -> list[QueuedRequest]:
    found: list[QueuedRequest] = []
    while len(queue):
        queue.wait()
        found += queue.leave()
    return found


def matcher_of(compiled: QueuedRequest) -> TokenMatcher:
    outcome = compiled.outcome()
    assert not isinstance(outcome, Failed)
    return outcome


def test_a_request_waits_until_its_grammar_is_compiled(queue: CompileQueue) -> None:
    add(queue, request(7, Grammar("regex", "[01]")))
    assert (0, 7) in queue and len(queue) == 1
    [compiled] = all_of(queue)
    assert compiled.request.id == 7 and not compiled.paused
    assert allowed_by(matcher_of(compiled).bound(), SIZE) == [48, 49]
    assert len(queue) == 0


def test_each_request_of_one_grammar_has_a_matcher_of_its_own(queue: CompileQueue) -> None:
    grammar = Grammar("regex", "[01]{2}")
    add(queue, *(request(id, grammar) for id in range(3)))
    first, second, third = map(matcher_of, all_of(queue))
    for _ in range(2):
        first.take(48)
    second.take(48)
    assert first.settle(60) and second.settle(60), "they may be late on a busy machine"
    assert (first.complete, second.complete, third.complete) == (True, False, False)


def test_a_known_grammar_is_ready_at_once(queue: CompileQueue) -> None:
    grammar = Grammar("regex", "[01]")
    add(queue, request(1, grammar))
    all_of(queue)
    add(queue, request(2, grammar))
    assert [compiled.request.id for compiled in queue.leave()] == [2]


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(a"),
        Grammar("json", '{"type": "number", "minimum": 3, "maximum": 2}'),
        Grammar("json", '{"$ref": "#"}'),
        Grammar("lark", "start: nothing"),
        Grammar("llguidance", "not json"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(queue: CompileQueue, grammar: Grammar) -> None:
    add(queue, request(1, grammar))
    [compiled] = all_of(queue)
    failed = compiled.outcome()
    assert isinstance(failed, Failed) and failed.code == 400
    assert failed.message.startswith("the grammar of the answer cannot be used: ")
    assert " " in failed.message.partition(": ")[2]
    assert "\n" not in failed.message and "verbose" not in failed.message


def test_another_spelling_takes_the_place_of_the_first(queue: CompileQueue) -> None:
    grammar = Grammar("regex", "ab")
    add(queue, request(1, grammar))
    [first] = all_of(queue)
    queue.spell(byte_spelling(b"ab"))
    add(queue, request(1, grammar))
    [second] = all_of(queue)
    assert [allowed_by(matcher_of(one).bound(), SIZE) for one in (first, second)] == [[ord("a")], [256]]


def test_a_compiled_grammar_wakes_a_poll(queue: CompileQueue) -> None:
    poller = zmq.Poller()
    add(queue, request(1, Grammar("regex", "a")))
    queue.wait()
    queue.register(poller)  # after it is compiled: that must not be missed
    assert poller.poll(LONG_MS) and len(queue.leave()) == 1
    assert not poller.poll(0)
    add(queue, request(2, Grammar("regex", "b")))
    assert poller.poll(LONG_MS) and len(queue.leave()) == 1


def test_what_is_kept_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_core.grammar.compiler.KEPT_BYTES", 1)
    one = GrammarCompiler(byte_spelling(), 256, "", lambda: None)
    first = one.compile(Grammar("regex", "a"))
    assert one.compile(Grammar("regex", "a")) is first
    one.compile(Grammar("regex", "b"))
    assert one.compile(Grammar("regex", "a")) is not first
    one.stop()


def schema(number: int) -> Grammar:
    """A schema that differs from those of all other numbers."""
    names = [f"field_{number}_{position}" for position in range(6)]
    kinds = [{"type": "string", "maxLength": 20}, {"enum": [f"v{number}", f"w{number}"]}]
    properties = {name: kinds[position % 2] for position, name in enumerate(names)}
    return Grammar("json", json.dumps({"type": "object", "properties": properties, "required": names[:1]}))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_many_schemas_leave_the_memory_as_before(
    monkeypatch: pytest.MonkeyPatch, queue: CompileQueue
) -> None:
    # What is kept is made small, so that it is full before most of them come.
    monkeypatch.setattr("engine_core.grammar.compiler.KEPT_BYTES", most := 4 << 20)
    full = 0
    for number in range(700):
        if number == 200:
            full = resident_bytes()
        add(queue, request(number, schema(number)))
        [compiled] = all_of(queue)
        assert matcher_of(compiled).bound() is not None
    used = queue._compiler
    assert used is not None and not len(queue)
    assert used._kept_bytes == sum(size for _, size in used._kept.values()) <= most
    assert 1 < len(used._kept) < 200
    # Were they all kept, it would be some 45 MB more.
    assert resident_bytes() - full < 20 << 20


def test_nothing_is_imported_before_the_first_grammar() -> None:
    program = (
        "import sys, engine_core.engine_main, engine_core.grammar.compile_queue, server.run.commands\n"
        "assert 'llguidance' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars whose text is "slow" are compiled when this is set."""
    free, real = threading.Event(), compiler._compile  # pyright: ignore[reportPrivateUsage]

    def compile(vocabulary: Any, grammar: Grammar, job: Any, executor: Any) -> Any:
        assert grammar.text != "slow" or free.wait(60)
        return real(vocabulary, grammar, job, executor)

    monkeypatch.setattr(compiler, "_compile", compile)
    yield free
    free.set()


def test_who_takes_too_long_to_compile_is_refused_alone(
    queue: CompileQueue, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.05)
    add(queue, request(1, Grammar("regex", "slow"), owner="bad"))
    [late] = all_of(queue)
    failed = late.outcome()
    assert isinstance(failed, Failed) and failed.code == 400 and "seconds to compile" in failed.message
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 60)
    add(queue, request(2, Grammar("regex", "a"), owner="bad"))
    [compiled] = all_of(queue)
    assert allowed_by(matcher_of(compiled).bound(), SIZE) == [ord("a")]


def test_who_leaves_takes_the_work_along(queue: CompileQueue, held: threading.Event) -> None:
    for id in (1, 2):
        add(queue, request(id, Grammar("regex", "slow"), owner="bad"))
    assert queue.discard([(0, 1)]) == [(0, 1)]
    add(queue, request(3, Grammar("regex", "b"), owner="bad"))
    assert not queue.leave(), "another one waits for the same grammar"
    queue.discard([(0, 2)])
    [compiled] = all_of(queue)
    assert compiled.request.id == 3, "the owner's next grammar does not wait for what was left alone"


def test_an_owner_has_only_so_many_here(
    queue: CompileQueue, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_core.grammar.compile_queue.MOST_BY_OWNER", 2)
    for id in range(2):
        add(queue, request(id, Grammar("regex", "slow"), owner="bad"))
    refused = queue.refusal(request(3, Grammar("regex", "a"), owner="bad"))
    assert refused is not None and refused.code == 503
    assert queue.refusal(request(4, Grammar("regex", "a"), owner="good")) is None
