"""POST /v1/completions, from the bytes of a request to the bytes of its answer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_api import events, make_app, make_client
from fake_frontend import BOS, EOS, FakeFrontend

PATH = "/v1/completions"


async def complete(client: httpx.AsyncClient, **body: Any) -> Any:
    response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **body: Any) -> list[Any]:
    response = await client.post(PATH, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    return chunks


async def error_of(client: httpx.AsyncClient, status: int = 400, **body: Any) -> Any:
    response = await client.post(PATH, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


async def test_the_whole_answer(client: httpx.AsyncClient) -> None:
    answer = await complete(client, model="tiny", prompt="hi")
    assert answer.pop("id").startswith("cmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "object": "text_completion",
        "model": "org/tiny",
        "choices": [
            {
                "index": 0,
                "text": "Hello, world.",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {"prompt_tokens": 3, "completion_tokens": 14, "total_tokens": 17},
    }


async def test_a_stream(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, prompt="hi", max_tokens=5)
    head = {key: chunks[0][key] for key in ("id", "object", "created", "model")}
    assert head["object"] == "text_completion"
    assert chunks == [
        {**head, "choices": [{"index": 0, "text": "Hel", "logprobs": None, "finish_reason": None}]},
        {
            **head,
            "choices": [
                {"index": 0, "text": "lo", "logprobs": None, "finish_reason": "length", "stop_reason": None}
            ],
        },
    ]


@pytest.mark.parametrize("per_step", [1, 2, 5, 100])
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"stop": ", w"},
        {"stop": ["world", "lo"], "include_stop_str_in_output": True},
        {"max_tokens": 8},
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 2, "max_tokens": 0},
        {"echo": True, "return_token_ids": True},
        {"logprobs": 3, "return_token_ids": True, "return_tokens_as_token_ids": True},
        {"n": 2, "temperature": 1, "logprobs": 0},
        {"skip_special_tokens": False, "ignore_eos": True, "stop_token_ids": [ord("w")], "logprobs": 1},
        {"prompt": ["hi", "you"], "n": 3, "temperature": 1, "logprobs": 1, "echo": True},
    ],
)
async def test_streamed_or_not_it_is_the_same(
    frontend: FakeFrontend, client: httpx.AsyncClient, body: dict[str, Any], per_step: int
) -> None:
    frontend.reply = "Hé漢🙂, world."
    frontend.per_step = per_step
    body = {"prompt": "gr\u00fc\u00df", "max_tokens": 40, **body}
    whole = await complete(client, **body)
    chunks = await stream(client, **body, stream_options={"include_usage": True})
    assert chunks.pop()["usage"] == whole["usage"]
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        sofar = joined.setdefault(choice["index"], {"text": "", "logprobs": None, "token_ids": []})
        assert "finish_reason" not in sofar
        sofar["text"] += choice["text"]
        sofar["token_ids"] += choice.get("token_ids", [])
        if choice["logprobs"] is not None:
            lists = sofar["logprobs"] or {name: [] for name in choice["logprobs"]}
            sofar["logprobs"] = {name: lists[name] + new for name, new in choice["logprobs"].items()}
        if choice["finish_reason"] is not None:
            sofar["finish_reason"], sofar["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
    assert sorted(joined) == list(range(len(whole["choices"])))
    for choice in whole["choices"]:
        streamed = joined[choice["index"]]
        streamed["token_ids"] = streamed["token_ids"] or None
        assert streamed == {key: choice[key] for key in streamed}


async def test_prompts_and_choices_are_numbered(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    body = {"prompt": ["a", "bc"], "n": 2, "temperature": 1, "max_tokens": 2}
    answer = await complete(client, **body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 2 + 3, "completion_tokens": 4 * 2, "total_tokens": 13}
    assert [prompt for prompt, *_ in frontend.asked] == [[BOS, *b"a"], [BOS, *b"bc"]]
    echoed = await complete(client, **body, echo=True)
    assert [choice["text"] for choice in echoed["choices"]] == ["aHe", "aHe", "bcHe", "bcHe"]
    indexes = [chunk["choices"][0]["index"] for chunk in await stream(client, **body)]
    assert sorted(set(indexes)) == [0, 1, 2, 3]


async def test_prompts_run_together(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt=[f"prompt {i}" for i in range(40)], max_tokens=1)
    assert len(answer["choices"]) == 40
    assert (frontend.most_running, frontend.running, frontend.finished) == (40, 0, 40)


async def test_ids_as_the_prompt(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt=[104, 105], echo=True, max_tokens=1)
    assert frontend.asked[0][0] == [104, 105]
    assert answer["choices"][0]["text"] == "hiH"
    answer = await complete(client, prompt=[[104], [105]], max_tokens=1)
    assert len(answer["choices"]) == 2


async def test_echo_with_logprobs(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="hi", echo=True, logprobs=1, max_tokens=1)
    [choice] = answer["choices"]
    assert choice["text"] == "hiH"
    assert choice["logprobs"] == {
        "text_offset": [0, 0, 1, 2],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "tokens": ["<bos>", "h", "i", "H"],
        "top_logprobs": [None, {"h": -0.5}, {"i": -0.5}, {"H": -0.5}],
    }


async def test_scoring_makes_nothing(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="hi", echo=True, logprobs=0, max_tokens=0, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["text"] == "hi"
    assert choice["token_ids"] == [BOS, *b"hi"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="hi", prompt_logprobs=2, max_tokens=1)
    assert answer["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "104": {"logprob": -0.5, "rank": 1, "decoded_token": "h"},
            "105": {"logprob": -1.5, "rank": 2, "decoded_token": "i"},
        },
        {
            "105": {"logprob": -0.5, "rank": 1, "decoded_token": "i"},
            "106": {"logprob": -1.5, "rank": 2, "decoded_token": "j"},
        },
    ]


async def test_token_ids(client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "max_tokens": 4, "return_token_ids": True}
    [choice] = (await complete(client, **body))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([BOS, *b"hi"], [*b"Hell"])
    first, second = [chunk["choices"][0] for chunk in await stream(client, **body)]
    assert (first["prompt_token_ids"], first["token_ids"]) == ([BOS, *b"hi"], [*b"Hel"])
    assert second["token_ids"] == [*b"l"]
    assert "prompt_token_ids" not in second


async def test_tokens_as_ids_by_request_and_by_server(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    body = {"prompt": "hi", "max_tokens": 1, "logprobs": 0}
    as_ids = {**body, "return_tokens_as_token_ids": True}
    assert (await complete(client, **as_ids))["choices"][0]["logprobs"]["tokens"] == ["token_id:72"]
    assert (await complete(client, **body))["choices"][0]["logprobs"]["tokens"] == ["H"]
    async with make_client(make_app(frontend, return_tokens_as_token_ids=True)) as other:
        assert (await complete(other, **body))["choices"][0]["logprobs"]["tokens"] == ["token_id:72"]
        as_text = {**body, "return_tokens_as_token_ids": False}
        assert (await complete(other, **as_text))["choices"][0]["logprobs"]["tokens"] == ["H"]


@pytest.mark.parametrize(
    ("fields", "text", "finish_reason", "stop_reason"),
    [
        ({"stop": "lo, w"}, "Hel", "stop", "lo, w"),
        ({"stop": "lo, w", "include_stop_str_in_output": True}, "Hello, w", "stop", "lo, w"),
        ({"stop": ["zzz", "!"]}, "Hello, world.", "stop", None),
        ({"max_tokens": 2}, "He", "length", None),
    ],
)
async def test_ends(
    client: httpx.AsyncClient, fields: dict[str, Any], text: str, finish_reason: str, stop_reason: str | None
) -> None:
    [choice] = (await complete(client, prompt="hi", **fields))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        text,
        finish_reason,
        stop_reason,
    )


async def test_a_stop_token_is_the_reason_even_if_it_is_number_0(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    frontend.reply = "\0"
    [choice] = (await complete(client, prompt="hi", stop_token_ids=[0], max_tokens=1))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 0)


async def test_usage_in_a_stream(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "max_tokens": 5}
    assert all("usage" not in chunk for chunk in await stream(client, **body))
    *chunks, last = await stream(client, **body, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert all("usage" not in chunk for chunk in chunks)
    always = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, **body, stream_options=always)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [3, 5, 5]
    lonely = await stream(client, **body, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in lonely)
    async with make_client(make_app(frontend, enable_force_include_usage=True)) as other:
        assert all("usage" in chunk for chunk in await stream(other, **body))


async def test_cached_tokens_are_told_where_the_operator_wants(frontend: FakeFrontend) -> None:
    frontend.cached = 2
    async with make_client(make_app(frontend, enable_prompt_tokens_details=True)) as client:
        answer = await complete(client, prompt=["hi", "ho"], n=2, temperature=1)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_the_engine_is_asked_as_the_request_says(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    answer = await complete(client, prompt="hi", priority=-3, cache_salt="mine", request_id="r-1")
    [(_, _, asked)] = frontend.asked
    assert answer["id"] == asked["request_id"] == "cmpl-r-1"
    assert (asked["priority"], asked["salt"], asked["replica"]) == (-3, "mine", None)


async def test_a_replica_can_be_named(frontend: FakeFrontend) -> None:
    async with make_client(make_app(frontend, data_parallel_size=3)) as client:
        for named, status in (("2", 200), ("3", 400), ("-1", 400), ("x", 400)):
            headers = {"X-data-parallel-rank": named}
            answer = await client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
            assert answer.status_code == status
    assert [asked["replica"] for _, _, asked in frontend.asked] == [2]


@pytest.mark.parametrize(("asked", "server", "used"), [(None, 1, 1), (None, 4, 4), (6, 4, 6), (2, 4, 4)])
async def test_the_longer_stream_interval_wins(asked: int | None, server: int, used: int) -> None:
    frontend = FakeFrontend(per_step=1)
    async with make_client(make_app(frontend, stream_interval=server)) as client:
        await stream(client, prompt="hi", stream_interval=asked)
    assert frontend.asked[0][2]["interval"] == used


async def test_the_header_names_the_request(client: httpx.AsyncClient) -> None:
    response = await client.post(
        PATH, json={"prompt": "hi", "request_id": "b"}, headers={"X-Request-Id": "a:1"}
    )
    assert response.json()["id"] == "cmpl-a:1"


@pytest.mark.parametrize("name", ["", "../../x", "a b", "x" * 129, "a\r\nb"])
async def test_a_request_id_of_other_characters_is_refused(client: httpx.AsyncClient, name: str) -> None:
    assert (await error_of(client, prompt="hi", request_id=name))["param"] == "request_id"


# Refusals


async def test_an_unknown_model(client: httpx.AsyncClient) -> None:
    error = await error_of(client, status=404, model="x", prompt="hi")
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert error["message"].startswith("The model `x` does not exist.")


async def test_no_model_is_the_served_one(client: httpx.AsyncClient) -> None:
    assert (await complete(client, model=None, prompt="hi"))["model"] == "org/tiny"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)"),
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2."),
        ({"n": 129}, "n must be at most 128, got 129."),
        ({"n": 10**15}, "n must be at most 128, got 1000000000000000."),
        ({"n": 0}, "n must be at least 1, got 0."),
        ({"n": -1}, "n must be at least 1, got -1."),
        ({"stop": ["x"] * 17}, "stop may hold at most 16 strings, got 17."),
        ({"stop": "x" * 4097}, "stop strings may hold at most 4096 bytes together, got 4097."),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"logprobs": 21}, "Requested sample logprobs of 21, which is greater than max allowed: 20"),
        ({"logit_bias": {"300": 1}}, "token_id(s) [300] in logit_bias contain out-of-vocab token ids."),
        ({"max_tokens": 129}, "max_tokens=129 cannot be greater than max_model_len=128."),
        (
            {"prompt": "x" * 128},
            "This model's maximum context length is 128 tokens. However, your prompt contains 129",
        ),
        ({"prompt": "x" * 127}, "The decoder prompt (length 128) plus the number of requested output tokens"),
        ({"prompt": "x" * 9_000_000}, "This model's maximum context length is 128 tokens."),
        ({"prompt": [[]]}, "The decoder prompt cannot be empty"),
        ({"prompt": "", "add_special_tokens": False}, "The decoder prompt cannot be empty"),
        ({"prompt": [-1]}, "token_id(s) [-1] in prompt contain out-of-vocab token ids. Vocabulary size: 258"),
        (
            {"prompt": [1, 258]},
            "token_id(s) [258] in prompt contain out-of-vocab token ids. Vocabulary size: 258",
        ),
        ({"prompt": ["x"] * 257}, "prompt may hold at most 256 prompts, got 257."),
        (
            {"truncate_prompt_tokens": 129},
            "truncate_prompt_tokens=129 cannot be greater than max_model_len = 128.",
        ),
        ({"truncate_prompt_tokens": 0}, "The decoder prompt cannot be empty"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], message: str, streamed: bool
) -> None:
    error = await error_of(client, **{"prompt": "hi", **fields, "stream": streamed})
    assert message in error["message"]
    assert error["type"] == "BadRequestError"


async def test_half_a_surrogate_is_no_text(client: httpx.AsyncClient) -> None:
    response = await client.post(
        PATH, content=b'{"prompt": "a\\ud800"}', headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert "surrogate" in response.json()["error"]["message"]


async def test_max_tokens_is_clamped_to_the_window(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="x" * 122, max_tokens=128)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 128


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, b"XYZ"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, b"XYZ"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, b"." * 25 + b"XYZ"),
        ({"truncate_prompt_tokens": -1, "max_tokens": None}, b"." * 124 + b"XYZ"),
    ],
)
async def test_truncation(
    frontend: FakeFrontend, client: httpx.AsyncClient, fields: dict[str, Any], kept: bytes
) -> None:
    prompt = "abc" + "." * 300_000 + "XYZ"
    answer = await complete(client, prompt=prompt, add_special_tokens=False, echo=True, **fields)
    assert frontend.asked[0][0] == [*kept]
    assert answer["usage"]["prompt_tokens"] == len(kept)
    assert answer["choices"][0]["text"].startswith(kept.decode())


async def test_special_tokens_can_be_shown(client: httpx.AsyncClient) -> None:
    shown = await complete(client, prompt=[BOS, 104], echo=True, skip_special_tokens=False, ignore_eos=True)
    assert shown["choices"][0]["text"] == "<bos>hHello, world.<eos>"
    hidden = await complete(client, prompt=[BOS, 104], echo=True, ignore_eos=True)
    assert hidden["choices"][0]["text"] == "hHello, world."


async def test_eos_is_counted_and_not_shown(client: httpx.AsyncClient) -> None:
    [choice] = (await complete(client, prompt="hi", logprobs=0, return_token_ids=True))["choices"]
    assert choice["token_ids"][-1] == EOS
    assert choice["logprobs"]["text_offset"][-1] == len(choice["text"])
