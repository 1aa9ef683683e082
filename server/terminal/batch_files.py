"""The files of OpenAI's batch format: requests in, answers out, one JSON object in each line."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from server.options.option_table import OptionError
from server.terminal.console import read_text

_WORTH_ANOTHER_TRY = (408, 425, 429)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    path: str
    body: dict[str, Any]


def read_requests(path: Path) -> list[BatchRequest]:
    """Reads and checks the whole input, so that a mistake in its last line is told before work begins."""
    found: dict[str, BatchRequest] = {}
    for number, text in enumerate(read_text(path, f"-i {path}").split("\n"), 1):
        if text.strip():
            request = _request_of(text, f"{path}, line {number}")
            if request.custom_id in found:
                name = request.custom_id
                raise OptionError(f"{path}, line {number}: custom_id {name!r} stands there twice")
            found[request.custom_id] = request
    return list(found.values())


def _request_of(text: str, where: str) -> BatchRequest:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{where} is not JSON: {error}") from None
    match value:
        case {"custom_id": str(name), "url": str(url), "body": dict(body)}:
            pass
        case _:
            raise OptionError(f"{where} needs custom_id and url as strings, and body as an object")
    if value.get("method", "POST") != "POST":
        raise OptionError(f"{where}: method must be POST")
    if any("\ud800" <= char <= "\udfff" for char in name):
        raise OptionError(
            f"{where}: custom_id has half a character (a lone surrogate), which no file can hold"
        )
    if not url.startswith("/"):
        raise OptionError(f"{where}: url is a path such as /v1/chat/completions, not {url!r}")
    if body.get("stream"):
        raise OptionError(f"{where}: an answer in a file cannot be streamed; leave out `stream`")
    return BatchRequest(name, url, body)


def answered(id: str, name: str, status: int, body: object) -> dict[str, Any]:
    """The output for a request that was answered, by a result or by the server's error.

    The server was told the id, and has it in its log and in the answer's own id.
    """
    response = {"status_code": status, "request_id": id, "body": body}
    return {"id": id, "custom_id": name, "response": response, "error": None}


def unanswered(id: str, name: str, reason: str) -> dict[str, Any]:
    """The output for a request without an answer."""
    error = {"code": "no_answer", "message": reason}
    return {"id": id, "custom_id": name, "response": None, "error": error}


def body_of(content: bytes) -> object:
    """An answer's body for the output. JSON in one line stays the bytes that came.

    So a vector's numbers are neither read nor written again, which would cost more than to send them.
    """
    try:
        text = content.decode()
        if "\n" not in text:
            return msgspec.json.decode(content, type=msgspec.Raw)
        return json.loads(text)
    except (ValueError, msgspec.DecodeError):  # of text that is not JSON, too
        return content.decode("utf-8", "replace")


def new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def is_final(output: dict[str, Any]) -> bool:
    """Whether sending the request again could not change this answer: it is a result, or a refusal."""
    response = output.get("response")
    status = response.get("status_code", 0) if isinstance(response, dict) else 0
    return 200 <= status < 500 and status not in _WORTH_ANOTHER_TRY


class BatchOutput:
    """The output file, to which each answer is added when it comes. An earlier run's answers stay in it."""

    def __init__(self, path: Path) -> None:
        self.done = _keep_final(path)
        """The custom_ids that need not be sent again."""
        self._file = path.open("ab")

    def add(self, output: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(output) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _keep_final(path: Path) -> set[str]:
    """Takes from an output what has to be done again; returns the custom_ids of the rest."""
    if not path.is_file():  # a pipe, such as /dev/stdout, holds no earlier answers, and reading it would wait
        return set()
    lines = path.read_bytes().split(b"\n")
    kept = [(output["custom_id"], line) for line, output in _outputs(lines, path) if is_final(output)]
    if len(kept) < len(lines) - 1 or lines[-1]:  # a whole file ends with an empty piece
        part = path.with_name(path.name + ".part")
        part.write_bytes(b"".join(line + b"\n" for _, line in kept))
        os.replace(part, path)
    return {name for name, _ in kept}


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
            raise OptionError(f"-o {path}, line {number} is no answer of a batch; name another file")
        yield line, value
