"""One text, however it is asked for: streamed or whole, alone or in a crowd, preempted or not."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from live import LiveServer, chunks, preemptions, serving

PROMPTS = [
    f"{head} {i}"
    for i in range(8)
    for head in ("Count from", "The capital of", "Once upon a time", "日本 🎌")
]

OPTIONS: dict[str, dict] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "top_p": {"temperature": 1.2, "seed": 3, "top_p": 0.7},
    "top_k": {"temperature": 1.2, "seed": 3, "top_k": 5},
    "min_p": {"temperature": 1.5, "seed": 3, "min_p": 0.1},
    "penalties": {
        "temperature": 0,
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 2.0,
    },
    "n": {"temperature": 1.0, "seed": 5, "n": 3},
    "stop": {"temperature": 0, "stop": ["a", "."]},
    "stop kept": {"temperature": 0, "stop": ["e"], "include_stop_str_in_output": True},
    "stop id": {"temperature": 0, "stop_token_ids": [10, 11, 12, 13, 14, 15]},
    "min_tokens": {"temperature": 0, "min_tokens": 20},
    "ignore_eos": {"temperature": 0, "ignore_eos": True},
    "bias": {"temperature": 0, "logit_bias": {"50": 100}},
    "bad words": {"temperature": 0, "bad_words": ["the", "a"]},
    "allowed": {"temperature": 0, "allowed_token_ids": [60, 61, 62, 63, 64]},
    "special": {"temperature": 0, "skip_special_tokens": False},
    "bytes": {"temperature": 2.0, "seed": 11, "ignore_eos": True},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "echo": {"temperature": 0, "echo": True, "logprobs": 1},
    "ids": {"temperature": 0, "return_token_ids": True},
    "interval": {"temperature": 0, "stream_interval": 4},
}


def whole(server: LiveServer, prompt: str, **options: object) -> list[dict]:
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 24, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def streamed(server: LiveServer, prompt: str, **options: object) -> list[dict]:
    body = {"prompt": prompt, "max_tokens": 24, "stream": True, **options}
    joined: dict[int, dict] = {}
    with server.stream("/v1/completions", body) as response:
        assert response.status_code == 200, response.read()
        for chunk in chunks(response):
            for choice in chunk["choices"]:
                so_far = joined.setdefault(choice["index"], {"text": "", "ids": [], "logprobs": []})
                so_far["text"] += choice["text"]
                so_far["ids"] += choice.get("token_ids") or []
                so_far["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs") or []
                so_far["finish"] = choice["finish_reason"]
                so_far["stop_reason"] = choice.get("stop_reason")
    return [joined[i] for i in sorted(joined)]


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("prompt", ["The capital of France is", "日本語 🎌 and"])
def test_streamed_equals_whole(demo: LiveServer, name: str, prompt: str):
    expected = whole(demo, prompt, **OPTIONS[name])
    found = streamed(demo, prompt, **OPTIONS[name])
    assert len(found) == len(expected) == OPTIONS[name].get("n", 1)
    for joined, choice in zip(found, expected, strict=True):
        assert joined["text"] == choice["text"]
        assert joined["finish"] == choice["finish_reason"]
        assert joined["stop_reason"] == choice["stop_reason"]
        if choice.get("logprobs"):
            assert joined["logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        if choice.get("token_ids"):
            assert joined["ids"] == choice["token_ids"]


def test_options_do_something(demo: LiveServer):
    """The test above would pass if its options were ignored, so this one shows that they are not."""
    plain = whole(demo, "Once upon a time", temperature=0)[0]["text"]
    for name in ("penalties", "stop", "stop id", "bias", "bad words", "allowed"):
        assert whole(demo, "Once upon a time", **OPTIONS[name])[0]["text"] != plain, name
    assert whole(demo, "x", temperature=1, seed=1, n=4) != whole(demo, "x", temperature=1, seed=2, n=4)


def crowd(server: LiveServer, prompts: list[str], **options: object) -> list[str]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda p: whole(server, p, **options)[0]["text"], prompts))


@pytest.mark.turns
@pytest.mark.parametrize("options", [OPTIONS["greedy"], OPTIONS["seeded"]], ids=["greedy", "seeded"])
def test_32_at_once_equal_one_at_a_time(demo: LiveServer, options: dict):
    alone = [whole(demo, p, **options)[0]["text"] for p in PROMPTS]
    assert len(set(alone)) > 8
    assert crowd(demo, PROMPTS, **options) == alone


@pytest.mark.turns(20)
@pytest.mark.parametrize(
    "flags",
    [
        ("--steps-ahead", "0"),
        ("--steps-ahead", "2"),
        ("--max-num-batched-tokens", "16", "--max-num-seqs", "16"),
        ("--no-enable-prefix-caching", "--max-num-seqs", "3"),
        ("--num-gpu-blocks-override", "24", "--block-size", "16", "--max-model-len", "256"),
    ],
    ids=["sync", "two ahead", "chunked prefill", "no prefix cache", "preemption"],
)
def test_the_same_text_in_every_mode(demo: LiveServer, flags: tuple[str, ...]):
    prompts = [p + " and then, after a long day of work, they all" for p in PROMPTS[:12]]
    options = {"temperature": 0, "ignore_eos": True, "max_tokens": 48}
    expected = crowd(demo, prompts, **options)
    with serving("demo", "--dtype", "float32", "--kv-cache-memory-bytes", "64M", *flags) as server:
        assert crowd(server, prompts, **options) == expected
        assert crowd(server, prompts, **options) == expected  # once more, with whatever the cache holds now
        if "--num-gpu-blocks-override" in flags:
            assert preemptions(server) > 0
