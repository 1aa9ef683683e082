"""Engines are told how tokens are spelled before their first request with a grammar, and only then."""

from scripted_engine import PARAMS, Connect, Replicated, Script, all_of, next_of
from spelled import byte_spelling

from engine_core.client.in_flight import Stream
from engine_core.protocol import AddRequest, Failed, Grammar, Outputs, Request, Spelling, Tokens

SPELLING = byte_spelling()
GRAMMAR = Grammar("regex", "[01]+")


async def found(connect: Connect) -> tuple[Replicated, Script]:
    both = connect(restart_wait=60)
    both.client.spell(SPELLING)
    return both, await both.start(0)


def kinds(requests: list[Request]) -> list[type]:
    return [type(request) for request in requests]


async def test_an_engine_learns_the_spelling_once_with_its_first_grammar(connect: Connect) -> None:
    both, engine = await found(connect)
    both.client.submit([1], PARAMS)
    assert kinds(await engine.received(1)) == [AddRequest]
    for _ in range(2):
        both.client.submit([1], PARAMS, grammar=GRAMMAR)
    first, *rest = await engine.received(3)
    assert first == SPELLING
    assert [add.grammar for add in rest if isinstance(add, AddRequest)] == [GRAMMAR] * 2


async def test_an_engine_that_was_started_again_learns_it_again(connect: Connect) -> None:
    both, engine = await found(connect)
    stream = both.client.submit([1], PARAMS, grammar=GRAMMAR)
    await engine.received(2)
    engine.answer(stream, 8)
    assert await next_of(stream) == Tokens(id=stream.id, tokens=[8])
    both.client.engine_exited(0, -9)
    both.end(engine)
    again = await both.start(0)
    spelling, add = await again.received(2)
    assert isinstance(spelling, Spelling) and isinstance(add, AddRequest)
    assert (add.grammar, add.tokens, add.prompt_len) == (GRAMMAR, [1, 8], 1)


async def test_a_grammar_that_fails_in_an_answer_is_the_client_s_fault(connect: Connect) -> None:
    both, engine = await found(connect)
    stream: Stream[Tokens] = both.client.submit([1], PARAMS, grammar=GRAMMAR)
    await engine.received(2)
    engine.answer(stream, 8)
    engine.send(Outputs([Failed(stream.id, 400, "too complex at output token 2")]))
    outputs = await all_of(stream)
    assert outputs[-1] == Failed(stream.id, 400, "too complex at output token 2")
