"""What OpenAI's client does with work that waits: files, batches, and responses in the background."""

import json
import time
from typing import Any

import pytest
from live import LiveServer

openai = pytest.importorskip("openai")

QUESTION = "What is the capital of France?"


@pytest.fixture
def client(demo: LiveServer) -> Any:
    return openai.OpenAI(base_url=f"{demo.url}/v1", api_key="-", max_retries=0)


def ended(look: Any) -> Any:
    """What is looked at, once it has ended."""
    deadline = time.monotonic() + 60
    while (found := look()).status in ("validating", "queued", "in_progress", "finalizing"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_a_batch_from_its_file_to_its_results(client: Any) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(4)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    assert (client.files.retrieve(file.id).bytes, client.files.content(file.id).read()) == (
        len(content),
        content,
    )
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"asked_by": "a test"},
    )
    done = ended(lambda: client.batches.retrieve(batch.id))
    assert (done.status, done.request_counts.completed, done.metadata) == (
        *("completed", 4),
        {"asked_by": "a test"},
    )
    results = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    assert {result["custom_id"] for result in results} == {line["custom_id"] for line in lines}
    assert all(
        "Paris" in result["response"]["body"]["choices"][0]["message"]["content"] for result in results
    )
    assert batch.id in [one.id for one in client.batches.list(limit=5).data]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


def test_a_response_in_the_background(client: Any) -> None:
    begun = client.responses.create(model="demo", input=QUESTION, temperature=0, background=True)
    assert "Paris" in ended(lambda: client.responses.retrieve(begun.id)).output_text


def test_a_model_that_does_not_classify_says_what_would_moderate(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="serve a classifier of harmful texts"):
        client.moderations.create(input="I am angry")
