"""`facet calibrate`: finds by how much a model is too sure of its decisions, from questions whose answers are
known."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from server.options.option_parsing import OptionError
from server.requests.decisions import Calibration, Kind, tempered
from server.terminal.console import check_folder, parser_of
from server.terminal.decide import read_json_file
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
    about = (
        "Find a temperature for each type of question. Start the server without --calibration, then again "
        "with the file that this writes."
    )
    parser = parser_of(command, about, "DATA -o FILE [options]")
    about = (
        "JSON lines of `input` and `questions` as /v1/decisions takes them, each question with a `label`: "
        "true or false, the value of a choice, or the label of a level."
    )
    parser.add_argument("data", metavar="DATA", help=about)
    parser.add_argument("-o", "--output-file", dest="output", required=True, metavar="FILE")
    add_server_flags(parser)
    given = parser.parse_args(arguments)
    check_folder("-o", given.output)
    lines = read_json_file(given.data, lines=True)
    if not all(isinstance(each, dict) and isinstance(each.get("questions"), list) for each in lines):
        raise OptionError(f"{given.data}: each line is an object with `input` and a list of `questions`")
    with client_of(given) as server, ProgressBar(len(lines), "line") as bar:
        found, model = dict[Kind, list[Known]](), model_of(server, given, "generate")
        for line in lines:
            for kind, known in _ask(server, model, line):
                found.setdefault(kind, []).append(known)
            bar.add()
    temperatures: dict[Kind, float] = {
        kind: _fit(kind, known) for kind, known in found.items() if len(known) >= _LEAST
    }
    if not temperatures:
        raise OptionError(f"{given.data}: give at least {_LEAST} questions of a type with a label")
    Path(given.output).write_bytes(msgspec.json.encode(Calibration(temperatures)) + b"\n")
    return 0


def _ask(server: ServerClient, model: str, line: Mapping[str, Any]) -> Iterator[tuple[Kind, Known]]:
    """Yields what the model says of each question with a label, behind its type."""
    questions = [{**each} for each in line["questions"]]
    labels = [each.pop("label", None) for each in questions]
    body = {"model": model, "input": line.get("input"), "questions": questions}
    for label, answer in zip(labels, server.post("/v1/decisions", body)["answers"], strict=True):
        if label is None or answer["type"] == "refusal":
            continue
        yes = answer.get("probability", 0.0)
        weighed = answer.get("probabilities") or [
            {"value": True, "probability": yes},
            {"value": False, "probability": 1 - yes},
        ]
        values = [each.get("label", each["value"]) for each in weighed]
        right = [at for at, each in enumerate(values) if each == label and type(each) is type(label)]
        if not right:
            raise OptionError(f"the label {label!r} of a question is none of its answers: {values}")
        yield answer["type"], Known([each["probability"] for each in weighed], right[0])


def _fit(kind: Kind, known: Sequence[Known]) -> float:
    """The temperature of a half of the answers. Prints the error of the others, which it has not seen."""
    fitted, held_out = known[::2], known[1::2]
    temperature = fit(fitted)
    before, after = (calibration_error(held_out, each) for each in (1.0, temperature))
    print(
        f"{kind}: temperature {temperature:.3f} of {len(fitted)} answers; expected calibration error of "
        f"{len(held_out)} others {before:.4f} before, {after:.4f} after"
    )
    return temperature


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
