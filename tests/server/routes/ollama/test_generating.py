"""POST /api/chat and /api/generate, whole and in lines."""

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest
from fake_api import assert_the_same_if_long, leave
from fake_frontend import FakeFrontend
from media_frontend import PAD, PICTURE, SMALL, seeing
from starlette.types import ASGIApp

from engine_core.protocol import Timing
from server.errors import Overloaded

CHAT, GENERATE = "/api/chat", "/api/generate"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TALK = [{"role": "user", "content": "hi"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": TALK, "tools": [TOOL]}
PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "hi"}
CALLED = {"name": "get_weather", "arguments": {"city": "Pa<ris"}}


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], **more: Any) -> Any:
    response = await client.post(path, json={**body, "stream": False, **more})
    assert response.status_code == 200, response.text
    return response.json()


async def lines(client: httpx.AsyncClient, path: str, body: dict[str, Any], **more: Any) -> list[Any]:
    response = await client.post(path, json={**body, **more})  # streams are what Ollama's clients get unasked
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


async def refusal(client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int = 400) -> str:
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    return response.json()["error"]


def prompt_of(frontend: FakeFrontend) -> str:
    return bytes(frontend.asked[-1][0]).decode()


def without_ids(calls: list[Any]) -> list[Any]:
    return [call["function"] for call in calls]


async def test_a_whole_chat(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.timing = Timing(queued=0.5, prefill=0.25, decode=0.125, compute=0.1, steps=3, preemptions=0)
    answer = await ask(client, CHAT, BODY)
    message = answer["message"]
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("org/tiny", True, "stop")
    assert (message["role"], message["content"], message["thinking"]) == ("assistant", "I look.", "They ask.")
    assert without_ids(message["tool_calls"]) == [{"index": n, **CALLED} for n in range(2)]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert answer["prompt_eval_count"] == len(frontend.asked[-1][0])
    assert answer["eval_count"] == len(frontend.reply) + 1
    assert answer["load_duration"] == 500_000_000
    assert (answer["prompt_eval_duration"], answer["eval_duration"]) == (250_000_000, 125_000_000)
    assert answer["total_duration"] > 0 and answer["created_at"].endswith("Z")


@pytest.mark.parametrize("per_step", [1, 3, 1000])
async def test_the_lines_of_a_chat_say_the_same(
    frontend: FakeFrontend, client: httpx.AsyncClient, per_step: int
) -> None:
    frontend.per_step = per_step
    whole = await ask(client, CHAT, BODY)
    found = await lines(client, CHAT, BODY)
    said = [line["message"] for line in found]
    assert "".join(message["content"] for message in said) == whole["message"]["content"]
    assert "".join(message.get("thinking", "") for message in said) == whole["message"]["thinking"]
    calls = [call for message in said for call in message.get("tool_calls", [])]
    assert without_ids(calls) == without_ids(whole["message"]["tool_calls"])
    assert found[-1].keys() == whole.keys() and said[-1] == {"role": "assistant", "content": ""}
    for name in ("done_reason", "prompt_eval_count", "eval_count"):
        assert found[-1][name] == whole[name]


@pytest.mark.parametrize("per_step", [1, 1000])
async def test_a_prompt_whole_and_in_lines(
    frontend: FakeFrontend, client: httpx.AsyncClient, per_step: int
) -> None:
    frontend.per_step, frontend.reply = per_step, "<think>a</think>Grüße"
    whole = await ask(client, GENERATE, PROMPT, system="be")
    assert prompt_of(frontend) == "<system>be\n<user>hi\n<assistant>"
    assert (whole["response"], whole["thinking"], "message" in whole) == ("Grüße", "a", False)
    found = await lines(client, GENERATE, PROMPT, system="be")
    assert "".join(line["response"] for line in found) == "Grüße"
    assert "".join(line.get("thinking", "") for line in found) == "a"
    raw = await ask(client, GENERATE, PROMPT, raw=True)
    assert frontend.asked[-1][0] == [257, *b"hi"] and raw["response"] == "Grüße"


async def test_options_become_those_of_sampling(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    options: dict[str, Any] = {"num_predict": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
    options |= {"seed": 5, "stop": ["x"], "repeat_penalty": 1.1, "presence_penalty": 0.2}
    options |= {"frequency_penalty": 0.3, "num_gpu": 1, "repeat_last_n": -1, "mirostat": 0, "tfs_z": 1.0}
    answer = await ask(client, CHAT, BODY, options=options, keep_alive="5m")
    sampling = frontend.asked[-1][1]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (7, 0.5, 3, 0.9)
    assert (sampling.min_p, sampling.seed, sampling.stop, sampling.repetition_penalty) == (0.1, 5, ["x"], 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)
    assert (answer["done_reason"], answer["eval_count"]) == ("length", 7)
    await ask(client, CHAT, BODY, options={"num_predict": -1})
    assert frontend.asked[-1][1].max_tokens is None
    await ask(client, CHAT, BODY, options={"num_predict": 100_000})
    assert frontend.asked[-1][1].max_tokens == 4096


async def test_a_smaller_window_leaves_out_the_oldest_messages(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    talk = [{"role": "system", "content": "be"}]
    for turn in ("first", "second", "third"):
        talk += [{"role": "user", "content": turn}, {"role": "assistant", "content": "yes"}]
    body = {"model": "tiny", "messages": talk[:-1]}
    await ask(client, CHAT, body, options={"num_ctx": 60})
    assert prompt_of(frontend) == "<system>be\n<user>third\n<assistant>"
    assert frontend.asked[-1][1].max_tokens == 60 - len(prompt_of(frontend))
    await ask(client, CHAT, body, options={"num_ctx": 100_000})
    assert "first" in prompt_of(frontend)
    assert frontend.asked[-1][1].max_tokens == 4096 - len(prompt_of(frontend))
    message = await refusal(client, CHAT, {**body, "options": {"num_ctx": 60}, "truncate": False})
    assert "60" in message and "\n" not in message


async def test_formats_and_thinking(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {"model": "tiny", "messages": TALK}
    for format, checked in (("json", "json_object"), (schema, "json")):
        await ask(client, CHAT, body, format=format)
        assert getattr(frontend.checked[-1].params, checked)  # type: ignore[union-attr]
    count = len(frontend.checked)
    await ask(client, CHAT, body, format="")
    assert len(frontend.checked) == count
    await ask(client, CHAT, body, think="high")
    assert "(high)" in prompt_of(frontend)
    await ask(client, CHAT, body, think=False)


async def test_a_conversation_with_tools_and_thoughts(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    frontend.tokenizer.chat._templates["default"] = (  # type: ignore[attr-defined]
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.id }}={{ c.function.arguments.city }};{% endfor %}"
        "{{ m.tool_call_id }}{% endfor %}"
    )
    answered = (await ask(client, CHAT, BODY))["message"]
    results = [{"role": "tool", "tool_name": "get_weather", "content": "sun"} for _ in range(2)]
    await ask(client, CHAT, BODY, messages=[*TALK, answered, *results])
    first, second = (call["id"] for call in answered["tool_calls"])
    assert prompt_of(frontend) == (
        f"<user>|hi<assistant>They ask.|I look.{first}=Pa<ris;{second}=Pa<ris;"
        f"<tool>|sun{first}<tool>|sun{second}"
    )


async def test_nothing_to_answer_is_a_model_that_is_there(client: httpx.AsyncClient) -> None:
    loaded = await ask(client, CHAT, {"model": "tiny:latest", "keep_alive": 0})
    assert (loaded["done"], loaded["done_reason"], loaded["message"]["content"]) == (True, "load", "")
    assert (await ask(client, GENERATE, {"model": "tiny", "prompt": ""}))["response"] == ""


async def test_logprobs(client: httpx.AsyncClient) -> None:
    whole = await ask(client, CHAT, BODY, logprobs=True, top_logprobs=1)
    assert len(whole["logprobs"]) == whole["eval_count"]
    assert whole["logprobs"][0].keys() >= {"token", "logprob", "top_logprobs"}
    found = await lines(client, CHAT, BODY, logprobs=True, top_logprobs=1)
    assert [entry for line in found for entry in line.get("logprobs", [])] == whole["logprobs"]


async def test_bodies_of_curl_have_no_type(client: httpx.AsyncClient) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    response = await client.post(GENERATE, content=json.dumps({**PROMPT, "stream": False}), headers=form)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {**BODY, "options": {"temprature": 1}}, "temprature"),
        (CHAT, {**BODY, "options": {"mirostat": 2}}, "mirostat"),
        (CHAT, {**BODY, "options": {"top_k": "many"}}, "options.top_k"),
        (CHAT, {**BODY, "options": {"num_ctx": 0}}, "num_ctx"),
        (CHAT, {**BODY, "options": {"temperature": 9}}, "temperature"),
        (CHAT, {**BODY, "format": "yaml"}, "format"),
        (CHAT, {**BODY, "think": "very"}, "think"),
        (CHAT, {**BODY, "messages": [{"role": "hacker"}]}, "messages[0].role"),
        (CHAT, {**BODY, "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT, {**BODY, "messages": [{"role": "user", "images": "x"}]}, "messages[0].images"),
        (CHAT, {**BODY, "messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls[0]"),
        (CHAT, {"messages": TALK}, "model"),
        (GENERATE, {**PROMPT, "suffix": "x"}, "suffix"),
        (GENERATE, {**PROMPT, "context": [1]}, "context"),
        (GENERATE, {**PROMPT, "raw": True, "system": "x"}, "raw"),
        (GENERATE, {**PROMPT, "images": ["AAAA"]}, "image"),
        (GENERATE, {**PROMPT, "steps": 3}, "steps"),
    ],
)
async def test_a_wrong_body_gets_one_sentence(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], words: str
) -> None:
    message = await refusal(client, path, body)
    assert words in message and "\n" not in message


async def test_other_errors_have_the_same_shape(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    assert "`none` does not exist" in await refusal(client, CHAT, {**BODY, "model": "none"}, 404)
    frontend.unready = Overloaded("Not now.", retry_after=1)
    assert await refusal(client, GENERATE, PROMPT, 503) == "Not now."


async def test_a_stream_that_breaks_off_ends_in_an_error(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    frontend.error, frontend.tokens_before_error = Overloaded("Not now."), 40
    response = await client.post(CHAT, json=BODY)
    assert json.loads(response.text.splitlines()[-1]) == {"error": "Not now."}


async def test_a_client_that_leaves_ends_the_request(app: ASGIApp, frontend: FakeFrontend) -> None:
    frontend.gate, frontend.reply = asyncio.Event(), "Hello, world."
    await asyncio.wait_for(leave(app, CHAT, {"model": "tiny", "messages": TALK}, after=1), 60)
    assert (frontend.running, frontend.finished) == (0, 0)


@pytest.mark.parametrize("body", [BODY, {**BODY, "stream": False}, {**BODY, "options": {"num_ctx": 60}}])
async def test_long_bodies_are_answered_alike(
    client: httpx.AsyncClient, frontend: FakeFrontend, body: dict[str, Any]
) -> None:
    frontend.reply = "Hello."
    fixed = {"options": {"num_predict": 3}, **body}
    if body.get("stream", True):
        fixed["model"] = "none"  # lines have times, which differ
    else:
        fixed["format"] = "yaml"
    await assert_the_same_if_long(client, frontend, CHAT, {**fixed, "tools": None})


@pytest.mark.parametrize("file", [PICTURE, SMALL])
async def test_pictures_in_base64(frontend: FakeFrontend, client: httpx.AsyncClient, file: bytes) -> None:
    data = base64.b64encode(file).decode()
    async with seeing(frontend):
        await ask(client, GENERATE, PROMPT, images=[data, data])
        prompt = frontend.asked[-1][0]
        assert len(frontend.asked[-1][2]["media"]) == 2  # type: ignore[arg-type]
        assert prompt[-3:] == [*b"hi|"] and prompt.count(PAD + 1) == 2
        await ask(client, CHAT, {"model": "tiny", "messages": [{**TALK[0], "images": [data]}]})
        assert frontend.asked[-1][0].count(PAD + 1) == 1
        assert "base64" in await refusal(client, GENERATE, {**PROMPT, "images": ["no picture"]})
