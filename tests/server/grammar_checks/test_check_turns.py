import asyncio

import pytest

from server.errors import TooManyRequests
from server.grammar_checks import check_turns
from server.grammar_checks.check_turns import CheckTurns


async def begin(turns: CheckTurns, *owners: str, order: list[str]) -> list[asyncio.Task[None]]:
    async def take(owner: str) -> None:
        async with turns.turn(owner):
            order.append(owner)

    tasks = [asyncio.create_task(take(owner)) for owner in owners]
    await asyncio.sleep(0)
    return tasks


async def test_owners_have_turns_however_much_each_asks() -> None:
    turns, order = CheckTurns(), list[str]()
    async with turns.turn("a"):
        tasks = await begin(turns, "a", "a", "a", "b", "c", "b", order=order)
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c", "a", "b", "a"]


async def test_an_owner_waits_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_turns, "MOST_WAITING", 1)
    turns, order = CheckTurns(), list[str]()
    async with turns.turn("a"):
        tasks = await begin(turns, "a", "a", "b", order=order)
        with pytest.raises(TooManyRequests):
            await tasks[1]
    await asyncio.gather(tasks[0], tasks[2])
    monkeypatch.setattr(check_turns, "MOST_SECONDS", 0.01)
    async with turns.turn("a"):
        [late] = await begin(turns, "b", order=order)
        with pytest.raises(TooManyRequests):
            await late
    async with turns.turn("a"):
        pass  # nobody keeps the turn


async def test_who_leaves_gives_the_turn_away() -> None:
    turns, order = CheckTurns(), list[str]()
    async with turns.turn("a"):
        gone, stays = await begin(turns, "b", "c", order=order)
    gone.cancel()  # its turn has just come
    await stays
    assert order == ["c"]
