"""Guesses change no answer: one server that guesses and one that does not get the same requests at once."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from live import LiveServer, serving, wait_until

pytestmark = pytest.mark.turns(6)

CONFIG = json.dumps(
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
)
FLAGS = ("demo", "--dtype", "float32", "--no-enable-prefix-caching", "--kv-cache-memory-bytes", "64m")
REPEATED = "one two three four one two three four one two three four one two"
ORDER = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 99},
        "preferred_contact_method": {"enum": ["electronic_mail", "telephone", "letter"]},
        "shipping_address_street": {"type": "string", "maxLength": 8},
        "is_returning_customer": {"type": "boolean"},
    },
    "required": ["customer_identification_number", "preferred_contact_method", "shipping_address_street"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "order", "schema": ORDER}}
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "seed": 8, "top_k": 8, "top_p": 0.9},
    {"temperature": 1.0, "seed": 9, "min_p": 0.1},
    {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0, "logprobs": 2, "return_token_ids": True},
    {"temperature": 0, "stop": ["e", "3"]},
    {"temperature": 0, "stop": ["o"], "include_stop_str_in_output": True},
    {"temperature": 0, "stop_token_ids": [11, 12, 13]},
    {"temperature": 0, "min_tokens": 20},
    {"temperature": 0, "logit_bias": {"50": 4}, "bad_words": ["the"]},
    {"temperature": 0, "allowed_token_ids": [60, 61, 62]},
    {"temperature": 0.9, "seed": 3, "n": 2},
    {"temperature": 0, "speculative_tokens": 0},
    {"temperature": 0, "speculative_tokens": 1},
]


BOUND: list[dict[str, Any]] = [
    {"structured_outputs": {"json": ORDER}},
    {"structured_outputs": {"regex": "(one two three (four|five) ){1,9}"}},
    {"thinking_token_budget": 5, "structured_outputs": {"choice": ["yes it is", "no it is not"]}},
]
"""Requests whose answers are held to a form."""


def requests() -> list[tuple[str, dict[str, Any]]]:
    """72 requests: each of the options on a text that repeats itself and one that does not, chats, forms."""
    found: list[tuple[str, dict[str, Any]]] = []
    for options in OPTIONS:
        for prompt in (REPEATED, "The capital of France is"):
            found.append(("/v1/completions", {"prompt": prompt, "max_tokens": 48, **options}))
    for options in OPTIONS[:6]:
        body = {"messages": [{"role": "user", "content": REPEATED}], "max_tokens": 40, **options}
        found += [("/v1/chat/completions", body), ("/v1/chat/completions", {**body, "stream": True})]
    for options in (OPTIONS[0], OPTIONS[2], OPTIONS[6]):
        body = {"prompt": REPEATED, "max_tokens": 120, **options}
        found += [("/v1/completions", {**body, **bound}) for bound in BOUND]
        chat = {"messages": [{"role": "user", "content": "An order, please."}], "max_tokens": 120}
        found.append(("/v1/chat/completions", {**chat, "response_format": FORM, "temperature": 0, "seed": 4}))
    for options in OPTIONS:
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        found.append(("/v1/completions", {"prompt": REPEATED, "max_tokens": 32, **options, **streamed}))
    return found


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[LiveServer, LiveServer]]:
    with (
        serving(*FLAGS, "--speculative-config", "none") as plain,
        serving(
            *FLAGS, "--speculative-config", CONFIG, "--per-request-spec-decode-metrics", "summary"
        ) as guesses,
    ):
        yield plain, guesses


def answer(client: httpx.Client, path: str, body: dict[str, Any]) -> object:
    """The answer apart from ids and times; of a stream what its chunks say together."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        whole = response.json()
        return {key: whole[key] for key in ("choices", "usage", "system_fingerprint")}
    joined: dict[int, dict[str, Any]] = {}
    usage = None
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            so_far = joined.setdefault(choice["index"], {"text": "", "logprobs": [], "ids": []})
            so_far["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            so_far["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs") or []
            so_far["ids"] += choice.get("token_ids") or []
            so_far["end"] = choice["finish_reason"], choice.get("stop_reason")
    return joined, usage


def answers(server: LiveServer) -> list[object]:
    with (
        httpx.Client(base_url=server.url, timeout=300, verify=False) as client,
        ThreadPoolExecutor(12) as pool,
    ):
        return list(pool.map(lambda asked: answer(client, *asked), requests()))


def counters(server: LiveServer) -> dict[str, float]:
    rows = re.findall(
        r"^vllm:spec_decode_(\w+)_total\{.*?\} (\S+)$", server.get("/metrics").text, re.MULTILINE
    )
    found: dict[str, float] = {}
    for name, value in rows:
        found[name] = found.get(name, 0.0) + float(value)
    return found


def test_answers_are_the_same_with_guesses_and_without(servers: tuple[LiveServer, LiveServer]) -> None:
    plain, guesses = servers
    assert len(requests()) == 72
    for asked, one, other in zip(requests(), answers(plain), answers(guesses), strict=True):
        assert one == other, asked
    assert counters(plain) == {}


def test_what_becomes_of_guesses_adds_up(servers: tuple[LiveServer, LiveServer]) -> None:
    guesses = servers[1]
    time.sleep(1)  # totals are told a few times a second
    before = counters(guesses)
    body = {"prompt": REPEATED, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    told = guesses.post("/v1/completions", body).json()["metrics"]["speculative_decoding"]
    guesses.post("/v1/completions", {**body, "max_tokens": 1})  # the totals follow within a moment
    drafts = before["num_drafts"] + told["num_spec_steps"]
    wait_until(lambda: counters(guesses)["num_drafts"] == drafts, 10, lambda: str(counters(guesses)))
    after = counters(guesses)
    for name, key in {
        "num_drafts": "num_spec_steps",
        "num_draft_tokens": "num_draft_tokens",
        "num_accepted_tokens": "num_accepted_draft_tokens",
        "num_accepted_tokens_per_pos": "num_accepted_draft_tokens",
    }.items():
        assert after[name] - before[name] == told[key], name
    assert told["num_accepted_draft_tokens"] <= told["num_draft_tokens"] <= 4 * told["num_spec_steps"]
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"]


def test_keys_of_a_schema_take_few_steps(servers: tuple[LiveServer, LiveServer]) -> None:
    body = {"prompt": "An order:", "max_tokens": 150, "structured_outputs": {"json": ORDER}, "seed": 5}
    answers = [server.post("/v1/completions", body).json() for server in servers]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["choices"][0]["finish_reason"] == "stop"
    told = answers[1]["metrics"]["speculative_decoding"]
    tokens = answers[1]["usage"]["completion_tokens"]
    assert told["num_accepted_draft_tokens"] > 0.4 * tokens, f"of {tokens} tokens"
    assert told["num_accepted_draft_tokens"] > 0.8 * told["num_draft_tokens"]


def test_a_request_can_turn_guesses_off(servers: tuple[LiveServer, LiveServer]) -> None:
    body = {"prompt": REPEATED, "max_tokens": 60, "temperature": 0, "speculative_tokens": 0}
    told = servers[1].post("/v1/completions", body).json()["metrics"]["speculative_decoding"]
    assert (told["num_spec_steps"], told["num_draft_tokens"]) == (0, 0)
