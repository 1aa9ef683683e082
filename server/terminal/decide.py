"""`facet decide`: typed questions about a text, whose answers are shown with their probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from server.options.option_parsing import OptionError
from server.terminal.console import columns, parser_of, read_standard_input, safe_text
from server.terminal.server_client import add_server_flags, client_of, model_of

_WIDTH = 20
"""The characters of the bar of what is certain."""


def run(arguments: Sequence[str], command: str) -> int:
    about = "Answer typed questions about a text, each with probabilities (docs/decisions_api.md)."
    parser = parser_of(command, about, "FILE --questions FILE [options]")
    parser.add_argument("file", metavar="FILE", help="The text; - is standard input.")
    about = "JSON: the list `questions` of a request to /v1/decisions."
    parser.add_argument("--questions", required=True, metavar="FILE", help=about)
    parser.add_argument("--json", action="store_true", help="Print the server's own answer.")
    add_server_flags(parser)
    given = parser.parse_args(arguments)
    text, questions = _read(given.file), read_json_file(given.questions)
    questions = questions.get("questions") if isinstance(questions, dict) else questions
    if not isinstance(questions, list) or not all(isinstance(each, dict) for each in questions):
        raise OptionError(f"--questions {given.questions}: give a list of objects")
    with client_of(given) as server:
        body = {"model": model_of(server, given, "generate"), "input": text, "questions": questions}
        answer = server.post("/v1/decisions", body)
    rows = [
        row
        for number, found in enumerate(answer["answers"], 1)
        for row in _rows(found["name"] or str(number), found)
    ]
    print(safe_text(json.dumps(answer, indent=2) if given.json else "\n".join(columns(rows))))
    return 0


def _read(path: str) -> str:
    try:
        return read_standard_input() if path == "-" else Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise OptionError(f"{path} cannot be read: {reason}") from None


def read_json_file(path: str, *, lines: bool = False) -> Any:
    """The value of a file of JSON, or those of its `lines`."""
    text = _read(path)
    try:
        return [json.loads(each) for each in text.splitlines() if each.strip()] if lines else json.loads(text)
    except ValueError as error:
        raise OptionError(f"{path} is not JSON: {error}") from None


def _rows(name: str, found: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yields rows of a table: the question's name, an answer, its probability, and a bar."""
    weighed = [
        (each.get("label", each["value"]), each["probability"]) for each in found.get("probabilities", ())
    ]
    weighed += [("yes", found["probability"])] if found["type"] == "predicate" else []
    for option, probability in weighed:
        yield name, str(option), f"{probability:6.1%}", "#" * round(_WIDTH * probability)
        name = ""
    if not weighed:
        yield name, "no answer", "", ""
