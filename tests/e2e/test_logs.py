"""A server whose log nobody reads, or whose disk is full, starts, answers and stops as any other."""

import fcntl
import json
import os
import select
import socket
from pathlib import Path

from live import SMALL, LiveServer, starting

DROPPED = "facet:log_lines_dropped_total"
ASK = {"prompt": "x", "max_tokens": 2}


def ask_for_live(server: LiveServer, times: int) -> None:
    """Sends requests on one connection, each of which is a line in the log, and reads all answers."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        for _ in range(times // 8):
            connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8)
            answers = b""
            while answers.count(b"HTTP/1.1 200") < 8:
                part = connection.recv(65536)
                assert part, "the server has closed the connection"
                answers += part


def test_a_full_disk_stops_nothing() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    server = LiveServer("demo", *SMALL, output=full)
    try:
        server.wait_ready()
        assert server.post("/v1/completions", ASK).status_code == 200
        assert server.numbers(DROPPED)[""] > 2
        assert server.terminate() == 0
    finally:
        server.close()
        os.close(full)


def test_a_pipe_that_nobody_reads_stops_nothing() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    server = LiveServer("demo", *SMALL, output=writer)
    try:
        os.close(writer)
        server.wait_ready()
        ask_for_live(server, 3000)
        assert server.post("/v1/completions", ASK).status_code == 200
        assert server.numbers(DROPPED)[""] > 1000
        written = b""
        while b"Serving demo" not in written:
            assert select.select([reader], [], [], 10)[0], written
            written += os.read(reader, 65536)
        assert server.terminate() == 0
    finally:
        server.close()
        os.close(reader)


def test_every_line_may_be_json_and_processes_have_names() -> None:
    with starting("demo", *SMALL, "--log-format", "json") as server:
        server.wait_ready()
        assert server.post("/v1/completions", ASK).status_code == 200
        pids = [server.process.pid, *server.children()]
        names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}
        assert server.terminate() == 0
        lines = [json.loads(line) for line in server.output().splitlines()]
    assert {"facet:superviso", "facet: server", "facet: engine"} <= names
    assert all({"time", "level", "process", "pid", "message"} <= line.keys() for line in lines)
    assert any(line["message"].startswith("Serving demo at ") for line in lines)
    assert any(line.get("logger") == "uvicorn.access" for line in lines)
