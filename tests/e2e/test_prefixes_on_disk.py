"""A server that is killed and started again finds on disk what it had read, with the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from live import LiveServer, refusal, serving, wait_until

TEXT = "One friend and another went to the sea, and what they saw there was told for years. " * 12
OPTIONS = ("--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--enable-prompt-tokens-details")


def ask(server: LiveServer, prompt: str = TEXT) -> tuple[object, int]:
    """The choices of an answer with log-probabilities, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 3}
    answer = server.post("/v1/completions", body).json()
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"], details.get("cached_tokens", 0)


def settle(server: LiveServer, least: int) -> None:
    """Wait until as many blocks are on disk."""
    name = "facet:disk_blocks_written_total"
    wait_until(lambda: server.numbers(name).get("0", 0) >= least, 5, server.output)


@pytest.mark.slow(4)
def test_a_killed_server_finds_its_prefixes_again(tmp_path: Path) -> None:
    options = (*OPTIONS, "--kv-cache-dir", str(tmp_path), "--kv-cache-disk-gib", "0.5")
    with serving("demo", *options) as server:
        first, cached = ask(server)
        assert cached == 0
        settle(server, 5)
        os.kill(server.engine_pid(), signal.SIGKILL)  # the engine alone, which is started again
        wait_until(lambda: server.get("/ready").status_code == 503, 20)
        wait_until(lambda: server.get("/ready").status_code == 200, 20)
        again, cached = ask(server)
        assert again == first and cached >= 5 * 32
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(30)
    for number, path in enumerate(sorted(tmp_path.glob("facet-*/*/*"))):
        if number % 2:
            path.write_bytes(path.read_bytes()[:-1])
    with serving("demo", *options) as server:
        again, damaged = ask(server)
        assert again == first and damaged <= cached
        settle(server, 1)
        assert server.terminate() == 0
    with serving("demo", *options) as server:
        again, last = ask(server)
        assert again == first and last >= cached


def test_what_has_no_meaning_is_refused() -> None:
    assert "give that, too" in refusal("demo", "--kv-cache-disk-gib", "3")
