"""`facet run-batch`: answers a file of requests in OpenAI's batch format, and goes on where it stopped.

The files have one JSON object in each line: requests in, answers out.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from server.batches.line_format import (
    LONGEST_PAUSE,
    BatchLine,
    LineFault,
    answered,
    body_of,
    pause_of,
    read_line,
    unanswered,
)
from server.options.option_parsing import OptionError
from server.options.parse_server_options import client_key_of_environment
from server.terminal.console import check_folder, parser_of
from server.terminal.own_server import own_server
from server.terminal.progress_bar import ProgressBar
from server.terminal.server_client import ServerClient, Unreachable, add_server_flags

_BUSY = (429, 503)
_FOR_GOOD = ("engine_given_up", "api_given_up", "draining")
"""Reasons of a refusal that no waiting changes."""
_WORTH_ANOTHER_TRY = (401, 403, 408, 425, 429)
"""Refusals that say nothing of the request: the first two speak of the key."""
_TRIES_WITHOUT_ANSWER = 3


def run(arguments: Sequence[str], command: str) -> int:
    """Returns 1 if a request has no result in the end, be it refused by an earlier run."""
    given, serve_options = _parser(command).parse_known_args(arguments)
    _check(given, serve_options)
    requests = read_requests(Path(given.input))
    output = BatchOutput(Path(given.output))
    try:
        waiting = [one for one in requests if one.custom_id not in output.done]
        failed = sum(not output.done.get(one.custom_id, True) for one in requests)
        if not waiting:
            ProgressBar(0, "request").close(f"; all {len(requests)} were answered before")
        elif given.url is not None:
            failed += _answer_all(waiting, output, given.url, given)
        else:
            with own_server(serve_options) as server:
                server.wait_until_ready()
                failed += _answer_all(waiting, output, server.url, given)
    finally:
        output.close()
    return 1 if failed else 0


def _answer_all(
    requests: Sequence[BatchLine], output: BatchOutput, url: str, given: argparse.Namespace
) -> int:
    """Sends all requests, so many at a time; returns how many were not answered with a result."""
    most, failed = given.max_concurrency, 0
    bar = ProgressBar(len(requests), "request")
    sender = _Sender(url, given.api_key or client_key_of_environment())
    unsent, pending = iter(requests), set[Future[dict[str, Any]]]()
    with ThreadPoolExecutor(most) as pool:
        try:
            while True:
                room = 2 * most - len(pending)  # so many that no thread waits for one
                pending |= {pool.submit(sender.answer, request) for request in islice(unsent, room)}
                if not pending:
                    return failed
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    answer = future.result()
                    output.add(answer)
                    bar.add()
                    failed += not has_result(answer)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            sender.stop()
            raise
        finally:
            sender.close()
            bar.close(f"; {failed} without a result" if failed else "")


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

    def answer(self, request: BatchLine) -> dict[str, Any]:
        """The output for a request. While the server is busy, it is sent again when the server says so."""
        tries, id = 0, f"batch_req_{uuid.uuid4().hex}"
        while True:
            try:
                reply = self._client().send("POST", request.url, bytes(request.body), request_id=id)
            except Unreachable as error:
                tries += 1
                if tries == _TRIES_WITHOUT_ANSWER or self._stopped.wait(min(LONGEST_PAUSE, 2.0**tries)):
                    return unanswered(id, request.custom_id, "no_answer", str(error))
                continue
            found = answered(id, request.custom_id, reply.status, body_of(reply.body))
            if is_final(found) or reply.status not in _BUSY or not _may_come_back(reply.value()):
                return found
            if self._stopped.wait(pause_of(reply.headers.get("retry-after"))):
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
        "options of `facet serve` and ends afterwards. Requests with a result in the output are skipped.",
        "-i FILE -o FILE [--url URL | MODEL and options of serve]",
    )
    parser.add_argument("-i", "--input-file", dest="input", required=True, metavar="FILE")
    parser.add_argument("-o", "--output-file", dest="output", required=True, metavar="FILE")
    add_server_flags(parser, model=False, default=None)
    parser.add_argument(
        "--max-concurrency",
        type=int,
        default=128,
        metavar="N",
        help="Maximum number of concurrent requests (128).",
    )
    return parser


# The files.


def read_requests(path: Path) -> list[BatchLine]:
    """Reads and checks the whole input, so that a mistake in its last line is told before work begins."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise OptionError(f"-i {path} cannot be read: {reason}") from None
    found: dict[str, BatchLine] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        try:
            request = read_line(text.encode("utf-8", "surrogatepass"))
        except LineFault as fault:
            raise OptionError(f"{where} {fault.message}") from None
        if request.custom_id in found:
            raise OptionError(f"{where}: custom_id {request.custom_id!r} stands there twice")
        found[request.custom_id] = request
    return list(found.values())


def _status_of(output: dict[str, Any]) -> int:
    response = output.get("response")
    return response.get("status_code", 0) if isinstance(response, dict) else 0


def has_result(output: dict[str, Any]) -> bool:
    return _status_of(output) == 200


def is_final(output: dict[str, Any]) -> bool:
    """Whether sending the request again could not change this answer: it is a result, or a refusal."""
    return 200 <= (status := _status_of(output)) < 500 and status not in _WORTH_ANOTHER_TRY


class BatchOutput:
    """The output file, to which each answer is added when it comes. An earlier run's answers stay in it."""

    def __init__(self, path: Path) -> None:
        self.done = _keep_final(path)
        """The custom_ids that need not be sent again, and whether each has a result."""
        self._file = path.open("ab")

    def add(self, output: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(output) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _keep_final(path: Path) -> dict[str, bool]:
    """Takes from an output what has to be done again; returns the custom_ids of the rest: has it a result?"""
    if not path.is_file():  # a pipe, such as /dev/stdout, holds no earlier answers, and reading it would wait
        return {}
    lines = path.read_bytes().split(b"\n")
    kept = [(output, line) for line, output in _outputs(lines, path) if is_final(output)]
    if len(kept) < len(lines) - 1 or lines[-1]:  # a whole file ends with an empty piece
        part = path.with_name(path.name + ".part")
        part.write_bytes(b"".join(line + b"\n" for _, line in kept))
        os.replace(part, path)
    return {output["custom_id"]: has_result(output) for output, _ in kept}


def _outputs(lines: Sequence[bytes], path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The answers in an output. Its last line may be torn; any other line must be an answer."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            if number == len(lines):
                return
            value = None
        if not isinstance(value, dict) or not isinstance(value.get("custom_id"), str):
            raise OptionError(f"-o {path}, line {number} is not an answer of a batch; name another file")
        yield line, value
