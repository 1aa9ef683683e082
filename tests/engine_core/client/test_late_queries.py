"""Late-interaction queries and their documents: they meet at one replica, also after an engine has ended."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from scripted_engine import Replicated, Two

from engine_core.client import late_queries
from engine_core.client.late_queries import LateQueries
from engine_core.client.streams import Stream
from engine_core.config import Address, Replicas
from engine_core.protocol import Add, AddMany, Outputs, Pooled, Request
from worker.protocol import Pooling, Vectors

QUERY = Pooling(task="token_embed", late_query="q")
DOCUMENT = Pooling(task="token_embed", late_document="q")


def in_frame(request: Request) -> list[Add]:
    assert isinstance(request, AddMany)
    return request.adds


async def answered_query(found: Replicated) -> Stream[Pooled]:
    """A query whose vectors the first engine keeps."""
    [stream] = found.client.submit_many([([1, 2], QUERY)])
    [script] = [one for one in found.scripts if one.number == 0]
    await script.received(1)
    script.send(Outputs([Pooled(stream.id, Vectors(b"\0\0\0\0", (1,)))]))
    await found.until(lambda: not found.client.open_streams)
    return stream


async def test_documents_go_to_where_their_query_is(two: Two) -> None:
    client, first, _, both = two
    await answered_query(both)
    client.submit_many([([2] * 50, DOCUMENT)] * 4)
    assert len(in_frame((await first.received(1))[0])) == 4


async def test_a_query_is_sent_again_before_its_documents(address: Address) -> None:
    found = Replicated(address, Replicas(), restart_wait=60)
    first = await found.start(0)
    query = await answered_query(found)
    waiting = found.client.submit_many([([3], DOCUMENT), ([4], DOCUMENT)])
    await first.received(1)
    found.client.engine_exited(0, -9)
    found.end(first)
    again = await found.start(0)
    adds = in_frame((await again.received(1))[0])
    assert [add.id for add in adds] == [query.id, *(stream.id for stream in waiting)]
    assert adds[0] == Add(query.id, [1, 2], QUERY)
    later = found.client.submit_many([([5], DOCUMENT)])
    assert [add.id for add in in_frame((await again.received(1))[0])] == [later[0].id], "once is enough"
    again.send(Outputs([Pooled(query.id, Vectors(b"\0\0\0\0", (1,)))]))
    await found.until(lambda: found.client.open_streams == 3)
    found.close()


async def test_a_query_goes_with_its_documents_to_another_replica(two: Two) -> None:
    client, first, second, both = two
    query = await answered_query(both)
    [document] = client.submit_many([([3], DOCUMENT)])
    await first.received(1)
    both.end(first)
    assert [add.id for add in in_frame((await second.received(1))[0])] == [query.id, document.id]


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_queries, "MOST", 2)
    queries = LateQueries()
    for name in "abc":
        queries.note(Add(1, [1], replace(QUERY, late_query=name)), 0)
    asked = [Add(2, [1], replace(DOCUMENT, late_document=name)) for name in "abc"]
    assert [queries.holder(add) for add in asked] == [None, 0, 0]
    queries.lose(0)
    assert [queries.holder(add) for add in asked] == [None, None, None]
    assert queries.missing(asked[0], 1) is None and queries.missing(asked[1], 1) is not None
