"""Batches on a real server, whose processes are killed while it works, by OpenAI's client."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from live import SMALL, LiveServer, wait_until

pytestmark = pytest.mark.turns(4)

PROMPT = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[Callable[[], LiveServer]]:
    """Starts a server, or another one in its place, with the same folder."""
    servers: list[LiveServer] = []

    def started() -> LiveServer:
        servers.append(LiveServer("demo", *SMALL, "--batch-dir", str(folder), "--response-store", "600"))
        return servers[-1].wait_ready()

    yield started
    for server in servers:
        server.close()


def lines(count: int, tokens: int) -> bytes:
    return b"".join(
        json.dumps({"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions",
                    "body": {**PROMPT, "seed": n, "max_tokens": tokens}}).encode() + b"\n"
        for n in range(count)
    )  # fmt: skip


def client_of(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=8)


def wait_for(client: openai.OpenAI, batch: Any, is_so: Callable[[Any], bool]) -> Any:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        batch = client.batches.retrieve(batch.id)
        if is_so(batch):
            return batch
        time.sleep(0.02)
    raise AssertionError(batch)


def has_more(done: int, batch: Any) -> bool:
    return batch.request_counts.completed > done


def kill_api_process(server: LiveServer) -> None:
    killed = server.api_pids()
    os.kill(killed[0], signal.SIGKILL)
    wait_until(lambda: server.api_pids() not in ([], killed), 30)
    server.wait_ready()


def test_a_batch_outlives_three_kills_with_each_answer_once(start: Callable[[], LiveServer]) -> None:
    server = start()
    client = client_of(server)
    file = client.files.create(file=("in.jsonl", lines(600, 48)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"}
    )
    client.files.delete(file.id)  # the batch has what it needs
    done = 0
    for kills_all in (False, True, False):
        batch = wait_for(client, batch, partial(has_more, done))
        assert batch.status == "in_progress", batch
        done = batch.request_counts.completed
        if kills_all:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait(60)
            server = start()
            client = client_of(server)
        else:
            kill_api_process(server)
    batch = wait_for(client, batch, lambda found: found.status == "completed")
    assert (batch.request_counts.completed, batch.request_counts.failed) == (600, 0)
    found = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(one["custom_id"] for one in found) == sorted(f"r{n}" for n in range(600))
    assert len({one["response"]["body"]["choices"][0]["text"] for one in found}) == 1
    assert [one.id for one in client.batches.list(limit=1)] == [batch.id]


def test_a_response_is_computed_later_and_continued(start: Callable[[], LiveServer]) -> None:
    server = start()
    client = client_of(server)
    later = client.responses.create(model="demo", input="What is the capital of France?", background=True)
    assert later.status == "queued"
    while (answer := client.responses.retrieve(later.id)).status in ("queued", "in_progress"):
        time.sleep(0.02)
    assert answer.status == "completed" and "Paris" in answer.output_text
    asked: dict[str, Any] = {"model": "demo", "input": "What did I ask?", "temperature": 0}
    goes_on = client.responses.create(**asked, previous_response_id=later.id)
    assert goes_on.usage.input_tokens > client.responses.create(**asked).usage.input_tokens
    events: list[Any] = list(client.responses.create(**asked, background=True, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    id = events[0].response.id
    assert events[-1].response == client.responses.retrieve(id)
    assert list(client.responses.retrieve(id, stream=True, starting_after=2)) == events[3:]
    batch = client.batches.create(
        input_file_id=client.files.create(file=("in.jsonl", lines(600, 400)), purpose="batch").id,
        endpoint="/v1/completions",
        completion_window="24h",
    )
    wait_for(client, batch, lambda found: found.status == "in_progress")
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = wait_for(client, batch, lambda found: found.status == "cancelled")
    left = client.files.content(batch.error_file_id).text.splitlines()
    assert {json.loads(line)["error"]["code"] for line in left} == {"batch_cancelled"}
    assert server.terminate() == 0
