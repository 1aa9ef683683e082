"""Orders to compute with other weights, and the answers of engines that are put together."""

from __future__ import annotations

import asyncio

import pytest
from scripted_engine import Script, Two

from engine_core.client.operator_commands import WeightsTaken
from engine_core.protocol import UpdateWeights, WeightsUpdated


async def ordered(script: Script, kind: str = "check") -> UpdateWeights:
    [order] = await script.received(1)
    assert isinstance(order, UpdateWeights) and order.kind == kind
    return order


async def test_an_order_that_comes_second_at_the_first_engine_reaches_no_other(two: Two) -> None:
    client, first, second, _ = two
    asked = asyncio.create_task(client.orders.update_weights("/new"))
    first.send(WeightsUpdated("those of /old are loaded", (await ordered(first)).number, is_taken=True))
    with pytest.raises(WeightsTaken, match="/old"):
        await asked
    await ordered(first, "give_up")
    await ordered(second, "give_up")


async def test_an_answer_to_an_earlier_order_does_not_count(two: Two) -> None:
    client, first, _, _ = two
    given_up = asyncio.create_task(client.orders.update_weights("/old"))
    earlier = await ordered(first)
    given_up.cancel()
    await ordered(first, "give_up")
    asked = asyncio.create_task(client.orders.update_weights("/new"))
    check = await ordered(first)
    client.orders.note_updated(0, WeightsUpdated("", earlier.number))
    for _ in range(5):
        await asyncio.sleep(0)
    first.send(WeightsUpdated("it does not fit", check.number))
    with pytest.raises(ValueError, match="it does not fit"):
        await asked


async def test_replicas_that_have_the_weights_are_named_where_another_one_cannot(two: Two) -> None:
    client, first, second, _ = two
    asked = asyncio.create_task(client.orders.update_weights("/new"))
    for script in (first, second):
        script.send(WeightsUpdated("", (await ordered(script)).number))
    for script, problem in ((first, ""), (second, "out of memory")):
        script.send(WeightsUpdated(problem, (await ordered(script, "load")).number))
    with pytest.raises(ValueError, match="out of memory; replicas 0 have the new ones"):
        await asked
