"""POST /v1/messages, whole and streamed."""

import asyncio
from typing import Any

import httpx
import pytest
from fake_api import leave, make_app, make_client, named_events
from fake_frontend import FakeFrontend
from starlette.types import ASGIApp

from server.errors import BadRequest, Overloaded, TooManyRequests, Unavailable
from server.http import sse
from server.options.server_config import AccessOptions

PATH = "/v1/messages"
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
BODY = {"model": "tiny", "max_tokens": 1000, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}


async def talk(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post(PATH, json={**BODY, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await client.post(PATH, json={**BODY, **body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return named_events(response.text)


async def refusal(client: httpx.AsyncClient, status: int, path: str = PATH, **body: Any) -> Any:
    response = await client.post(path, json={**BODY, **body})
    assert response.status_code == status, response.text
    answer = response.json()
    assert (answer.keys(), answer["type"]) == ({"type", "error"}, "error")
    return answer["error"]


def collected(events: list[Any]) -> list[Any]:
    """The blocks of a stream, as clients put them together."""
    blocks: list[Any] = []
    json = ""
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                json = ""
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                delta = event["delta"]
                json += delta.get("partial_json", "")
                for field in ("text", "thinking", "signature"):
                    if field in delta:
                        blocks[-1][field] += delta[field]
            case "content_block_stop":
                assert event["index"] == len(blocks) - 1
                if json:
                    blocks[-1]["input"] = httpx.Response(200, text=json).json()
            case _:
                pass
    return blocks


def without_ids(blocks: list[Any]) -> list[Any]:
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


async def test_a_whole_answer(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.cached = 7
    answer = await talk(client)
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "org/tiny")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    thinking, text, first, second = answer["content"]
    assert thinking["thinking"] == "They ask." and thinking["signature"]
    assert text == {"type": "text", "text": "I look."}
    assert first["id"].startswith("toolu_") and first["id"] != second["id"]
    assert (first["name"], first["input"]) == ("get_weather", {"city": "Pa<ris"})
    usage, prompt = answer["usage"], len(frontend.asked[-1][0])
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt - 7, 7)
    assert usage["output_tokens"] == len(frontend.reply) + 1
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < 20


@pytest.mark.parametrize("per_step", [1, 3, 1000])
async def test_a_stream_says_the_same(
    frontend: FakeFrontend, client: httpx.AsyncClient, per_step: int
) -> None:
    frontend.per_step = per_step
    whole = await talk(client)
    events = await stream(client)
    assert without_ids(collected(events)) == without_ids(whole["content"])
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start, end = events[0]["message"], events[-2]
    assert start["content"] == [] and start["stop_reason"] is None and start["role"] == "assistant"
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"] == whole["usage"]
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


async def test_a_signature_is_the_same_for_the_same_thinking(client: httpx.AsyncClient) -> None:
    first, second = (await talk(client))["content"][0], (await talk(client))["content"][0]
    assert first["signature"] == second["signature"]


async def test_thinking_can_be_hidden_and_comes_back(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    hidden = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    events = await stream(client, thinking=hidden)
    assert "They ask" not in str(events)
    [thinking, *_] = said = collected(events)
    assert thinking["thinking"] == "" and thinking["signature"]
    frontend.tokenizer.chat._templates["default"] = (  # type: ignore[attr-defined]
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    )
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "sun"} for use in said[2:]]
    messages = [*BODY["messages"], {"role": "assistant", "content": said}]  # type: ignore[misc]
    await talk(client, messages=[*messages, {"role": "user", "content": results}])
    prompt = bytes(frontend.asked[-1][0]).decode()
    assert prompt == "<user>|hi<assistant>They ask.|I look.<tool>|sun<tool>|sun"


@pytest.mark.parametrize(
    ("body", "reason", "sequence"),
    [
        ({"tools": None}, "end_turn", None),
        ({"stop_sequences": ["look"]}, "stop_sequence", "look"),
        ({"max_tokens": 30}, "max_tokens", None),
        ({"max_tokens": 4096}, "tool_use", None),
    ],
)
async def test_why_an_answer_ends(
    client: httpx.AsyncClient, body: dict[str, Any], reason: str, sequence: str | None
) -> None:
    answer = await talk(client, **body)
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    end = (await stream(client, **body))[-2]
    assert end["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


async def test_an_answer_that_fills_the_window(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.reply = "x" * 5000
    for most in (4090, 32000):
        answer = await talk(client, max_tokens=most)
        assert answer["stop_reason"] == "model_context_window_exceeded"


async def test_a_call_that_breaks_off(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.reply = frontend.reply[:-25]
    answer = await talk(client)
    assert answer["content"][-1]["type"] == "tool_use"
    assert answer["content"][-1]["input"].keys() <= {"city"}


async def test_an_empty_answer_is_an_empty_text(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.reply = ""
    assert (await talk(client))["content"] == [{"type": "text", "text": ""}]
    assert collected(await stream(client)) == [{"type": "text", "text": ""}]


async def test_no_tokens_at_all_only_fill_the_cache(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    answer = await talk(client, max_tokens=0)
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")
    assert answer["usage"]["output_tokens"] == 0
    assert frontend.asked[-1][1].max_tokens == 1


async def test_an_answer_that_was_begun_goes_on(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    await talk(client, messages=[*BODY["messages"], {"role": "assistant", "content": "I th"}])  # type: ignore[misc]
    assert bytes(frontend.asked[-1][0]).endswith(b"<assistant>I th")


async def test_an_error_in_a_stream(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.error, frontend.tokens_before_error = Unavailable("The engine has stopped."), 40
    events = await stream(client)
    assert events[0]["type"] == "message_start"
    assert events[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "The engine has stopped."},
    }
    assert "message_stop" not in [event["type"] for event in events]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("no"), "invalid_request_error"),
        (TooManyRequests("no"), "rate_limit_error"),
        (Overloaded("no"), "overloaded_error"),
        (Unavailable("no"), "overloaded_error"),
    ],
)
async def test_errors_before_a_stream(
    frontend: FakeFrontend, client: httpx.AsyncClient, error: Any, kind: str
) -> None:
    frontend.error = error
    for streamed in (False, True):
        found = await refusal(client, error.status, stream=streamed)
        assert found == {"type": kind, "message": "no"}


async def test_errors_of_the_request(client: httpx.AsyncClient) -> None:
    assert (await refusal(client, 404, model="claude-x"))["type"] == "not_found_error"
    assert (await refusal(client, 400, messages=[]))["type"] == "invalid_request_error"
    assert (await refusal(client, 400, temperature=3))["type"] == "invalid_request_error"
    assert (await refusal(client, 404, PATH + "/batches"))["type"] == "not_found_error"
    broken = await client.post(PATH, content=b"{", headers={"content-type": "application/json"})
    assert broken.json()["error"]["type"] == "invalid_request_error"
    long = await client.post(PATH, content=b" " * (5 << 20), headers={"content-type": "application/json"})
    assert (long.status_code, long.json()["error"]["type"]) == (413, "request_too_large")


async def test_a_key_may_come_as_anthropics_clients_send_it(frontend: FakeFrontend) -> None:
    app = make_app(frontend, access=AccessOptions(api_key=["secret"]))
    async with make_client(app) as client:
        error = await refusal(client, 401)
        assert error["type"] == "authentication_error" and "x-api-key" in error["message"]
        client.headers["x-api-key"] = "wrong"
        await refusal(client, 401)
        client.headers["x-api-key"] = "secret"
        await talk(client)
        assert (await client.get("/v1/models")).status_code == 200
        client.headers["authorization"] = "Bearer wrong"
        await refusal(client, 401)


async def test_a_silent_stream_is_kept_alive_by_pings(
    frontend: FakeFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "OPEN_AFTER", 0.01)
    frontend.gate = asyncio.Event()  # nothing comes after the first tokens
    app = make_app(frontend, sse_keep_alive_interval=0.01)
    begin, *silence = await asyncio.wait_for(leave(app, PATH, {**BODY, "stream": True}, after=3), 60)
    assert b"message_start" in begin
    assert all(piece.endswith(b'event: ping\ndata: {"type":"ping"}\n\n') for piece in silence)


async def test_a_client_that_leaves_ends_its_request(app: ASGIApp, frontend: FakeFrontend) -> None:
    frontend.gate = asyncio.Event()
    await asyncio.wait_for(leave(app, PATH, {**BODY, "stream": True}, after=1), 60)
    assert (frontend.running, frontend.finished) == (0, 0)


async def test_the_tokens_of_the_very_prompt_are_counted(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    body = {"system": "be", "thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}}
    answer = await talk(client, **body)
    counted = await client.post(
        PATH + "/count_tokens?beta=true",
        json={**body, **{key: BODY[key] for key in ("model", "messages", "tools")}},
    )
    assert counted.json() == {"input_tokens": answer["usage"]["input_tokens"]}
    long = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 9000}]}
    assert (await client.post(PATH + "/count_tokens", json=long)).json()["input_tokens"] > 9000
    assert (await refusal(client, 404, PATH + "/count_tokens", model="x"))["type"] == "not_found_error"


async def test_what_has_no_effect_is_said(client: httpx.AsyncClient) -> None:
    tools = [TOOL, {"type": "web_search_20250305", "name": "web_search"}]
    response = await client.post(PATH, json={**BODY, "tools": tools})
    assert "web_search_20250305" in response.headers["warning"]
