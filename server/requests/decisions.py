"""Typed questions about a text: how each is worded for a chat model, and how its answer's probabilities come
from log-probabilities of tokens. Pure functions.

An option has a label, a letter or its own text, and a label is told from the others by a few of its tokens.
Behind each beginning that several labels share a model says which token follows (`Branch`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

from worker.protocol import Sampling

Kind = Literal["predicate", "choice", "score"]

Shown = Literal["described", "named", "unlisted"]
"""What a model reads of the options: all, their names, or nothing."""
SHOWN: tuple[Shown, ...] = get_args(Shown)

MOST_QUESTIONS = 400
MOST_OPTIONS = 255
MOST_BRANCHES = 1024
"""The most beginnings of labels behind which a model is asked for one question."""
MOST_BRANCHES_TOGETHER = 16_384
"""The most of all questions of a request."""
ORDERS = 2
"""The orders in which the options of a choice are shown, unless the operator says 1."""

INTRODUCTION = (
    "Answer one question about everything above. Where options or levels have letters, answer with the "
    "letter of one, and nothing else. Otherwise answer with one word, Yes or No, whether it is so.\n"
)
"""The words between a text and each question, which are computed once with the text: what they say, no
question has to say again."""
_ENDINGS = {
    "predicate": "",
    "letters": "",
    "texts": "\nAnswer with one option exactly as it is written, and nothing else.",
    "unlisted": "\nAnswer with a name, and nothing else.",
}
_HEADINGS = {"predicate": "", "choice": "\nOptions:", "score": "\nLevels, from low to high:"}


class Option(msgspec.Struct, frozen=True, gc=False):
    """One of the fixed answers to a question."""

    value: str | bool
    description: str = ""

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else str(self.value).lower()


class Question(msgspec.Struct, frozen=True, gc=False):
    """A question as a model is asked it. The options of a predicate are Yes and No, in this order."""

    kind: Kind
    name: str | None
    text: str
    options: list[Option]


class Wording(NamedTuple):
    """What a model reads of a question, and the label of each of its options, in the question's order."""

    text: str
    labels: list[str]


def predicate(name: str | None, text: str, yes: str = "", no: str = "") -> Question:
    """A question that is answered with the probability of Yes. `yes` and `no` describe what each means."""
    return Question("predicate", name, text, [Option("Yes", yes), Option("No", no)])


def wordings(question: Question, orders: int = ORDERS, shown: Shown = "described") -> list[Wording]:
    """Words a question once, or a choice in two orders, of which one is the other from behind. These are the
    same in whichever order the options are given."""
    if shown == "unlisted":
        return [Wording(f"{question.text}{_ENDINGS[shown]}", [each.text for each in question.options])]
    return [_worded(question, order, shown) for order in orders_of(question, orders)]


def orders_of(question: Question, orders: int, *, no_first: bool = False) -> list[Sequence[int]]:
    """The orders in which the options of a question are shown, each as their indexes. `no_first`: the options
    of a predicate are shown from behind."""
    count, options = len(question.options), question.options
    if no_first and question.kind == "predicate":
        return [(1, 0)]
    if question.kind != "choice" or orders == 1:
        return [range(count)]
    order = sorted(range(count), key=lambda at: (options[at].text, str(type(options[at].value))))
    return [order, order[::-1]]


def forms(question: Question) -> tuple[Shown, ...]:
    """How options may be shown, the best first: of many, less where a model has no room for more."""
    return SHOWN if len(question.options) > len(ascii_uppercase) else SHOWN[:1]


def _worded(question: Question, order: Sequence[int], shown: Shown) -> Wording:
    is_predicate = question.kind == "predicate"
    lettered = not is_predicate and len(order) <= len(ascii_uppercase)
    labels, lines = [option.text for option in question.options], list[str]()
    for place, at in enumerate(order):
        option = question.options[at]
        described = bool(option.description) and shown == "described"
        if lettered:
            labels[at] = ascii_uppercase[place]
        if described or not is_predicate:
            said = f"{option.text}: {option.description}" if described else option.text
            lines.append(f"\n{labels[at]}. {said}" if lettered else f"\n{said}")
    ending = _ENDINGS["predicate" if is_predicate else "letters" if lettered else "texts"]
    heading = _HEADINGS[question.kind]
    return Wording(f"{question.text}{heading}{''.join(lines)}{ending}", labels)


class Calibration(msgspec.Struct):
    """A file of --calibration."""

    temperatures: dict[Kind, Annotated[float, msgspec.Meta(gt=0)]]
    """1 where a kind is missing."""


class Branch(NamedTuple):
    """The beginning of some labels, and the tokens that may follow: those of labels that go on, and those
    that end an answer if a label is no longer."""

    begun: tuple[int, ...]
    next: tuple[int, ...]

    @property
    def sampling(self) -> Sampling:
        """The parameters of a request for the log-probabilities of these tokens."""
        return Sampling(1, temperature=0.0, logprobs=0, told=self.next)


class Labels:
    """The labels of one question as tokens, and where they are told apart."""

    def __init__(self, labels: Sequence[Sequence[int]], ends: Sequence[int]) -> None:
        """`ends` are the tokens that end an answer."""
        self._labels, self._ends = [tuple(label) for label in labels], tuple(ends)
        self.branches = list(islice(self._find(), MOST_BRANCHES + 1))
        """One more than may be, if there are too many."""
        self.first = self.branches[0] if len(self.branches) > 1 else None
        """The branch with which all others begin, if there are others."""

    def _find(self) -> Iterator[Branch]:
        """Yields each beginning that several labels have, of which some differ, the shortest first."""
        distinct = sorted(set(self._labels))
        # What all have in common tells none of them apart, and may be long.
        pairs = enumerate(zip(distinct[0], distinct[-1], strict=False))
        shared = next((at for at, (one, other) in pairs if one != other), len(distinct[0]))
        groups, all_of_them = {distinct[0][:shared]: distinct}, len(distinct)
        while groups:
            deeper: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
            for begun, labels in groups.items():
                if len(labels) < 2:
                    continue
                depth = len(begun)
                for label in labels:
                    if len(label) > depth:
                        deeper.setdefault(label[: depth + 1], []).append(label)
                following = [label[depth] for label in labels if len(label) > depth]
                ended = self._ends if len(following) < len(labels) else ()
                if len(labels) < all_of_them or len(set(following)) > 1 or ended:
                    yield Branch(begun, (*dict.fromkeys((*following, *ended)),))
            groups = deeper

    def likelihoods(self, told: Sequence[Sequence[float]]) -> list[float]:
        """The logarithm of the likelihood of each label: of its tokens up to the one that tells it from all
        others. `told` has the log-probabilities of the tokens behind each branch."""
        after = {
            branch.begun: dict(zip(branch.next, values, strict=True))
            for branch, values in zip(self.branches, told, strict=True)
        }
        return [self._likelihood(label, after) for label in self._labels]

    def _likelihood(self, label: tuple[int, ...], after: dict[tuple[int, ...], dict[int, float]]) -> float:
        total = 0.0
        for depth in sorted({len(begun) for begun in after}):
            if depth > len(label) or (found := after.get(label[:depth])) is None:
                continue
            if depth < len(label):
                total += found[label[depth]]
            else:
                total += math.log(math.fsum(math.exp(found[end]) for end in self._ends) or 5e-324)
        return total


def read_temperatures(path: Path) -> dict[Kind, float]:
    """Reads the temperature of each kind of question, as `facet calibrate` has written them. Raises
    ValueError if the file cannot be used."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}; `facet calibrate` writes such a file") from None
    return found.temperatures


def probabilities(likelihoods: Sequence[float]) -> list[float]:
    """Probabilities of the options, of the logarithms of their likelihoods."""
    top = max(likelihoods)
    return _normalised([math.exp(each - top) for each in likelihoods])


def tempered(found: Sequence[float], temperature: float) -> list[float]:
    """Probabilities that are more alike than `found` if the temperature is above 1, and less alike below."""
    top = max(found)
    return _normalised([(each / top) ** (1 / temperature) for each in found])


def _normalised(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [each / total for each in weights]


def averaged(orders: Sequence[Sequence[float]]) -> list[float]:
    """The mean of the probabilities that each order of the options gives."""
    return [math.fsum(each) / len(orders) for each in zip(*orders, strict=True)]


def choice_confidence(found: Sequence[float]) -> float:
    """How far the likeliest option is above chance: 0 if all are alike, and 1 if it is certain."""
    return (max(found) - 1 / len(found)) / (1 - 1 / len(found))


def score_confidence(found: Sequence[float]) -> float:
    """How near to the likeliest level the others lie: 1 less the mean distance, by that of levels which are
    all alike from their middle."""
    count, mode = len(found), max(range(len(found)), key=found.__getitem__)
    spread = math.fsum(each * abs(at - mode) for at, each in enumerate(found))
    uniform = sum(abs(at - (count - 1) / 2) for at in range(count)) / count
    return max(0.0, 1 - spread / uniform)


def expectation(found: Sequence[float]) -> float:
    """The mean level."""
    return math.fsum(at * each for at, each in enumerate(found))
