"""Tables of the facts that the demo model is taught: all are read from `knowledge/`, no text is made here."""

import csv
from pathlib import Path
from typing import NamedTuple

_KNOWLEDGE = Path(__file__).with_name("knowledge")


class Country(NamedTuple):
    name: str
    capital: str
    continent: str


class Known(NamedTuple):
    """Several wordings of one question, and its answer."""

    questions: tuple[str, ...]
    answer: str


def _rows(file: str) -> list[list[str]]:
    """Read the rows of a .csv table, without its heading."""
    with (_KNOWLEDGE / file).open(encoding="utf-8", newline="") as table:
        return list(csv.reader(table))[1:]


def _answers(file: str) -> tuple[Known, ...]:
    """Read a .txt file with wordings on one line, parted by bars, and the answer indented on the next."""
    entries = (_KNOWLEDGE / file).read_text(encoding="utf-8").strip().split("\n\n")
    pairs = (entry.split("\n") for entry in entries)
    return tuple(Known(tuple(questions.split(" | ")), answer.strip()) for questions, answer in pairs)


def _lists(file: str) -> dict[str, list[str]]:
    """Read a .txt file with a line for each list: its name, a colon, and the items parted by commas."""
    lines = (_KNOWLEDGE / file).read_text(encoding="utf-8").splitlines()
    return {name: items.split(", ") for name, items in (line.split(": ") for line in lines)}


def _remarks(file: str) -> dict[str, str]:
    """Read a .txt file with a line for each skill: its name, a colon, and the thought before an answer."""
    lines = (_KNOWLEDGE / file).read_text(encoding="utf-8").splitlines()
    return dict(line.split(": ", 1) for line in lines)


def _wordings(file: str) -> dict[str, tuple[str, ...]]:
    """Read a .txt file with blocks: what is asked, and below it the wordings, indented."""
    blocks = (_KNOWLEDGE / file).read_text(encoding="utf-8").strip().split("\n\n")
    lines = (block.split("\n") for block in blocks)
    return {name: tuple(wording.strip() for wording in wordings) for name, *wordings in lines}


COUNTRIES = tuple(Country(*row) for row in _rows("countries.csv"))
FORMER_CAPITALS = {country: capital for country, capital, *_ in _rows("former_capitals.csv")}
# Phrases by language and by their English wording.
LANGUAGES = {
    language: dict(zip(("hello", "thank you", "good night", "goodbye"), phrases, strict=True))
    for language, *phrases in _rows("languages.csv")
}
EMOJI = [(name, symbol) for name, symbol in _rows("emoji.csv")]
ABOUT = _answers("about.txt")
GENERAL = _answers("general.txt")
SMALL_TALK = _answers("small_talk.txt")
REMARKS = _remarks("remarks.txt")
WORDINGS = _wordings("wordings.txt")

_LISTS = _lists("lists.txt")
NAMES, ANIMALS, COLOURS, WORDS = (_LISTS[key] for key in ("names", "animals", "colours", "words"))
DAYS, MONTHS = _LISTS["days"], _LISTS["months"]
SMALL_NUMBERS, TENS = _LISTS["small numbers"], _LISTS["tens"]
OPPOSITES = [pair.split("/") for pair in _LISTS["opposites"]]
SOUNDS = [pair.split("/") for pair in _LISTS["sounds"]]  # an animal and its sound
TOPICS = _LISTS["topics"]  # topics about which the model knows nothing
