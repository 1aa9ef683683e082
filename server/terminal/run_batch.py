"""`facet run-batch`: answers a file of requests in OpenAI's batch format, and goes on where it stopped."""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from server.options.option_table import OptionError
from server.run.progress_bar import ProgressDisplay
from server.terminal.batch_files import (
    Line,
    Output,
    answered,
    body_of,
    is_final,
    new_id,
    read_requests,
    unanswered,
)
from server.terminal.connection import Server, ServerError, Unreachable
from server.terminal.screen import Bar
from server.terminal.server_flags import parser_of

FAILED = 1
_BUSY = (429, 503)
_FOR_GOOD = ("engine_given_up", "api_given_up", "draining")
"""Reasons of a refusal that no waiting changes."""
_LONGEST_PAUSE = 30.0
_TRIES_WITHOUT_ANSWER = 3


def run(arguments: Sequence[str], command: str, api_key: str | None) -> int:
    given, serve_options = _parser(command).parse_known_args(arguments)
    _check(given, serve_options)
    requests = read_requests(Path(given.input))
    output = Output(Path(given.output))
    try:
        waiting = [line for line in requests if line.custom_id not in output.done]
        if not waiting:
            Bar(0, "request").close(f"; all {len(requests)} were answered before")
            return 0
        with _server_url(given, serve_options) as url:
            failed = _answer_all(waiting, output, url, given.api_key or api_key, given.max_concurrency)
    finally:
        output.close()
    return FAILED if failed else 0


@contextmanager
def _server_url(given: argparse.Namespace, serve_options: Sequence[str]) -> Iterator[str]:
    if given.url is not None:
        yield given.url
    else:
        with own_server(serve_options) as url:
            yield url


def _answer_all(lines: Sequence[Line], output: Output, url: str, api_key: str | None, most: int) -> int:
    """Sends all requests, `most` at a time; returns how many were not answered with a result."""
    bar = Bar(len(lines), "request")
    sender = _Sender(url, api_key)
    failed = 0
    with ThreadPoolExecutor(most) as pool:
        pending = set[Future[dict[str, Any]]]()
        try:
            for line in lines:
                if len(pending) == 2 * most:  # so many that no thread waits for this one
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    failed += _keep(done, output, bar)
                pending.add(pool.submit(sender.answer, line))
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                failed += _keep(done, output, bar)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            sender.stop()
            raise
        finally:
            sender.close()
            bar.close(f"; {failed} without a result" if failed else "")
    return failed


def _keep(done: set[Future[dict[str, Any]]], output: Output, bar: Bar) -> int:
    """Writes answers; returns how many of them are no results."""
    failed = 0
    for future in done:
        answer = future.result()
        output.add(answer)
        bar.add()
        failed += answer["response"] is None or answer["response"]["status_code"] != 200
    return failed


class _Sender:
    """Sends requests from many threads, each over its own connection."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url, self._key = url, api_key
        self._own = threading.local()
        self._stopped = threading.Event()
        self._servers: list[Server] = []
        Server(url)  # raises ServerError now if this is no address

    def stop(self) -> None:
        """Have all requests end now, without an answer."""
        self._stopped.set()
        for server in self._servers:
            server.interrupt()

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def answer(self, line: Line) -> dict[str, Any]:
        """The output for a request. While the server is busy, it is sent again when the server says so."""
        body, tries, id = json.dumps(line.body).encode(), 0, new_id()
        while True:
            try:
                reply = self._server().send("POST", line.path, body, request_id=id)
            except Unreachable as error:
                tries += 1
                if tries == _TRIES_WITHOUT_ANSWER or self._stopped.wait(min(_LONGEST_PAUSE, 2.0**tries)):
                    return unanswered(id, line.custom_id, str(error))
                continue
            found = answered(id, line.custom_id, reply.status, body_of(reply.body))
            if is_final(found) or reply.status not in _BUSY or not _may_come_back(reply.value()):
                return found
            if self._stopped.wait(_pause(reply.headers.get("retry-after"))):
                return found

    def _server(self) -> Server:
        if not hasattr(self._own, "server"):
            self._own.server = Server(self._url, self._key)
            self._servers.append(self._own.server)
        return self._own.server


def _may_come_back(value: Any) -> bool:
    """Whether a server that refuses now can be expected to take the request later."""
    error = value.get("error") if isinstance(value, dict) else None
    return not (isinstance(error, dict) and error.get("type") in _FOR_GOOD)


def _pause(retry_after: str | None) -> float:
    """Seconds to wait, as a header asks, but neither none nor for ever."""
    try:
        seconds = float(retry_after or 1)
    except ValueError:  # it may be a date
        seconds = 1.0
    return min(_LONGEST_PAUSE, max(0.1, seconds))


def _check(given: argparse.Namespace, serve_options: Sequence[str]) -> None:
    if given.url is not None and serve_options:
        raise OptionError(
            f"{' '.join(serve_options)}: with --url another server answers, which has its own options"
        )
    if not 1 <= given.max_concurrency <= 1024:
        raise OptionError("--max-concurrency must lie from 1 to 1024")
    if not Path(given.output).parent.is_dir():
        raise OptionError(f"-o {given.output}: there is no folder {Path(given.output).parent}; make it first")
    if Path(given.input).resolve() == Path(given.output).resolve():
        raise OptionError("-i and -o name the same file")


def _parser(command: str) -> argparse.ArgumentParser:
    parser = parser_of(
        command,
        "Answer a file of requests: by the server at --url, or by one that is started for it with the "
        "options of `facet serve` and ends afterwards. What the output has already is not computed again.",
        "-i FILE -o FILE [--url URL | MODEL and options of serve]",
    )
    parser.add_argument("-i", "--input-file", dest="input", required=True, metavar="FILE")
    parser.add_argument("-o", "--output-file", dest="output", required=True, metavar="FILE")
    parser.add_argument("--url", metavar="URL", help="A server that runs; unix:PATH, too.")
    parser.add_argument("--api-key", metavar="KEY", help="Its key; better in the variable FACET_API_KEY.")
    parser.add_argument(
        "--max-concurrency", type=int, default=128, metavar="N", help="Requests under way at once (128)."
    )
    return parser


_PAUSE = 0.05
_PR_SET_PDEATHSIG = 1


@contextmanager
def own_server(serve_options: Sequence[str]) -> Iterator[str]:
    """Starts `serve` with these options; yields its URL once it is ready. Raises ServerError if it ends."""
    with tempfile.TemporaryDirectory(prefix="facet-") as folder, tempfile.TemporaryFile("w+") as log:
        url = f"unix:{Path(folder) / 'socket'}"
        command = [sys.executable, "-P", "-m", "server.main", *serve_options]
        extra = ["--uds", url.removeprefix("unix:"), "--disable-uvicorn-access-log"]
        process = subprocess.Popen(
            [*command, *extra],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_end_with_parent,
        )
        try:
            with Server(url) as server:
                _wait_ready(server, process, log)
            yield url
        finally:
            process.terminate()
            process.wait()


def _end_with_parent() -> None:
    """Have the kernel end the server if this command is killed, so that no model stays in memory unseen."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # only Linux has it
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(server: Server, process: subprocess.Popen[bytes], log: TextIO) -> None:
    display = ProgressDisplay()
    while process.poll() is None:
        try:
            reply = server.send("GET", "/health")
        except Unreachable:
            time.sleep(_PAUSE)
            continue
        if reply.status == 200:
            display.done()
            return
        state = reply.value()
        if isinstance(state, dict) and state.get("state") == "loading":
            display.show(state["stage"], state["progress"])
        time.sleep(_PAUSE)
    display.done()
    log.seek(0)
    lines = log.read().strip().splitlines() or [f"exit code {process.returncode}"]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    raise ServerError(f"the server ended: {(errors or lines)[-1]}")
