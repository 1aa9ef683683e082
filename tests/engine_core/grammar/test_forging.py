from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from spelled import allowed_by, byte_spelling

from engine_core.grammar.forge import Forge
from engine_core.grammar.forging import Forged, Forging
from engine_core.protocol import Add, Failed, Grammar
from engine_core.walking.walker import Walker
from worker.protocol import Sampling

SIZE = 260
LONG_MS = 20_000


def request(id: int, grammar: Grammar, **more: object) -> Add:
    return Add(id=id, tokens=[1, 2, 3], params=Sampling(max_tokens=9), grammar=grammar, **more)


@pytest.fixture
def forging():
    place = Forging(SIZE, "")
    place.spell(byte_spelling(b"<end>", special=1, ends=(256,)))
    yield place
    place.stop()


def add(place: Forging, *requests: Add) -> None:
    for one in requests:
        assert one.grammar is not None
        place.add(0, one, one.grammar)


def all_of(place: Forging) -> list[Forged]:
    found: list[Forged] = []
    while len(place):
        place.wait()
        found += place.leave()
    return found


def walker_of(forged: Forged) -> Walker:
    assert not isinstance(forged.outcome, Failed)
    return forged.outcome


def test_a_request_waits_until_its_grammar_is_compiled(forging: Forging) -> None:
    add(forging, request(7, Grammar("regex", "[01]")))
    assert (0, 7) in forging and len(forging) == 1
    [forged] = all_of(forging)
    assert forged.request.id == 7 and not forged.paused
    assert allowed_by(walker_of(forged).bound(), SIZE) == [48, 49]
    assert len(forging) == 0


def test_each_request_of_one_grammar_has_a_walker_of_its_own(forging: Forging) -> None:
    grammar = Grammar("regex", "[01]{2}")
    add(forging, *(request(id, grammar) for id in range(3)))
    first, second, third = map(walker_of, all_of(forging))
    for _ in range(2):
        first.take(48)
    second.take(48)
    assert (first.complete, second.complete, third.complete) == (True, False, False)


def test_a_known_grammar_is_ready_at_once(forging: Forging) -> None:
    grammar = Grammar("regex", "[01]")
    add(forging, request(1, grammar))
    all_of(forging)
    add(forging, request(2, grammar))
    assert [forged.request.id for forged in forging.leave()] == [2]


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
def test_a_grammar_that_cannot_be_used_is_refused(forging: Forging, grammar: Grammar) -> None:
    add(forging, request(1, grammar))
    [forged] = all_of(forging)
    assert isinstance(forged.outcome, Failed) and forged.outcome.code == 400
    assert forged.outcome.message.startswith("the grammar of the answer cannot be used: ")
    assert " " in forged.outcome.message.partition(": ")[2]
    assert "\n" not in forged.outcome.message and "verbose" not in forged.outcome.message


def test_who_goes_away_leaves_nothing(forging: Forging) -> None:
    add(forging, *(request(id, Grammar("regex", f"a{{{id + 1}}}")) for id in range(3)))
    assert forging.discard([(0, 1), (5, 5)]) == [(0, 1)]
    assert sorted(forged.request.id for forged in all_of(forging)) == [0, 2]


def test_a_paused_request_leaves_paused(forging: Forging) -> None:
    add(forging, request(1, Grammar("regex", "a")))
    forging.set_paused([(0, 1), (0, 2)], paused=True)
    assert [forged.paused for forged in all_of(forging)] == [True]


def test_requests_are_known_by_their_client(forging: Forging) -> None:
    grammar = Grammar("regex", "a")
    for client in (0, 1):
        forging.add(client, request(1, grammar), grammar)
    assert forging.keys() == [(0, 1), (1, 1)]


def test_another_spelling_takes_the_place_of_the_first(forging: Forging) -> None:
    grammar = Grammar("regex", "ab")
    add(forging, request(1, grammar))
    [first] = all_of(forging)
    forging.spell(byte_spelling(b"ab"))
    add(forging, request(1, grammar))
    [second] = all_of(forging)
    assert [allowed_by(walker_of(one).bound(), SIZE) for one in (first, second)] == [[ord("a")], [256]]


def test_a_compiled_grammar_wakes_a_poll(forging: Forging) -> None:
    poller = zmq.Poller()
    add(forging, request(1, Grammar("regex", "a")))
    forging.wait()
    forging.register(poller)  # after it is compiled: that must not be missed
    assert poller.poll(LONG_MS) and len(forging.leave()) == 1
    assert not poller.poll(0)
    add(forging, request(2, Grammar("regex", "b")))
    assert poller.poll(LONG_MS) and len(forging.leave()) == 1


def test_what_is_kept_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_core.grammar.forge.KEPT_BYTES", 1)
    forge = Forge(byte_spelling(), 256, "", lambda: None)
    first = forge.compile(Grammar("regex", "a"))
    assert forge.compile(Grammar("regex", "a")) is first
    forge.compile(Grammar("regex", "b"))
    assert forge.compile(Grammar("regex", "a")) is not first
    forge.stop()


def schema(number: int) -> Grammar:
    """A schema that differs from those of all other numbers."""
    names = [f"field_{number}_{position}" for position in range(6)]
    kinds = [{"type": "string", "maxLength": 20}, {"enum": [f"v{number}", f"w{number}"]}]
    properties = {name: kinds[position % 2] for position, name in enumerate(names)}
    return Grammar("json", json.dumps({"type": "object", "properties": properties, "required": names[:1]}))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_thousand_schemas_leave_the_memory_as_before(
    monkeypatch: pytest.MonkeyPatch, forging: Forging
) -> None:
    # What is kept is made small, so that it is full before the thousand come.
    monkeypatch.setattr("engine_core.grammar.forge.KEPT_BYTES", most := 4 << 20)
    full = 0
    for number in range(1200):
        if number == 200:
            full = resident_bytes()
        add(forging, request(number, schema(number)))
        [forged] = all_of(forging)
        assert walker_of(forged).bound() is not None
    forge = forging._forge
    assert forge is not None and not len(forging)
    assert forge._kept_bytes == sum(size for _, size in forge._kept.values()) <= most
    assert 1 < len(forge._kept) < 200
    # Were they all kept, it would be some 90 MB more.
    assert resident_bytes() - full < 30 << 20


def test_nothing_is_imported_before_the_first_grammar() -> None:
    program = (
        "import sys, engine_core.process, engine_core.grammar.forging, server.commands\n"
        "assert 'llguidance' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
