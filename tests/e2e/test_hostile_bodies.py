"""Bodies that cost far more than they carry, sent to a real server: others are answered meanwhile."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from holdups import unexplained
from live import LiveServer, serving, wait_until

pytestmark = pytest.mark.slow(28)

MOST_SECONDS = 0.5
"""Seconds that the processes may compute which answer others. The bodies below took them 2 to 40 s."""
MOST_MEMORY = 60 << 20

TALK = b'{"max_tokens":1,"messages":[{"role":"user","content":"hi"}],'
TEXT = b'{"max_tokens":1,"prompt":"hi",'
TOOL = b'{"type":"function","function":{"name":"f"}}'
USUAL, MANY_TEXTS = 4_000_000, 16_000_000
RUNAWAY = b"{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"

HELPER = b"server.helpers.helper_process"
"""The module of the processes that do work for the API's process."""


BODIES: dict[str, tuple[str, bytes | tuple[bytes, bytes, bytes, int]]] = {
    "tools": ("/v1/chat/completions", (TALK + b'"tools":[', TOOL, b"]}", USUAL)),
    "documents": ("/v1/chat/completions", (TALK + b'"documents":[', b"{}", b"]}", USUAL)),
    "prompts": ("/v1/completions", (b'{"prompt":[', b"[1]", b"]}", USUAL)),
    "wrong stop": ("/v1/completions", (TEXT + b'"stop":[', b"1", b"]}", USUAL)),
    "ids": ("/detokenize", (b'{"tokens":[', b"1", b"]}", USUAL)),
    "texts": ("/v1/embeddings", (b'{"input":[', b"[1]", b"]}", MANY_TEXTS)),
    "wrong texts": ("/v1/embeddings", (b'{"input":[["a"],', b"1", b"]}", MANY_TEXTS)),
    "too long": ("/v1/completions", (b'{"prompt":[', b"[1]", b"]}", MANY_TEXTS)),
    "brackets": ("/v1/embeddings", b"[" * MANY_TEXTS),
    "template": ("/v1/chat/completions", TALK + b'"chat_template":"' + RUNAWAY + b'"}'),
}
"""Paths and bodies; most bodies are a beginning, a part that comes again, an end, and a size."""


def path_and_body(name: str) -> tuple[str, bytes]:
    path, body = BODIES[name]
    if isinstance(body, bytes):
        return path, body
    before, each, after, size = body
    return path, before + b",".join([each] * (size // (len(each) + 1) - 10)) + after


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    flags = ("--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--trust-request-chat-template")
    with serving("demo", *flags) as server:
        server.post("/v1/embeddings", {"input": ["a" * 100] * 300}).raise_for_status()  # starts the helper
        yield server
        assert not unexplained(server.output())


@pytest.mark.parametrize("name", BODIES)
def test_others_are_answered_while_it_is_read(server: LiveServer, name: str) -> None:
    path, body = path_and_body(name)
    before = seconds_computed(server)
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=60) as other:
        answer = pool.submit(server.post, path, body)
        while not answer.done():
            assert other.get(server.url + "/live").status_code == 200
            time.sleep(0.02)
        response = answer.result()
    assert response.status_code in (400, 413)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) <= 1000
    assert seconds_computed(server) - before < MOST_SECONDS


def test_memory_is_given_back(server: LiveServer) -> None:
    path, body = path_and_body("texts")
    before = memory(server)
    for _ in range(3):
        server.post(path, body)
    wait_until(lambda: memory(server) < before + MOST_MEMORY, 1)


def seconds_computed(server: LiveServer) -> float:
    """Seconds of all processes but the engine and the helpers. The machine's other work does not count."""
    ticks = 0
    for pid in {server.process.pid, *server.children()} - set(server.engine_pids()):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if HELPER not in command:
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory(server: LiveServer) -> int:
    """The resident memory of all processes of the server but its engine, in bytes."""
    pids = {server.process.pid, *server.children()} - set(server.engine_pids())
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * 4096
