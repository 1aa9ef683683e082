"""Responses that are kept, continued, and computed later."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from fake_api import make_app, make_client, named_events, post, refusal
from fake_frontend import FakeFrontend
from full_disk import full_disk

from server.batches import responses, runner
from server.options.server_flags import BatchOptions

PATH = "/v1/responses"


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture
def app(frontend: FakeFrontend, tmp_path: Path) -> Any:
    return make_app(frontend, batches=BatchOptions(batch_dir=str(tmp_path), response_store=600))


@asynccontextmanager
async def computing(app: Any) -> AsyncIterator[None]:
    """Has responses computed in the background meanwhile."""
    task = asyncio.create_task(app.state.runner.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def client(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with computing(app), make_client(app) as client:
        yield client


def kept_by(app: Any) -> int:
    """The responses that the database has, and their events."""
    read = app.state.runner.folder.database.read
    return read("SELECT (SELECT count(*) FROM responses) + (SELECT count(*) FROM events)")[0][0]


def prompt_of(frontend: FakeFrontend) -> str:
    return bytes(id for id in frontend.asked[-1][0] if id < 256).decode()


async def until_ended(client: httpx.AsyncClient, id: str) -> Any:
    async with asyncio.timeout(20):
        while True:
            found = (await client.get(f"{PATH}/{id}")).json()
            if found["status"] not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.01)


async def test_there_is_no_compaction(client: httpx.AsyncClient) -> None:
    error = await refusal(client, f"{PATH}/compact", status=404, input="a")
    assert "no compaction" in error["message"]


async def test_a_response_whose_time_is_over_is_gone(client: httpx.AsyncClient, app: Any) -> None:
    app.state.runner.kept.seconds = -1.0
    answer = await post(client, PATH, input="a")
    assert (await client.get(f"{PATH}/{answer['id']}")).status_code == 404
    app.state.runner.kept.clean()
    assert kept_by(app) == 0


def unless_within(folder: Path, walk: Any) -> Any:
    """Fails where the folder is looked through; threads that other tests have left look into /proc."""

    def looked(path: Any = ".") -> Any:
        assert isinstance(path, int) or not Path(path).is_relative_to(folder), "the folder is looked through"
        return walk(path)

    return looked


async def test_the_oldest_response_gives_way_and_no_request_looks_through_the_folder(
    app: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("walk", "scandir", "listdir"):
        monkeypatch.setattr(os, name, unless_within(tmp_path, getattr(os, name)))
    monkeypatch.setattr(responses, "MOST_RESPONSES", 2)
    async with make_client(app) as client:
        ids = [(await post(client, PATH, input="a"))["id"] for _ in range(4)]
        assert [(await client.get(f"{PATH}/{id}")).status_code for id in ids] == [404, 404, 200, 200]


async def asked_whole_and_streamed(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
    whole = await client.post(PATH, json={"input": "a"})
    return whole, await client.post(PATH, json={"input": "a", "stream": True})


async def test_an_answer_that_a_full_disk_does_not_take_is_given(app: Any, tmp_path: Path) -> None:
    async with make_client(app) as client:
        with full_disk(tmp_path):
            whole, streamed = await asked_whole_and_streamed(client)
        assert whole.json()["output"][0]["content"][0]["text"] == "Hello, world."
        assert whole.json()["store"] is False and "is not kept" in whole.headers["warning"]
        last = named_events(streamed.text)[-1]
        assert last["type"] == "response.completed" and last["response"]["store"] is False
    assert kept_by(app) == 0


async def test_an_answer_without_room_in_the_budget_is_given(app: Any) -> None:
    app.state.runner.folder.most_bytes = -1
    async with make_client(app) as client:
        for answer in await asked_whole_and_streamed(client):
            assert answer.status_code == 200 and "is not kept" in answer.headers["warning"]
        error = await refusal(client, PATH, status=507, input="a", background=True)
        assert "--batch-gib" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_must_be_kept_is_refused_if_the_disk_is_full(
    app: Any, tmp_path: Path, stream: bool
) -> None:
    async with make_client(app) as client:
        with full_disk(tmp_path):
            error = await refusal(client, PATH, status=507, input="a", background=True, stream=stream)
        assert "disk" in error["message"] and error["type"] == "InsufficientStorageError"
    assert kept_by(app) == 0


async def test_an_answer_that_waits_for_room_is_computed_once(
    client: httpx.AsyncClient, frontend: FakeFrontend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "AGAIN_SECONDS", 0.01)
    frontend.gate = asyncio.Event()
    first = await post(client, PATH, input="hi", background=True)
    while not frontend.running:
        await asyncio.sleep(0.01)
    with full_disk(tmp_path):
        frontend.gate.set()
        while frontend.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert (await client.get(f"{PATH}/{first['id']}")).json()["status"] == "in_progress"
    assert (await until_ended(client, first["id"]))["status"] == "completed"
    assert len(frontend.asked) == 1


async def test_an_owner_has_so_many_background_responses(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MOST_RESPONSES", 1)
    async with make_client(app) as client:
        await post(client, PATH, input="a", background=True)
        refused = await client.post(PATH, json={"input": "a", "background": True})
        assert refused.status_code == 429 and "cancel some" in refused.json()["error"]["message"]


async def test_a_response_is_computed_later(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.gate = asyncio.Event()
    first = await post(client, PATH, input="hi", background=True, metadata={"a": "b"})
    assert (first["status"], first["background"], first["output"]) == ("queued", True, [])
    await refusal(client, PATH, input="x", previous_response_id=first["id"])
    frontend.gate.set()
    found = await until_ended(client, first["id"])
    assert found["status"] == "completed" and found["output"][0]["content"][0]["text"] == "Hello, world."
    assert (found["id"], found["background"], found["metadata"]) == (first["id"], True, {"a": "b"})
    assert frontend.asked[-1][2]["priority"] == 1_000_000_000
    await post(client, PATH, input="and?", previous_response_id=first["id"])
    assert prompt_of(frontend).startswith("<user>hi\n<assistant>Hello, world.\n<user>and?")


async def test_a_response_is_cancelled(client: httpx.AsyncClient, frontend: FakeFrontend) -> None:
    frontend.gate = asyncio.Event()
    first = await post(client, PATH, input="hi", background=True)
    while not frontend.running:
        await asyncio.sleep(0.01)
    assert (await client.post(f"{PATH}/{first['id']}/cancel")).json()["status"] == "cancelled"
    while frontend.running:
        await asyncio.sleep(0.01)
    assert (await until_ended(client, first["id"]))["status"] == "cancelled"
    plain = await post(client, PATH, input="a", max_output_tokens=1)
    assert (await client.post(f"{PATH}/{plain['id']}/cancel")).status_code == 400


async def test_a_response_that_fails_says_why(client: httpx.AsyncClient) -> None:
    first = await post(client, PATH, input="a" * 200, background=True)
    found = await until_ended(client, first["id"])
    assert found["status"] == "failed" and found["error"]["code"] == "invalid_prompt"
    assert "context length" in found["error"]["message"]
    await refusal(client, PATH, input=[{"type": "zz"}], background=True)


async def told(client: httpx.AsyncClient, id: str, after: int | None = None) -> list[Any]:
    """The events of a background response, which may come for some time yet."""
    asked = {"stream": "true"} if after is None else {"stream": "true", "starting_after": str(after)}
    async with asyncio.timeout(20):
        return named_events((await client.get(f"{PATH}/{id}", params=asked)).text)


async def test_a_background_response_is_streamed_from_any_event_on(client: httpx.AsyncClient) -> None:
    asked = {"input": "hi", "background": True, "stream": True}
    async with asyncio.timeout(20):
        events = named_events((await client.post(PATH, json=asked)).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert "".join(each["delta"] for each in events if each["type"].endswith("text.delta")) == "Hello, world."
    last = events[-1]
    assert last["type"] == "response.completed" and last["response"]["background"] is True
    id = events[0]["response"]["id"]
    assert last["response"] == (await until_ended(client, id))
    assert await told(client, id) == events and await told(client, id, 3) == events[4:]
    plain = await post(client, PATH, input="hi", background=True)
    for path in (
        f"{plain['id']}?stream=true",
        f"{id}?starting_after=1",
        f"{id}?stream=true&starting_after=x",
    ):
        assert (await client.get(f"{PATH}/{path}")).status_code == 400
    await client.delete(f"{PATH}/{id}")
    assert (await client.get(f"{PATH}/{id}?stream=true")).status_code == 404


async def test_a_streamed_response_is_computed_anew_with_higher_numbers(
    app: Any, frontend: FakeFrontend
) -> None:
    frontend.gate = asyncio.Event()
    async with make_client(app) as client:
        reading = asyncio.create_task(
            client.post(PATH, json={"input": "hi", "background": True, "stream": True})
        )
        for gate in (None, frontend.gate):
            async with computing(app):
                async with asyncio.timeout(20):
                    while not frontend.running:
                        await asyncio.sleep(0.01)
                if gate is not None:
                    gate.set()
                    await asyncio.wait([reading])
        events = named_events(reading.result().text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(each["delta"] for each in events if each["type"].endswith("text.delta")) == "Hello, world."


async def test_a_streamed_response_that_fails_or_is_cancelled_says_so(
    client: httpx.AsyncClient, frontend: FakeFrontend
) -> None:
    asked = {"background": True, "stream": True}
    events = named_events((await client.post(PATH, json={**asked, "input": "a" * 200})).text)
    assert events[-1]["type"] == "response.failed" and "context" in events[-1]["response"]["error"]["message"]
    frontend.gate = asyncio.Event()
    reading = asyncio.create_task(
        client.post(PATH, json={**asked, "input": "hi"}, headers={"x-request-id": "one"})
    )
    async with asyncio.timeout(20):
        while not frontend.running:
            await asyncio.sleep(0.01)
        assert (await client.post(f"{PATH}/resp_one/cancel")).json()["status"] == "cancelled"
        assert named_events((await reading).text)[-1]["code"] == "cancelled"


async def test_a_response_is_computed_by_the_process_that_comes_next(
    app: Any, frontend: FakeFrontend
) -> None:
    frontend.gate = asyncio.Event()
    async with make_client(app) as client:
        first = await post(client, PATH, input="hi", background=True)
        for _ in range(2):
            async with computing(app):
                while not frontend.running:
                    await asyncio.sleep(0.01)
        frontend.gate.set()
        async with computing(app):
            assert (await until_ended(client, first["id"]))["status"] == "completed"


CONVERSATIONS = "/v1/conversations"


async def items_of(client: httpx.AsyncClient, id: str) -> Any:
    return (await client.get(f"{CONVERSATIONS}/{id}/items?order=asc")).json()["data"]


async def test_a_response_that_is_computed_later_is_added_once_it_is_there(client: httpx.AsyncClient) -> None:
    id = (await post(client, CONVERSATIONS))["id"]
    later = await post(client, PATH, input="hi", conversation=id, background=True)
    assert later["conversation"] == {"id": id} and await items_of(client, id) == []
    found = await until_ended(client, later["id"])
    assert (await client.post(f"{PATH}/{later['id']}/cancel")).json() == found  # it has ended already
    assert [item["role"] for item in await items_of(client, id)] == ["user", "assistant"]
    await post(client, PATH, input="and?", previous_response_id=found["id"])


async def test_a_response_whose_process_is_killed_when_it_is_computed_is_added_once(app: Any) -> None:
    computed, loop = asyncio.Event(), asyncio.get_running_loop()

    def cannot_finish(*given: object) -> None:
        loop.call_soon_threadsafe(computed.set)
        raise OSError

    async with make_client(app) as client:
        id = (await post(client, CONVERSATIONS))["id"]
        later = await post(client, PATH, input="hi", conversation=id, background=True)
        with patch.object(responses.KeptResponses, "finish", cannot_finish):
            async with computing(app):
                await computed.wait()
        async with computing(app):
            await until_ended(client, later["id"])
        assert [item["role"] for item in await items_of(client, id)] == ["user", "assistant"]


async def test_a_response_of_a_conversation_that_is_gone_or_full_by_then(app: Any) -> None:
    async with make_client(app) as client:
        gone, full = [(await post(client, CONVERSATIONS))["id"] for _ in range(2)]
        more = {"input": "hi", "background": True}
        asked = [await post(client, PATH, conversation=id, **more) for id in (gone, full)]
        await client.delete(f"{CONVERSATIONS}/{gone}")
        app.state.runner.folder.most_bytes = -1
        async with computing(app):
            failed, completed = [await until_ended(client, each["id"]) for each in asked]
        assert failed["status"] == "failed" and "conversation" in failed["error"]["message"]
        assert (completed["status"], completed["conversation"]) == ("completed", None)


async def test_a_conversation_that_takes_no_more(app: Any, tmp_path: Path) -> None:
    async with make_client(app) as client:
        id = (await post(client, CONVERSATIONS))["id"]
        with full_disk(tmp_path):
            for answer in [
                await client.post(
                    PATH, json={"input": "a", "conversation": id, "stream": each, "store": False}
                )
                for each in (False, True)
            ]:
                whole = (
                    named_events(answer.text)[-1]["response"] if "event:" in answer.text else answer.json()
                )
                assert whole["status"] == "completed" and whole["conversation"] is None
        assert await items_of(client, id) == []
        app.state.runner.folder.most_bytes = -1
        await refusal(client, PATH, status=507, input="a", conversation=id)
