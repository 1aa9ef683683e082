"""One text, however it is asked for: alone or in a crowd, preempted or not."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from live import LiveServer, preemptions, serving

PROMPTS = [
    f"{head} {i}"
    for i in range(8)
    for head in ("Count from", "The capital of", "Once upon a time", "日本 🎌")
]

GREEDY, SEEDED = {"temperature": 0}, {"temperature": 1.0, "seed": 7}


def whole(server: LiveServer, prompt: str, **options: object) -> list[dict]:
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 24, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def crowd(server: LiveServer, prompts: list[str], **options: object) -> list[str]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda p: whole(server, p, **options)[0]["text"], prompts))


@pytest.mark.turns
@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
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
