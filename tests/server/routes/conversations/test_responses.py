"""POST /v1/responses, whole and streamed."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_api import leave, make_app, make_client, named_events, post, refusal
from fake_frontend import FakeFrontend
from starlette.types import ASGIApp

from server.errors import Overloaded, Unavailable

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}}
USER = {"role": "user", "content": "hi"}

ITEM = ["response.output_item.added", "response.output_item.done"]


async def stream(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await client.post(PATH, json={"input": "hi", "tools": [TOOL], **body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return named_events(response.text)


def without_ids(value: object) -> object:
    """An answer without what differs from one to the next."""
    if isinstance(value, dict):
        volatile = ("id", "item_id", "call_id", "created_at", "completed_at")
        return {key: without_ids(each) for key, each in value.items() if key not in volatile}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


async def test_a_whole_answer(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.cached = 4
    answer = await post(client, PATH, input="hi", instructions="be", tools=[TOOL], metadata={"a": "b"})
    assert answer["id"].startswith("resp_") and answer["object"] == "response"
    assert (answer["status"], answer["error"], answer["incomplete_details"]) == ("completed", None, None)
    assert (answer["store"], answer["instructions"], answer["metadata"]) == (False, "be", {"a": "b"})
    assert answer["tools"] == [TOOL] and answer["text"] == {"format": {"type": "text"}}
    reasoning, message, first, second = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "They ask."}]
    assert reasoning["summary"] == [] and "encrypted_content" not in reasoning
    assert message["role"] == "assistant"
    assert message["content"] == [
        {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    ]
    assert first["call_id"].startswith("call_") and first["call_id"] != second["call_id"]
    assert json.loads(first["arguments"]) == {"city": "Pa<ris"} and first["name"] == "get_weather"
    usage = answer["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 4
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize("per_step", [1, 3, 1000])
async def test_a_stream_says_the_same(
    frontend: FakeFrontend, client: httpx.AsyncClient, per_step: int
) -> None:
    frontend.per_step = per_step
    whole = await post(client, PATH, input="hi", tools=[TOOL])
    events = await stream(client)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    ids = {event["response"]["id"] for event in events if "response" in event}
    assert len(ids) == 1


async def test_the_order_of_events(client: httpx.AsyncClient) -> None:
    kinds = [event["type"] for event in await stream(client)]
    runs = [kind for index, kind in enumerate(kinds) if not index or kinds[index - 1] != kind]
    text = ["response.content_part.added", "{}.delta", "{}.done", "response.content_part.done"]
    arguments = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    assert runs == [
        "response.created",
        "response.in_progress",
        *(ITEM[0], *(each.format("response.reasoning_text") for each in text), ITEM[1]),
        *(ITEM[0], *(each.format("response.output_text") for each in text), ITEM[1]),
        *(ITEM[0], *arguments, ITEM[1]),
        *(ITEM[0], *arguments, ITEM[1]),
        "response.completed",
    ]


async def test_items_keep_their_ids_to_the_end(client: httpx.AsyncClient) -> None:
    events = await stream(client, include=["reasoning.encrypted_content"])
    output = events[-1]["response"]["output"]
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["item"]["id"] == item["id"] and own[0]["item"]["status"] == "in_progress"
        assert own[0]["item"].get("call_id") == item.get("call_id")
        assert {event["item_id"] for event in own[1:-1]} == {item["id"]}
        assert own[-1]["item"] == item
        deltas = "".join(event["delta"] for event in own if "delta" in event)
        assert deltas == (item.get("arguments") or item["content"][0]["text"])


async def test_reasoning_can_be_kept_by_the_client(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    answer = await post(
        client, PATH, input="hi", tools=[TOOL], include=["reasoning.encrypted_content"], store=False
    )
    for item in answer["output"]:
        item.pop("id")
    answer["output"][0].pop("content")
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
        for item in answer["output"][2:]
    ]
    frontend.tokenizer.chat._templates["default"] = (  # type: ignore[attr-defined]
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    )
    await post(client, PATH, input=[USER, *answer["output"], *results], tools=[TOOL])
    prompt = bytes(frontend.asked[-1][0]).decode()
    assert prompt == "<user>|hi<assistant>They ask.|I look.<tool>|sunny<tool>|sunny"


async def test_a_custom_tool_is_called_with_text(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.reply = '<tool_call>{"name": "edit__patch", "arguments": {"input": "a\\n\\"b\\""}}</tool_call>'
    tools = [{"type": "namespace", "name": "edit", "tools": [{"type": "custom", "name": "patch"}]}]
    events = await stream(client, tools=tools)
    [item] = events[-1]["response"]["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", 'a\n"b"')
    assert (item["name"], item["namespace"]) == ("patch", "edit")
    deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(event["delta"] for event in deltas) == item["input"]


async def test_an_answer_that_is_cut(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    events = await stream(client, max_output_tokens=len(frontend.reply) - 20)
    answer = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete" and answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in answer["output"]] == ["completed"] * 3 + ["incomplete"]
    assert '{"city": "Pa<ris"}'.startswith(answer["output"][-1]["arguments"])


async def test_an_empty_answer_is_an_empty_message(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.reply = ""
    [message] = (await post(client, PATH, input="hi"))["output"]
    assert message["content"][0]["text"] == "" and message["status"] == "completed"


async def test_logprobs_of_the_text(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.per_step = 1
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = await stream(client, **body)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    streamed = [entry for event in deltas for entry in event["logprobs"]]
    whole = await post(client, PATH, input="hi", tools=[TOOL], **body)
    content = whole["output"][1]["content"][0]
    assert content["logprobs"] == streamed
    assert "".join(entry["token"] for entry in streamed).strip() == content["text"]
    assert len(streamed[0]["top_logprobs"]) == 2 and streamed[0]["bytes"]


@pytest.mark.parametrize("per_step", [1, 2, 5, 1000])
@pytest.mark.parametrize("read_as", [{}, {"reasoning_parser": "qwen3"}], ids=["plain", "read"])
async def test_logprobs_are_those_of_the_text_however_tokens_arrive(
    read_as: dict[str, str], per_step: int
) -> None:
    """Characters of several tokens have all of these; the end token and a stop string have none."""
    said = "é <b> wörld🙂"
    frontend = FakeFrontend(f"{said}STOP of it", per_step=per_step)
    async with make_client(make_app(frontend, **read_as)) as client:
        for more, text in (({}, f"{said}STOP of it"), ({"stop": ["STOP"]}, said)):
            include = ["message.output_text.logprobs"]
            answer = await post(client, PATH, input="hi", include=include, max_output_tokens=99, **more)
            [content] = answer["output"][0]["content"]
            assert content["text"] == text
            assert bytes(b for entry in content["logprobs"] for b in entry["bytes"]) == text.encode()


async def test_what_has_no_effect_is_said(client: httpx.AsyncClient) -> None:
    response = await client.post(PATH, json={"input": "hi", "tools": [TOOL, {"type": "web_search"}]})
    assert response.headers["warning"] == (
        '299 - "tools left out, which this server does not run: web_search"'
    )
    response = await client.post(PATH, json={"input": "hi"})
    assert "warning" not in response.headers


async def test_an_error_in_a_stream(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.error, frontend.tokens_before_error = Unavailable("The engine has stopped."), 40
    events = await stream(client)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    failed = events[-1]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "The engine has stopped."}
    assert failed["response"]["id"] == events[0]["response"]["id"]
    assert [item["status"] for item in failed["response"]["output"]] == ["completed"]


async def test_an_error_before_a_stream_has_a_status(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    frontend.error = Overloaded("Full.", retry_after=3)
    error = await refusal(client, PATH, status=503, input="hi", stream=True)
    assert error["message"] == "Full."


async def test_headers_may_be_sent_before_an_error(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.waits, frontend.expected = True, 5.0
    frontend.error = Overloaded("Full.", retry_after=3)
    created, progress, failed = await stream(client)
    assert (created["type"], progress["type"]) == ("response.created", "response.in_progress")
    assert failed["response"]["error"]["code"] == "rate_limit_exceeded"


async def test_a_client_that_leaves_ends_its_request(app: ASGIApp, frontend: FakeFrontend) -> None:
    frontend.gate = asyncio.Event()
    await asyncio.wait_for(leave(app, PATH, {"input": "hi", "stream": True}, after=1), 60)
    assert (frontend.running, frontend.finished) == (0, 0)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/x"), ("DELETE", "/x"), ("POST", "/x/cancel"), ("GET", "/x/input_items")],
)
async def test_no_response_is_found_again(client: httpx.AsyncClient, method: str, path: str) -> None:
    response = await client.request(method, PATH + path)
    assert response.status_code == 404
    assert "keeps no responses" in response.json()["error"]["message"]


async def test_the_tokens_of_an_input_are_counted(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    counted = await post(client, PATH + "/input_tokens", input="hi", instructions="be", tools=[TOOL])
    answer = await post(client, PATH, input="hi", instructions="be", tools=[TOOL])
    assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}
    long = await post(client, PATH + "/input_tokens", input="x" * 9000)
    assert long["input_tokens"] > frontend.facts.max_model_len


async def test_a_conversation_that_is_too_long(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    items = [{"role": "user", "content": str(number) * 500} for number in range(10)]
    error = await refusal(client, PATH, input=items, instructions="be")
    assert "maximum context length" in error["message"]
    await post(client, PATH, input=items, instructions="be", truncation="auto", max_output_tokens=1)
    prompt = bytes(frontend.asked[-1][0]).decode()
    assert prompt.startswith("<system>be\n<user>2222") and "<user>9999" in prompt
    long = [*items, {"role": "user", "content": "x" * 5000}]
    await refusal(client, PATH, input=long, truncation="auto")


async def test_an_unknown_model(client: httpx.AsyncClient) -> None:
    assert (await refusal(client, PATH, status=404, input="hi", model="gpt-9"))["param"] == "model"


async def test_requests_are_counted_by_their_route(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    await post(client, PATH, input="hi")
    await client.get(PATH + "/some-id")
    text = (await client.get("/metrics")).text
    assert 'handler="/v1/responses"' in text and 'handler="/v1/responses/{response_id}"' in text
