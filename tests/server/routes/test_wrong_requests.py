"""What a newcomer may ask wrongly: each request gets one sentence that says what to do, in its API's form."""

import json
from typing import Any

import httpx
import pytest

HI = {"role": "user", "content": "hi"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CLAUDE = {"model": "tiny", "max_tokens": 5, "messages": [HI]}
NO_TASK = "It does: generate (POST /v1/completions)."


def chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [HI], **more}


def ollama(**more: Any) -> tuple[str, dict[str, Any]]:
    return "/api/chat", {"model": "tiny", "messages": [HI], **more}


REQUESTS: list[tuple[tuple[str, Any], str]] = [
    ((CHAT, b'{"messages": [}'), "this is not JSON: Expecting value"),
    ((CHAT, {"prompt": "hi"}), "body.messages: this is missing"),
    ((CHAT, {"messages": "hi"}), "body.messages: give a list, got 'hi'"),
    ((CHAT, {"messages": []}), "body.messages: List should have at least 1 item"),
    ((CHAT, {"messages": ["hi"]}), "body.messages.0: give an object, got 'hi'"),
    (
        (CHAT, {"messages": [{**HI, "role": "human"}]}),
        "body.messages.0.role: should be 'system', 'developer'",
    ),
    (chat(temprature=1), "Unknown field: `temprature`, did you mean `temperature`?"),
    (chat(temperature="hot"), "body.temperature: give a number, got 'hot'"),
    (chat(temperature=-1), "temperature must be non-negative, got -1.0"),
    (chat(stream="yes"), "body.stream: give true or false, got 'yes'"),
    (chat(max_tokens=0), "max_tokens must be at least 1, got 0"),
    (chat(max_tokens=100_000), "cannot be greater than max_model_len=128"),
    (chat(model="gpt-4"), "The model `gpt-4` does not exist. Valid aliases: org/tiny, tiny"),
    (chat(tools=[{"name": "f"}]), "body.tools.0.function: this is missing"),
    (chat(response_format={"type": "json"}), "is one of text, json_object, json_schema and structural_tag"),
    (chat(top_logprobs=3), "when using `top_logprobs`, `logprobs` must be set to true"),
    (chat(functions=[{"name": "f"}]), "`functions` has been replaced by `tools`"),
    (chat(repetition_detection={"max_pattern_size": 3}), "repetition_detection.min_count must be at least 2"),
    ((CHAT, {"messages": [{**HI, "content": [{"type": "image_url", "image_url": "x"}]}]}), "only text is"),
    (("/v1/completions", {"messages": [HI]}), "Either prompt or prompt_embeds must be provided"),
    (("/v1/completions", {"prompt": [999_999]}), "contain out-of-vocab token ids. Vocabulary size: 258"),
    (("/v1/completion", {"prompt": "hi"}), "There is no /v1/completion here; GET /docs lists what there is"),
    (("/v1/embeddings", {"input": "hi"}), NO_TASK),
    ((RESPONSES, {"messages": [HI]}), "body.input: this is missing"),
    ((RESPONSES, {"input": "a", "previous_response_id": "resp_1"}), "by --response-store"),
    ((MESSAGES, {"messages": [HI]}), "body.model: this is missing; body.max_tokens: this is missing"),
    ((MESSAGES, {**CLAUDE, "max_tokens": "x"}), "body.max_tokens: give a whole number, got 'x'"),
    ((MESSAGES, {**CLAUDE, "model": "claude"}), "The model `claude` does not exist. Valid aliases"),
    ((MESSAGES, {**CLAUDE, "messages": [{**HI, "role": "tool"}]}), "messages[0].role is one of user"),
    (("/v1/messages/batches", {"requests": []}), "requests: a batch has 1 to 50000, got 0"),
    (("/api/chat", {"messages": [HI]}), "body.model: this is missing"),
    (ollama(model="llama3"), "The model `llama3` does not exist. Valid aliases: org/tiny, tiny"),
    (ollama(options={"num_predict": "x"}), "body.options.num_predict: give a whole number, got 'x'"),
    (ollama(format="xml"), '`format` is "json" or a JSON schema'),
    (("/api/embed", {"model": "tiny", "input": "hi"}), NO_TASK),
    (("/v2/chat", {"message": "hi"}), "Unknown field: `message`, did you mean `messages`?"),
    (("/v2/chat", {"model": "tiny", "messages": [HI], "p": 2}), "p must be in (0, 1], got 2.0"),
    (("/v2/rerank", {"query": "a", "documents": ["b"]}), NO_TASK),
    (("/invocations", {"inputs": "hi"}), "`messages` (/v1/chat/completions); `prompt`"),
    (("/invocations", b"hi"), "The body should be a JSON object"),
    (("/embed", {"inputs": "hi"}), NO_TASK),
    (("/tokenize", {"inputs": "hi"}), "with the header `X-Facet-Dialect: tei`"),
    (("/tokenize", {"text": "hi"}), "Exactly one of `prompt` and `messages` must be given"),
    (("/generate", {}), "Give a text as `text`, or its tokens as `input_ids`"),
    (
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": "x"}}),
        "body.sampling_params.max_new_tokens: give a whole number, got 'x'",
    ),
    (("/generate", {"text": "a", "sampling_params": [1]}), "`sampling_params` is one object, for all texts"),
    (("/completion", {"prompt": "a", "n_predict": "x"}), "body.n_predict: give a whole number, got 'x'"),
    (("/completion", {"prompt": "a", "top_n_sigma": -3}), "top_n_sigma must be non-negative, or -1 (off)"),
    (("/infill", {"input_prefix": "a"}), "Ask a model of code that has some, or leave it out"),
    (("/apply-template", {"prompt": "a"}), "body.messages: this is missing"),
]


@pytest.mark.parametrize(("request_", "said"), REQUESTS, ids=[said[:40] for _, said in REQUESTS])
async def test_a_wrong_request_is_answered_with_a_sentence(
    client: httpx.AsyncClient, request_: tuple[str, Any], said: str
) -> None:
    path, body = request_
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await client.post(path, headers={"Content-Type": "application/json"}, content=content)
    assert response.status_code in (400, 404)
    told = _message(path, response.json())
    assert said in told
    assert "\n" not in told and "…" not in told and "Traceback" not in told and "{'" not in told


def _message(path: str, answer: Any) -> str:
    """The sentence of an error, whose form has to be that of the path's API."""
    if path.startswith("/api/"):
        return answer.pop("error")
    error = answer["error"]
    if path.startswith(MESSAGES):
        assert answer.keys() == {"type", "error"} and error.keys() == {"type", "message"}
    else:
        assert answer.keys() == {"error"} and error.keys() == {"message", "type", "param", "code"}
    return error["message"]
