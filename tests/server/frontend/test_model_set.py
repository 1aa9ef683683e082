"""Models come and go within a budget, whatever is asked for and in whatever order: none that is in use, and
every request has an end."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import ApiError, Unavailable
from server.frontend import model_set
from server.frontend.model_set import REST_SECONDS, RETRY_SECONDS, ModelSet, Slot

BESIDE = 100
ENDS = {"answered", "left", "it is broken", "its engine has ended"}


@dataclass
class Served:
    """A loaded model, as requests have it."""

    name: str
    users: int = 0


@dataclass
class ScriptedLoader:
    """Loads nothing, in some turns of the event loop, and checks that the memory for it would be there."""

    sizes: dict[str, int]
    budget: int
    turns: int = 2
    fails: set[str] = field(default_factory=set)
    tokenizer: int = 0
    """The bytes that the server itself keeps for each loaded model."""
    here: dict[str, Served] = field(default_factory=dict)
    """What has memory now."""
    loads: list[str] = field(default_factory=list)

    async def measure(self, slot: Slot[Served], /) -> int:
        await self._take_time()
        return self.sizes[slot.name]

    async def load(self, slot: Slot[Served], /) -> Served:
        assert slot.name not in self.here
        self.loads.append(slot.name)
        self.here[slot.name] = Served(slot.name)
        taken = sum(self.sizes[name] for name in self.here) + BESIDE
        assert taken <= self.budget, self.here
        await self._take_time()
        if slot.name in self.fails:
            del self.here[slot.name]
            raise Unavailable("it is broken")
        return self.here[slot.name]

    async def unload(self, slot: Slot[Served], served: Served, /) -> None:
        assert served.users == 0
        await self._take_time()
        assert served.users == 0
        del self.here[slot.name]

    async def taken_beside(self, loaded: Iterable[Slot[Served]], /) -> int:
        await self._take_time()
        return BESIDE + self.tokenizer * len(self.here)

    async def _take_time(self) -> None:
        for _ in range(self.turns):
            await asyncio.sleep(0)


def make_set(
    sizes: dict[str, int], budget: int, now: list[float] | None = None
) -> tuple[ModelSet[Served], ScriptedLoader, dict[str, Slot[Served]]]:
    loader = ScriptedLoader(sizes, budget)
    clock = (lambda: now[0]) if now is not None else None
    models = ModelSet(loader, budget, *([clock] if clock else []))
    slots = {name: Slot[Served](name) for name in sizes}
    models.slots += slots.values()
    return models, loader, slots


async def use(models: ModelSet[Served], slot: Slot[Served], turns: int = 3) -> str:
    """Answer one request, which takes some turns of the loop; returns what came of it."""
    try:
        served = await models.enter(slot)
    except ApiError as error:
        return error.message
    served.users += 1
    for _ in range(turns):
        await asyncio.sleep(0)
        assert slot.served is served or slot.error is not None
    served.users -= 1
    models.leave(slot)
    return "answered"


async def test_a_model_is_loaded_when_it_is_asked_for_and_once() -> None:
    models, loader, slots = make_set({"a": 10, "b": 10}, 1000)
    assert await asyncio.gather(*(use(models, slots["a"]) for _ in range(5))) == ["answered"] * 5
    assert loader.loads == ["a"]


async def test_memory_of_the_server_that_goes_with_a_model_is_room_for_another() -> None:
    models, loader, slots = make_set({"a": 20, "b": 20, "large": 380}, BESIDE + 390)
    loader.tokenizer = 10
    for name in ("a", "b"):
        assert await use(models, slots[name]) == "answered"
    loader.tokenizer = 200  # that is more than what the models themselves would give back
    assert await use(models, slots["large"]) == "answered"
    assert loader.here.keys() == {"large"}


async def test_the_least_recently_used_goes() -> None:
    models, loader, slots = make_set({"a": 100, "b": 100, "c": 100, "d": 100}, BESIDE + 300)
    for name in "abcad":
        await use(models, slots[name])
    assert loader.here.keys() == {"a", "c", "d"}


async def test_one_that_is_in_use_is_waited_for_and_lets_nobody_else_in_after_a_while() -> None:
    models, loader, slots = make_set({"a": 100, "b": 100}, BESIDE + 100)
    served = await models.enter(slots["a"])
    served.users += 1
    second = asyncio.create_task(use(models, slots["b"]))
    while not slots["a"].closed:
        await asyncio.sleep(0.01)
    third = asyncio.create_task(use(models, slots["a"]))
    await asyncio.sleep(0.05)
    assert not second.done()
    assert not third.done()
    served.users -= 1
    models.leave(slots["a"])
    assert await asyncio.gather(second, third) == ["answered", "answered"]
    assert loader.loads == ["a", "b", "a"]


async def test_background_work_takes_no_model_from_others_and_uses_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_set, "LOOK_SECONDS", 0.001)
    now = [100.0]
    models, loader, slots = make_set({"a": 300, "b": 300, "c": 600}, budget=BESIDE + 600, now=now)
    lines = [asyncio.create_task(models.enter(slots["a"], background=True)) for _ in range(2)]
    await asyncio.gather(*lines)
    assert loader.loads == ["a"], "there was room"
    for _ in lines:
        models.leave(slots["a"])
    assert await use(models, slots["b"]) == "answered"
    late = asyncio.create_task(models.enter(slots["c"], background=True))
    await asyncio.sleep(0.01)
    assert not late.done() and not loader.here.keys() - {"a", "b"}
    assert await use(models, slots["b"]) == "answered", "it is let in"
    now[0] += REST_SECONDS
    await asyncio.wait_for(late, 5)
    assert loader.here.keys() == {"c"}
    never = asyncio.create_task(models.enter(Slot[Served]("c2"), background=True))
    loader.sizes["c2"] = 700
    models.leave(slots["c"])
    now[0] += REST_SECONDS
    with pytest.raises(Unavailable, match="does not fit"):
        await asyncio.wait_for(never, 5)


async def test_one_that_never_fits_is_refused_and_evicts_nothing() -> None:
    models, loader, slots = make_set({"a": 100, "b": 1001, "c": 100}, BESIDE + 1000)
    await use(models, slots["a"])
    await use(models, slots["c"])
    assert "does not fit" in await use(models, slots["b"])
    assert loader.here.keys() == {"a", "c"}


async def test_one_that_cannot_be_loaded_is_tried_again_later_or_when_it_is_wanted() -> None:
    now = [0.0]
    models, loader, slots = make_set({"a": 100}, 1000, now=now)
    loader.fails = {"a"}
    assert [await use(models, slots["a"]) for _ in range(2)] == ["it is broken"] * 2
    assert loader.loads == ["a"]
    now[0] = RETRY_SECONDS
    assert await use(models, slots["a"]) == "it is broken"
    loader.fails.clear()
    assert await models.enter(slots["a"], retry=True) is loader.here["a"]


async def test_nothing_is_loaded_for_clients_that_have_left() -> None:
    models, loader, slots = make_set({"a": 100, "b": 100}, BESIDE + 100)
    await models.enter(slots["a"])
    left = asyncio.create_task(use(models, slots["b"]))
    await asyncio.sleep(0.01)
    left.cancel()
    models.leave(slots["a"])
    await use(models, slots["a"])
    assert loader.loads in (["a"], ["a", "b", "a"])
    await models.close()


async def test_models_that_have_grown_go_as_soon_as_nobody_uses_them() -> None:
    models, loader, slots = make_set({"a": 100, "b": 100}, BESIDE + 200)
    for name in "ab":
        await use(models, slots[name])
    slots["b"].size = 150
    await models.shrink()
    assert loader.here.keys() == {"b"}


@given(
    sizes=st.lists(st.integers(1, 500), min_size=2, max_size=4),
    budget=st.integers(200, 1000),
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 8), st.booleans()), max_size=25
    ),
    broken=st.booleans(),
    lost=st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_asked_for(
    sizes: list[int],
    budget: int,
    requests: list[tuple[int, int, int, bool]],
    broken: bool,
    lost: int,
) -> None:
    """The loader checks that nothing is loaded beyond the budget, and nothing unloaded that is in use."""
    names = "abcd"[: len(sizes)]

    async def run() -> None:
        models, loader, slots = make_set(dict(zip(names, sizes, strict=True)), BESIDE + budget)
        loader.fails = {"b"} if broken else set()

        async def one(model: int, before: int, turns: int, leaves: bool) -> str:
            for _ in range(before):
                await asyncio.sleep(0)
            task = asyncio.create_task(use(models, slots[names[model % len(names)]], turns))
            if leaves:
                await asyncio.sleep(0)
                if not any(slot.users for slot in slots.values()):  # else it would leave what it counts
                    task.cancel()
                    return "left"
            return await task

        async def lose() -> None:
            for _ in range(lost):
                await asyncio.sleep(0)
            slot = slots[names[-1]]
            if slot.state == "loaded" and slot.served is not None:
                del loader.here[slot.name]
                models.lose(slot, Unavailable("its engine has ended"))

        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(one(*each) for each in requests), lose())
        *ends, _ = answers
        assert {end for end in ends if end is None or "does not fit" not in end} <= ENDS
        await models.close()
        assert {name for name, slot in slots.items() if slot.state == "loaded"} <= loader.here.keys()
        assert all(slot.users == slot.waiting == 0 for slot in slots.values())

    asyncio.run(run())


@pytest.mark.parametrize("name", ["a", "b"])
async def test_one_that_is_removed_goes_when_nobody_uses_it(name: str) -> None:
    models, loader, slots = make_set({"a": 100, "b": 100}, 1000)
    await models.enter(slots["a"])
    await use(models, slots["b"])
    models.remove(slots[name])
    while slots["b"].removed and slots["b"] in models.slots:
        await asyncio.sleep(0)
    assert ("a" in loader.here, "b" in loader.here) == (True, name == "a")
    models.leave(slots["a"])
    while slots["a"].removed and slots["a"] in models.slots:
        await asyncio.sleep(0)
    assert ("a" in loader.here, "b" in loader.here) == (name == "b", name == "a")
