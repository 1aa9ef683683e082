"""POST /v1/chat/completions, from the bytes of a request to the bytes of its answer."""

import json
from typing import Any

import httpx
import msgspec
import pytest
from fake_api import make_app, make_client, post, post_stream, refusal
from fake_frontend import FakeFrontend

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
PROMPT = "<user>hi\n<assistant>"


async def talk(client: httpx.AsyncClient, *messages: Any, **body: Any) -> Any:
    return await post(client, PATH, messages=messages or [USER], **body)


async def stream(client: httpx.AsyncClient, *messages: Any, **body: Any) -> list[Any]:
    return await post_stream(client, PATH, messages=messages or [USER], **body)


async def refusal_of(client: httpx.AsyncClient, **body: Any) -> Any:
    return await refusal(client, PATH, **{"messages": [USER], **body})


def written(frontend: FakeFrontend) -> str:
    """The prompt of the last request, as text."""
    return bytes(frontend.asked[-1][0]).decode()


async def test_the_whole_answer(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    answer = await talk(client)
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "chat.completion",
        "model": "org/tiny",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello, world.",
                    "refusal": None,
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [],
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {"prompt_tokens": len(PROMPT), "completion_tokens": 14, "total_tokens": len(PROMPT) + 14},
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    assert written(frontend) == PROMPT


async def test_a_stream_begins_with_the_role_and_ends_with_the_usage(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, max_tokens=5, stream_options={"include_usage": True})
    head = {key: chunks[0][key] for key in ("id", "object", "created", "model")}
    assert head["object"] == "chat.completion.chunk"

    def chunk(delta: dict[str, str], reason: str | None = None, **rest: Any) -> dict[str, Any]:
        return {
            **head,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, **rest}],
        }

    assert chunks == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "Hel"}),
        chunk({"content": "lo"}, "length", stop_reason=None),
        {
            **head,
            "choices": [],
            "usage": {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25},
        },
    ]


async def test_every_choice_opens_with_its_role(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, n=3, temperature=1, max_tokens=4)
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]
    assert all(chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""} for chunk in chunks[:3])
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[3:])


async def test_usage_of_every_chunk(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, max_tokens=5, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 3, 5, 5]
    assert [chunk["usage"]["prompt_tokens"] for chunk in chunks] == [20] * 4


@pytest.mark.parametrize("per_step", [1, 4, 100])
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"stop": ", w"},
        {"stop": ["rl", "o"], "include_stop_str_in_output": True},
        {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"n": 2, "temperature": 1, "logprobs": True},
        {"echo": True, "continue_final_message": True},
    ],
)
async def test_streamed_or_not_it_is_the_same(
    frontend: FakeFrontend, client: httpx.AsyncClient, body: dict[str, Any], per_step: int
) -> None:
    frontend.reply = "Hé漢🙂, world."
    frontend.per_step = per_step
    messages = [USER, {"role": "assistant", "content": "Well: "}]
    whole = await talk(client, *messages, **body)
    joined: dict[int, dict[str, Any]] = {}
    for chunk in await stream(client, *messages, **body):
        [choice] = chunk["choices"]
        sofar = joined.setdefault(
            choice["index"], {"role": None, "content": "", "logprobs": None, "token_ids": None}
        )
        assert "finish_reason" not in sofar
        sofar["role"] = choice["delta"].get("role", sofar["role"])
        sofar["content"] += choice["delta"]["content"]
        if "token_ids" in choice:
            sofar["token_ids"] = (sofar["token_ids"] or []) + choice["token_ids"]
        if choice["logprobs"]:
            sofar["logprobs"] = (sofar["logprobs"] or []) + choice["logprobs"]["content"]
        if choice["finish_reason"] is not None:
            sofar["finish_reason"], sofar["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
    for choice in whole["choices"]:
        assert joined[choice["index"]] == {
            "role": choice["message"]["role"],
            "content": choice["message"]["content"],
            "logprobs": choice["logprobs"] and choice["logprobs"]["content"],
            "token_ids": choice["token_ids"],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }


async def test_logprobs(client: httpx.AsyncClient) -> None:
    answer = await talk(client, logprobs=True, top_logprobs=2, max_tokens=1)
    assert answer["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "H",
                "logprob": -0.5,
                "bytes": [72],
                "top_logprobs": [
                    {"token": "H", "logprob": -0.5, "bytes": [72]},
                    {"token": "I", "logprob": -1.5, "bytes": [73]},
                ],
            }
        ]
    }
    plain = await talk(client, logprobs=True, max_tokens=1)
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_prompt_logprobs_and_ids_stand_at_the_top(client: httpx.AsyncClient) -> None:
    answer = await talk(client, prompt_logprobs=0, return_token_ids=True, max_tokens=2)
    assert answer["prompt_token_ids"] == [*PROMPT.encode()]
    assert len(answer["prompt_logprobs"]) == len(PROMPT)
    assert answer["prompt_logprobs"][:2] == [
        None,
        {str(ord("u")): {"logprob": -0.5, "rank": 1, "decoded_token": "u"}},
    ]
    role, text = await stream(client, return_token_ids=True, max_tokens=2)
    assert role["prompt_token_ids"] == [*PROMPT.encode()]
    assert "prompt_token_ids" not in text
    assert text["choices"][0]["token_ids"] == [*b"He"]


async def test_the_role_of_the_answer(frontend: FakeFrontend) -> None:
    async with make_client(make_app(frontend, response_role="bot")) as client:
        assert (await talk(client))["choices"][0]["message"]["role"] == "bot"
        going_on = await talk(client, USER, continue_final_message=True)
        assert going_on["choices"][0]["message"]["role"] == "user"
        assert (await stream(client))[0]["choices"][0]["delta"]["role"] == "bot"


async def test_continuing_a_message(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    begun = {"role": "assistant", "content": "Well, "}
    answer = await talk(client, USER, begun, continue_final_message=True, echo=True)
    assert written(frontend) == "<user>hi\n<assistant>Well, "
    assert answer["choices"][0]["message"]["content"] == "Well, Hello, world."
    chunks = await stream(client, USER, begun, continue_final_message=True, echo=True)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks[:3]] == ["", "Well, ", "Hel"]


async def test_echo_of_somebody_elses_message_is_nothing(client: httpx.AsyncClient) -> None:
    assert (await talk(client, echo=True))["choices"][0]["message"]["content"] == "Hello, world."


async def test_the_template_gets_all_it_may_want(frontend: FakeFrontend) -> None:
    options = {"default_chat_template_kwargs": {"mood": "calm"}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    async with make_client(make_app(frontend, **options)) as client:
        await talk(client, tools=tools, reasoning_effort="low")
        assert written(frontend) == "<user>hi\n[look](calm)(low)<assistant>"
        await talk(client, chat_template_kwargs={"mood": "wild", "add_generation_prompt": False})
        assert written(frontend) == "<user>hi\n(wild)<assistant>"
        await talk(client, add_generation_prompt=False, add_special_tokens=True)
        assert frontend.asked[-1][0] == [257, *b"<user>hi\n(calm)"]


async def test_content_parts(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await talk(client, {"role": "user", "content": parts}, {"role": "assistant"})
    assert written(frontend) == "<user>a\nb\n<assistant>\n<assistant>"


async def test_a_template_of_the_request_needs_trust(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    template = "{% for message in messages %}{{ message.content }}!{% endfor %}"
    error = await refusal_of(client, chat_template=template)
    assert error["param"] == "chat_template"
    assert "--trust-request-chat-template" in error["message"]
    async with make_client(make_app(frontend, trust_request_chat_template=True)) as trusting:
        await talk(trusting, chat_template=template)
        assert written(frontend) == "hi!"


async def test_a_long_conversation_is_written_all_the_same(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    messages = [{"role": "user", "content": "."}] * 100
    await talk(client, *messages, truncate_prompt_tokens=50, max_tokens=1)
    assert written(frontend) == ("<user>.\n" * 100 + "<assistant>")[-50:]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"temperature": 3}, "temperature must be in [0, 2], got 3.0."),
        (
            {"messages": [{"role": "user", "content": "x" * 128}]},
            "This model's maximum context length is 128",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
    ],
)
async def test_refused(client: httpx.AsyncClient, body: dict[str, Any], message: str) -> None:
    raw = json.dumps({"messages": [USER], **body}).encode()
    response = await client.post(PATH, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["type"] == "BadRequestError"


@pytest.mark.parametrize("count", [-2, 21])
async def test_wrong_top_logprobs_are_named_so(client: httpx.AsyncClient, count: int) -> None:
    assert (await refusal_of(client, logprobs=True, top_logprobs=count))["param"] == "top_logprobs"


async def test_unknown_fields_pass_if_the_operator_says_so(frontend: FakeFrontend) -> None:
    await refusal_of(make_client(make_app(frontend)), zzzz=1)
    client = make_client(make_app(frontend, ignore_unknown_fields=True))
    await talk(client, zzzz=1)
    frontend.facts = msgspec.structs.replace(frontend.facts, max_model_len=100_000)
    await talk(client, *[USER] * 400, zzzz=1)  # the helper reads it
    assert frontend.read_elsewhere
