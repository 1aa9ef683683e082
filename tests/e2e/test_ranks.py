"""One model over two ranks, each a process of its own: the command as a user starts it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from live import LiveServer, alive, serving, wait_until

TWO = (
    *("demo", "--kv-cache-memory-bytes", "64M", "--dtype", "float32"),
    *("--tensor-parallel-size", "2", "--restart-wait", "60"),
)
ASK = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


def rank_pids(server: LiveServer) -> list[int]:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.children()}
    return [pid for pid, command in commands.items() if b"worker.rank_process" in command]


def text(server: LiveServer) -> str:
    return server.post("/v1/completions", ASK).json()["choices"][0]["text"]


def test_two_ranks_serve_as_one_and_the_loss_of_one_is_named(demo: LiveServer) -> None:
    with serving(*TWO) as server:
        ranks = rank_pids(server)
        assert len(ranks) == 2
        assert text(server) == text(demo)
        assert server.listening() == {("127.0.0.1", server.port)}, "ranks of one machine open no port"
        os.kill(ranks[1], signal.SIGKILL)
        reason = "rank 1 (tensor 1 of 2, stage 0 of 1) ended while serving: it was ended by SIGKILL"
        wait_until(lambda: reason in server.output(), 20, server.output)
        wait_until(lambda: not any(map(alive, ranks)), 20)
        assert text(server) == text(demo), "others are started in their place"


def test_a_start_that_is_ended_leaves_nothing_behind(short_path: Path) -> None:
    server = LiveServer(*TWO, env={"TMPDIR": str(short_path)})
    try:
        wait_until(lambda: any(short_path.glob("facet-*/facet-*")), 20, server.output)
        children = server.children()
        assert server.terminate(10) == 0
        assert list(short_path.iterdir()) == []
        wait_until(lambda: not any(map(alive, children)), 2)
    finally:
        server.close()
