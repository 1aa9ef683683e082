"""POST /v1/completions, from the bytes of a request to the bytes of its answer."""

from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client, post, post_stream, refusal
from fake_frontend import BOS, EOS, FakeFrontend

PATH = "/v1/completions"


async def test_the_whole_answer(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, model="tiny", prompt="hi")
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
    chunks = await post_stream(client, PATH, prompt="hi", max_tokens=5)
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
    whole = await post(client, PATH, **body)
    chunks = await post_stream(client, PATH, **body, stream_options={"include_usage": True})
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
    answer = await post(client, PATH, **body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 2 + 3, "completion_tokens": 4 * 2, "total_tokens": 13}
    assert [prompt for prompt, *_ in frontend.asked] == [[BOS, *b"a"], [BOS, *b"bc"]]
    echoed = await post(client, PATH, **body, echo=True)
    assert [choice["text"] for choice in echoed["choices"]] == ["aHe", "aHe", "bcHe", "bcHe"]
    indexes = [chunk["choices"][0]["index"] for chunk in await post_stream(client, PATH, **body)]
    assert sorted(set(indexes)) == [0, 1, 2, 3]


async def test_prompts_run_together(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.delay = 0.01  # they are started a few at a time
    answer = await post(client, PATH, prompt=[f"prompt {i}" for i in range(40)], max_tokens=1)
    assert len(answer["choices"]) == 40
    assert (frontend.most_running, frontend.running, frontend.finished) == (40, 0, 40)


async def test_ids_as_the_prompt(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, prompt=[104, 105], echo=True, max_tokens=1)
    assert frontend.asked[0][0] == [104, 105]
    assert answer["choices"][0]["text"] == "hiH"
    answer = await post(client, PATH, prompt=[[104], [105]], max_tokens=1)
    assert len(answer["choices"]) == 2


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
    [choice] = (await post(client, PATH, prompt="hi", **fields))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        text,
        finish_reason,
        stop_reason,
    )


async def test_a_stop_token_is_the_reason_even_if_it_is_number_0(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    frontend.reply = "\0"
    [choice] = (await post(client, PATH, prompt="hi", stop_token_ids=[0], max_tokens=1))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 0)


async def test_usage_in_a_stream(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    body = {"prompt": "hi", "max_tokens": 5}
    assert all("usage" not in chunk for chunk in await post_stream(client, PATH, **body))
    *chunks, last = await post_stream(client, PATH, **body, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert all("usage" not in chunk for chunk in chunks)
    always = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await post_stream(client, PATH, **body, stream_options=always)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [3, 5, 5]
    lonely = await post_stream(client, PATH, **body, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in lonely)
    async with make_client(make_app(frontend, enable_force_include_usage=True)) as other:
        assert all("usage" in chunk for chunk in await post_stream(other, PATH, **body))


async def test_cached_tokens_are_told_where_the_operator_wants(frontend: FakeFrontend) -> None:
    frontend.cached = 2
    async with make_client(make_app(frontend, enable_prompt_tokens_details=True)) as client:
        answer = await post(client, PATH, prompt=["hi", "ho"], n=2, temperature=1)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_the_engine_is_asked_as_the_request_says(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    answer = await post(client, PATH, prompt="hi", priority=-3, cache_salt="mine", request_id="r-1")
    [(_, _, asked)] = frontend.asked
    assert answer["id"] == asked["request_id"] == "cmpl-r-1"
    assert (asked["priority"], asked["salt"], asked["replica"]) == (-3, "mine", None)


async def test_the_prompts_of_a_request_share_a_group(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    for _ in range(2):
        await post(client, PATH, prompt=["a", "b"])
    await post(client, PATH, prompt="c")
    assert [asked.get("group") for _, _, asked in frontend.asked] == [1, 1, 2, 2, None]


@pytest.mark.parametrize(("asked", "server", "used"), [(None, 1, 1), (None, 4, 4), (6, 4, 6), (2, 4, 4)])
async def test_the_longer_stream_interval_wins(asked: int | None, server: int, used: int) -> None:
    frontend = FakeFrontend(per_step=1)
    async with make_client(make_app(frontend, stream_interval=server)) as client:
        await post_stream(client, PATH, prompt="hi", stream_interval=asked)
    assert frontend.asked[0][2]["interval"] == used


async def test_the_header_names_the_request(client: httpx.AsyncClient) -> None:
    response = await client.post(
        PATH, json={"prompt": "hi", "request_id": "b"}, headers={"X-Request-Id": "a:1"}
    )
    assert response.json()["id"] == "cmpl-a:1"


# Token ids, log-probabilities and special tokens


async def test_echo_with_logprobs(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, prompt="hi", echo=True, logprobs=1, max_tokens=1)
    [choice] = answer["choices"]
    assert choice["text"] == "hiH"
    assert choice["logprobs"] == {
        "text_offset": [0, 0, 1, 2],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "tokens": ["<bos>", "h", "i", "H"],
        "top_logprobs": [None, {"h": -0.5}, {"i": -0.5}, {"H": -0.5}],
    }


async def test_scoring_makes_nothing(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, prompt="hi", echo=True, logprobs=0, max_tokens=0, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["text"] == "hi"
    assert choice["token_ids"] == [BOS, *b"hi"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, prompt="hi", prompt_logprobs=2, max_tokens=1)
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
    [choice] = (await post(client, PATH, **body))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([BOS, *b"hi"], [*b"Hell"])
    first, second = [chunk["choices"][0] for chunk in await post_stream(client, PATH, **body)]
    assert (first["prompt_token_ids"], first["token_ids"]) == ([BOS, *b"hi"], [*b"Hel"])
    assert second["token_ids"] == [*b"l"]
    assert "prompt_token_ids" not in second


async def test_tokens_as_ids_by_request_and_by_server(
    frontend: FakeFrontend, client: httpx.AsyncClient
) -> None:
    body = {"prompt": "hi", "max_tokens": 1, "logprobs": 0}
    as_ids = {**body, "return_tokens_as_token_ids": True}
    assert (await post(client, PATH, **as_ids))["choices"][0]["logprobs"]["tokens"] == ["token_id:72"]
    assert (await post(client, PATH, **body))["choices"][0]["logprobs"]["tokens"] == ["H"]
    async with make_client(make_app(frontend, return_tokens_as_token_ids=True)) as other:
        assert (await post(other, PATH, **body))["choices"][0]["logprobs"]["tokens"] == ["token_id:72"]
        as_text = {**body, "return_tokens_as_token_ids": False}
        assert (await post(other, PATH, **as_text))["choices"][0]["logprobs"]["tokens"] == ["H"]


async def test_special_tokens_can_be_shown(client: httpx.AsyncClient) -> None:
    shown = await post(client, PATH, prompt=[BOS, 104], echo=True, skip_special_tokens=False, ignore_eos=True)
    assert shown["choices"][0]["text"] == "<bos>hHello, world.<eos>"
    hidden = await post(client, PATH, prompt=[BOS, 104], echo=True, ignore_eos=True)
    assert hidden["choices"][0]["text"] == "hHello, world."


async def test_eos_is_counted_and_not_shown(client: httpx.AsyncClient) -> None:
    [choice] = (await post(client, PATH, prompt="hi", logprobs=0, return_token_ids=True))["choices"]
    assert choice["token_ids"][-1] == EOS
    assert choice["logprobs"]["text_offset"][-1] == len(choice["text"])


async def test_the_best_of_several_come_first(frontend: FakeFrontend, client: httpx.AsyncClient) -> None:
    frontend.logprob_of = lambda choice: -float((choice * 2) % 5)  # the third and the first are the best
    answer = await post(client, PATH, prompt=["a", "b"], n=2, best_of=4, max_tokens=3, return_token_ids=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    assert answer["usage"]["completion_tokens"] == 2 * 4 * 3
    shown = await post(client, PATH, prompt="a", n=2, best_of=4, max_tokens=3, logprobs=0)
    assert [choice["logprobs"]["token_logprobs"] for choice in shown["choices"]] == [[0.0] * 3, [-1.0] * 3]


async def test_greedy_answers_may_be_several(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, prompt="a", n=2, temperature=0)
    assert len({choice["text"] for choice in answer["choices"]}) == 1


# Requests that are refused, and prompts and answers that are cut to the model's length.


@pytest.mark.parametrize("name", ["", "../../x", "a b", "x" * 129, "a\r\nb"])
async def test_a_request_id_of_other_characters_is_refused(client: httpx.AsyncClient, name: str) -> None:
    assert (await refusal(client, PATH, prompt="hi", request_id=name))["param"] == "request_id"


async def test_an_unknown_model(client: httpx.AsyncClient) -> None:
    error = await refusal(client, PATH, status=404, model="x", prompt="hi")
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert error["message"].startswith("The model `x` does not exist.")


@pytest.mark.parametrize("name", [None, ""])
async def test_no_model_is_the_served_one(client: httpx.AsyncClient, name: str | None) -> None:
    assert (await post(client, PATH, model=name, prompt="hi"))["model"] == "org/tiny"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature must be in [0, 2], got 3.0. (parameter=temperature, value=3.0)"),
        (
            {"prompt": "x" * 128},
            "This model's maximum context length is 128 tokens. However, your prompt contains 129",
        ),
        ({"prompt": "x" * 127}, "The decoder prompt (length 128) plus the number of requested output tokens"),
        ({"prompt": "x" * 3_000_000}, "This model's maximum context length is 128 tokens."),
        ({"prompt": "", "add_special_tokens": False}, "The decoder prompt cannot be empty"),
        ({"prompt": [-1]}, "token_id(s) [-1] in prompt contain out-of-vocab token ids. Vocabulary size: 258"),
        (
            {"prompt": [1, 258]},
            "token_id(s) [258] in prompt contain out-of-vocab token ids. Vocabulary size: 258",
        ),
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
    error = await refusal(client, PATH, **{"prompt": "hi", **fields, "stream": streamed})
    assert message in error["message"]
    assert error["type"] == "BadRequestError"


async def test_max_tokens_is_clamped_to_the_window(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, prompt="x" * 122, max_tokens=128)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 128


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, b"XYZ"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, b"XYZ"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, b"abc"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 100}, b"." * 25 + b"XYZ"),
        ({"truncate_prompt_tokens": -1, "max_tokens": None}, b"." * 109 + b"XYZ"),
    ],
)
async def test_truncation(
    frontend: FakeFrontend, client: httpx.AsyncClient, fields: dict[str, Any], kept: bytes
) -> None:
    prompt = "abc" + "." * 300_000 + "XYZ"
    answer = await post(client, PATH, prompt=prompt, add_special_tokens=False, echo=True, **fields)
    assert frontend.asked[0][0] == [*kept]
    assert answer["usage"]["prompt_tokens"] == len(kept)
    assert answer["choices"][0]["text"].startswith(kept.decode())
