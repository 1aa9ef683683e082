"""`facet calibrate`: finds by how much a model is too sure of its decisions, from questions whose answers are
known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from server.options.option_parsing import OptionError
from server.requests.decisions import Calibration, Kind, tempered
from server.terminal.console import check_folder, parser_of
from server.terminal.progress_bar import ProgressBar
from server.terminal.server_client import ServerClient, add_server_flags, client_of, model_of

_LEAST = 8
"""The fewest answers to questions of a kind of which a half is fitted, and the other half tells how well."""
_BINS = 10
_COLDEST, _HOTTEST = math.log(0.05), math.log(20)
_ROUNDS = 60
"""The steps in which the temperature is found: each leaves 0.62 of the range."""
_RATIO = (math.sqrt(5) - 1) / 2


class Known(NamedTuple):
    """What a model said of a question, and the index of the right answer."""

    probabilities: list[float]
    right: int


def run(arguments: Sequence[str], command: str) -> int:
    parser = parser_of(
        command,
        "Find a temperature for each type of question. Start the server without --calibration, then again "
        "with the file that this writes.",
        "DATA -o FILE [options]",
    )
    about = (
        "JSON lines of `input` and `questions` as /v1/decisions takes them, each question with a `label`: "
        "true or false, the value of a choice, or the label of a level."
    )
    parser.add_argument("data", metavar="DATA", help=about)
    parser.add_argument("-o", "--output-file", dest="output", required=True, metavar="FILE")
    add_server_flags(parser)
    given = parser.parse_args(arguments)
    check_folder("-o", given.output)
    lines = _read_lines(Path(given.data))
    with client_of(given) as server:
        found = _ask(server, model_of(server, given, "generate"), lines)
    temperatures = _fit_all(found)
    if not temperatures:
        raise OptionError(f"{given.data}: give at least {_LEAST} questions of a type with a label")
    Path(given.output).write_bytes(msgspec.json.encode(Calibration(temperatures)) + b"\n")
    return 0


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise OptionError(f"{path} is not JSON lines: {error}") from None
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not isinstance(line.get("questions"), list):
            raise OptionError(f"{path}, line {number}: give an object with `input` and a list of `questions`")
    return lines


def _ask(server: ServerClient, model: str, lines: Sequence[Mapping[str, Any]]) -> dict[Kind, list[Known]]:
    """What the model says of all questions with a label, by their types."""
    found: dict[Kind, list[Known]] = {}
    with ProgressBar(len(lines), "line") as bar:
        for line in lines:
            labels = [question.get("label") for question in line["questions"]]
            questions = [
                {name: value for name, value in question.items() if name != "label"}
                for question in line["questions"]
            ]
            body = {"model": model, "input": line.get("input"), "questions": questions}
            answers = server.post("/v1/decisions", body)["answers"]
            for label, answer in zip(labels, answers, strict=True):
                if label is not None and answer["type"] != "refusal":
                    found.setdefault(answer["type"], []).append(_known(answer, label))
            bar.add()
    return found


def _known(answer: Mapping[str, Any], label: object) -> Known:
    """Raises OptionError if the label is none of the answers."""
    if answer["type"] == "predicate":
        yes = answer["probability"]
        probabilities, values = [yes, 1 - yes], [True, False]
    else:
        weighed = answer["probabilities"]
        probabilities = [each["probability"] for each in weighed]
        values = [each.get("label", each["value"]) for each in weighed]
    right = [at for at, each in enumerate(values) if each == label and type(each) is type(label)]
    if not right:
        raise OptionError(f"the label {label!r} of a question is none of its answers, which are {values}")
    return Known(probabilities, right[0])


def _fit_all(found: Mapping[Kind, Sequence[Known]]) -> dict[Kind, float]:
    """The temperature of each type with enough answers. Prints the error of the half that is not fitted."""
    temperatures: dict[Kind, float] = {}
    for kind, known in found.items():
        if len(known) < _LEAST:
            print(f"{kind}: {len(known)} answers are too few, so it keeps its probabilities")
            continue
        fitted, held_out = known[::2], known[1::2]
        temperatures[kind] = temperature = fit(fitted)
        before, after = (calibration_error(held_out, each) for each in (1.0, temperature))
        print(
            f"{kind}: temperature {temperature:.3f} of {len(fitted)} answers; expected calibration error of "
            f"{len(held_out)} others {before:.4f} before, {after:.4f} after"
        )
    return temperatures


def fit(known: Sequence[Known]) -> float:
    """The temperature under which the right answers are likeliest."""

    def loss(logarithm: float) -> float:
        temperature = math.exp(logarithm)
        return -math.fsum(
            math.log(max(tempered(each.probabilities, temperature)[each.right], 1e-30)) for each in known
        )

    low, high = _COLDEST, _HOTTEST
    for _ in range(_ROUNDS):
        left, right = high - _RATIO * (high - low), low + _RATIO * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return math.exp((low + high) / 2)


def calibration_error(known: Sequence[Known], temperature: float) -> float:
    """The expected calibration error: how far the probability of likeliest answers lies from how often these
    are right, in ten bins of probability, on average."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(_BINS)]
    for each in known:
        found = tempered(each.probabilities, temperature)
        top = max(found)
        bins[min(int(top * _BINS), _BINS - 1)].append((top, found.index(top) == each.right))
    return math.fsum(abs(sum(top - is_right for top, is_right in one)) for one in bins) / len(known)
