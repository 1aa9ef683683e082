"""Machines and replicas that join over a network."""

import asyncio

import msgspec
import pytest
from model_facts import changed
from ports import free_ports
from scripted_engine import PARAMS, READY, Connect, Script

from engine_core.config import Replicas
from engine_core.protocol import AddRequest, Failed
from engine_core.wire.headless_join import Refused, join


def over_network(port: int, here: int = 1) -> Replicas:
    return Replicas(size=2, here=here, port=port, secret="a secret that all machines know")


async def test_a_replica_of_another_machine_joins_with_the_key_and_only_with_it(connect: Connect) -> None:
    port = free_ports(2)
    layout = over_network(port)
    both = connect(layout=layout)
    await both.start(0)
    stranger = Script(
        msgspec.structs.replace(layout.tcp_address(0), secret="another secret, just as long"), 1
    )
    plain = Script(msgspec.structs.replace(layout.tcp_address(0), secret=None), 1)
    both.scripts += [stranger, plain]
    friend = Script(layout.tcp_address(0), 1)
    both.scripts.append(friend)
    for script in (stranger, plain, friend):
        script.send(changed(READY, max_num_seqs=3))
    await both.until(lambda: both.state(1) == "works")
    stream = both.client.submit([1], PARAMS, replica=1)
    assert [add.id for add in await friend.received(1) if isinstance(add, AddRequest)] == [stream.id]


async def test_a_machine_is_told_what_it_has_to_know(connect: Connect) -> None:
    layout = over_network(free_ports(4))
    connect(layout=layout, servers=2)
    welcome = await asyncio.to_thread(join, layout.tcp_address(0))
    assert (welcome.servers, welcome.replicas, welcome.local_replicas) == (2, 2, 1)
    with pytest.raises(Refused, match="FACET_CLUSTER_KEY"):
        await asyncio.to_thread(
            join, msgspec.structs.replace(layout.tcp_address(0), secret="not the same one")
        )


async def test_a_machine_that_runs_no_engine_waits_for_the_next_one(connect: Connect) -> None:
    layout = over_network(free_ports(2), here=0)
    both = connect(layout=layout)
    assert both.client.ready is None
    first = await both.start(1, at=layout.tcp_address(0))
    both.end(first)
    await both.until(lambda: both.client.ready is None)
    assert both.client.dead is None
    stream = both.client.submit([1], PARAMS)
    assert await anext(stream) == Failed(stream.id, 503, "no engine can take requests now")
    await both.start(0, at=layout.tcp_address(0))
    assert both.client.ready is not None
