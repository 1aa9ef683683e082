"""`facet run-batch`: answers a file of requests in OpenAI's batch format, and goes on where it stopped."""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from server.options.option_table import OptionError
from server.options.server_options import client_key_of_environment
from server.terminal.batch_files import (
    BatchOutput,
    BatchRequest,
    answered,
    body_of,
    is_final,
    new_id,
    read_requests,
    unanswered,
)
from server.terminal.console import ProgressBar, check_folder, parser_of
from server.terminal.own_server import own_server
from server.terminal.server_client import ServerClient, Unreachable

_BUSY = (429, 503)
_FOR_GOOD = ("engine_given_up", "api_given_up", "draining")
"""Reasons of a refusal that no waiting changes."""
_LONGEST_PAUSE = 30.0
_TRIES_WITHOUT_ANSWER = 3


def run(arguments: Sequence[str], command: str) -> int:
    """Returns 1 if a request has no result in the end."""
    given, serve_options = _parser(command).parse_known_args(arguments)
    _check(given, serve_options)
    requests = read_requests(Path(given.input))
    output = BatchOutput(Path(given.output))
    try:
        waiting = [one for one in requests if one.custom_id not in output.done]
        if not waiting:
            ProgressBar(0, "request").close(f"; all {len(requests)} were answered before")
            failed = 0
        elif given.url is not None:
            failed = _answer_all(waiting, output, given.url, given)
        else:
            with own_server(serve_options) as server:
                server.wait_until_ready()
                failed = _answer_all(waiting, output, server.url, given)
    finally:
        output.close()
    return 1 if failed else 0


def _answer_all(
    requests: Sequence[BatchRequest], output: BatchOutput, url: str, given: argparse.Namespace
) -> int:
    """Sends all requests, so many at a time; returns how many were not answered with a result."""
    most = given.max_concurrency
    bar = ProgressBar(len(requests), "request")
    sender = _Sender(url, given.api_key or client_key_of_environment())
    failed = 0
    with ThreadPoolExecutor(most) as pool:
        pending = set[Future[dict[str, Any]]]()
        try:
            for request in requests:
                if len(pending) == 2 * most:  # so many that no thread waits for this one
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    failed += _keep(done, output, bar)
                pending.add(pool.submit(sender.answer, request))
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


def _keep(done: Iterable[Future[dict[str, Any]]], output: BatchOutput, bar: ProgressBar) -> int:
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
        self._of_thread = threading.local()
        self._stopped = threading.Event()
        self._clients: list[ServerClient] = []
        ServerClient(url)  # raises ServerError now if this is no address

    def stop(self) -> None:
        """Have all requests end now, without an answer."""
        self._stopped.set()
        for client in self._clients:
            client.interrupt()

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def answer(self, request: BatchRequest) -> dict[str, Any]:
        """The output for a request. While the server is busy, it is sent again when the server says so."""
        body, tries, id = json.dumps(request.body).encode(), 0, new_id()
        while True:
            try:
                reply = self._client().send("POST", request.path, body, request_id=id)
            except Unreachable as error:
                tries += 1
                if tries == _TRIES_WITHOUT_ANSWER or self._stopped.wait(min(_LONGEST_PAUSE, 2.0**tries)):
                    return unanswered(id, request.custom_id, str(error))
                continue
            found = answered(id, request.custom_id, reply.status, body_of(reply.body))
            if is_final(found) or reply.status not in _BUSY or not _may_come_back(reply.value()):
                return found
            if self._stopped.wait(_pause(reply.headers.get("retry-after"))):
                return found

    def _client(self) -> ServerClient:
        if not hasattr(self._of_thread, "client"):
            self._of_thread.client = ServerClient(self._url, self._key)
            self._clients.append(self._of_thread.client)
        return self._of_thread.client


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
    check_folder("-o", given.output)
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
