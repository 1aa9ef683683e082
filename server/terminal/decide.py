"""`facet decide`: typed questions about a text, whose answers are shown with their probabilities."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from server.options.option_parsing import OptionError
from server.terminal.console import columns, parser_of, safe_text
from server.terminal.server_client import add_server_flags, client_of, model_of

_WIDTH = 20
"""The characters of the bar of what is certain."""


def run(arguments: Sequence[str], command: str) -> int:
    parser = parser_of(
        command,
        "Answer typed questions about a text, each with probabilities (docs/decisions_api.md).",
        "FILE --questions FILE [options]",
    )
    parser.add_argument("file", metavar="FILE", help="The text; - is standard input.")
    about = "JSON: the list `questions` of a request to /v1/decisions."
    parser.add_argument("--questions", required=True, metavar="FILE", help=about)
    parser.add_argument("--json", action="store_true", help="Print the server's own answer.")
    add_server_flags(parser)
    given = parser.parse_args(arguments)
    text, questions = _read(given.file), _read_questions(given.questions)
    with client_of(given) as server:
        body = {"model": model_of(server, given, "generate"), "input": text, "questions": questions}
        answer = server.post("/v1/decisions", body)
    shown = json.dumps(answer, indent=2) if given.json else "\n".join(_table(questions, answer))
    print(safe_text(shown))
    return 0


def _read(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise OptionError(f"{path} cannot be read: {reason}") from None


def _read_questions(path: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(_read(path))
    except ValueError as error:
        raise OptionError(f"--questions {path} is not JSON: {error}") from None
    if isinstance(found, dict):
        found = found.get("questions")
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise OptionError(f"--questions {path}: give a list of questions, as /v1/decisions takes them")
    return found


def _table(questions: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]) -> list[str]:
    """The lines of a table: a question's name, an answer, its probability, and a bar."""
    rows: list[tuple[str, str, str, str]] = []
    for number, (question, found) in enumerate(zip(questions, answer["answers"], strict=True), 1):
        name = str(question.get("name") or number)
        for option, probability in _weighed(found):
            bar = "#" * round(_WIDTH * probability)
            rows.append((name, option, f"{probability:6.1%}", bar))
            name = ""
        if found["type"] == "refusal":
            rows.append((name, "no answer", "", ""))
    return columns(rows)


def _weighed(found: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the answers to a question with their probabilities."""
    if found["type"] == "predicate":
        yield "yes", found["probability"]
    for each in found.get("probabilities", ()):
        yield str(each.get("label", each["value"])), each["probability"]
