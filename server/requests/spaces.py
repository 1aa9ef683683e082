"""The space that vectors are from: a name for how they are made, which tells what compares with them.

Vectors of one text under one name are equal but for how precisely they were computed. The name is written in
parts, so that a difference can be told: "9f86d081884c7d65.weights-3fa1c29b.tokenizer-9b2c11d7.steps-none.
pooling-mean.prompt-none.normalized-yes.dimensions-384.values-float". Its head is a digest of the first four
parts, or the operator's name, which then stands in the place of the first three.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import msgspec

from models.config import ConfigError
from models.pooling.config import PoolingConfig
from models.pooling.sentence_files import Normalize
from server.errors import BadRequest, SpaceMismatch
from server.model_facts import Facts
from worker.protocol import Pooling

NONE = "none"
PARTS = ("weights", "tokenizer", "steps", "pooling", "prompt", "normalized", "dimensions", "values")
_NAMED = 3
"""The parts for which an operator's name stands."""
_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
_HEAD_DIGITS, _PART_DIGITS = 16, 8
_MOST_KEPT = 256
"""The spaces of a model that are kept: requests name few, but a client may write many prompts."""


class Space(msgspec.Struct, frozen=True):
    """A space of vectors."""

    digest: str
    """The digest of what the model makes of tokens, and of how texts become tokens."""
    parts: Mapping[str, str]
    """All parts, by their names."""
    name: str | None = None
    """The operator's name for the first three."""
    text: str = ""
    """Its name in answers: the head, and the parts that the head does not name."""

    @property
    def head(self) -> str:
        return self.name or self.digest

    def __str__(self) -> str:
        return self.text

    def differences(self, asked: str) -> list[str]:
        """What of the asked space differs from this one; what it leaves out may be anything.

        Raises BadRequest if `asked` is no name of a space.
        """
        head, *rest = asked.split(".")
        given: dict[str, str] = {}
        for part in rest:
            name, _, value = part.partition("-")
            given[name] = value
        unknown = [part for part in given if part not in PARTS]
        if not head or unknown:
            what = f"has no part {unknown[0][:64]!r}" if unknown else "is empty"
            raise BadRequest(
                f"`require_space` {what}: it is an `embedding_space` of an earlier answer, or one's head and "
                f"some of its parts, which are {', '.join(PARTS)}.",
                "require_space",
            )
        found = [
            f"{part} is {self.parts[part]} here and {value[:64]} there"
            for part, value in given.items()
            if value != self.parts[part]
        ]
        if not found and head not in (self.name, self.digest):
            found = [f"the model, or how it is served, is {self.head} here and {head[:64]} there"]
        return found


def find_space(facts: Facts, params: Pooling, prompt: str = NONE, values: str = "float") -> Space | None:
    """The space of the vectors of a request; None if its task makes none.

    `prompt` is what `prompt_part` or one like it says of how texts were read.
    """
    asked = (params.task, params.query, params.use_activation, params.dimensions, prompt, values)
    if asked not in facts.spaces:
        if len(facts.spaces) >= _MOST_KEPT:
            facts.spaces.clear()
        facts.spaces[asked] = _make_space(facts, params, prompt, values)
    return facts.spaces[asked]


def _make_space(facts: Facts, params: Pooling, prompt: str, values: str) -> Space | None:
    made = facts.ready.worker.vectors.get(params.task)
    if made is None:
        return None
    steps = _steps(facts.pooling, params.task)
    pooling = made.pooling if facts.pooling.include_prompt else f"{made.pooling}_without_prompt"
    if params.query and facts.pooling.static_queries:
        pooling = "static"
    weights, reading = made.digest, facts.reading_digest
    normalized = made.normalized if params.use_activation is None else params.use_activation
    digest, name = _digest(weights, reading, steps, pooling)[:_HEAD_DIGITS], facts.space_name
    parts = {
        "weights": weights[:_PART_DIGITS],
        "tokenizer": reading[:_PART_DIGITS],
        "steps": steps,
        "pooling": pooling,
        "prompt": prompt,
        "normalized": "yes" if normalized else "no",
        "dimensions": str(params.dimensions or made.dimensions),
        "values": values,
    }
    shown = PARTS[_NAMED:] if name else PARTS
    return Space(
        digest, parts, name, ".".join([name or digest, *(f"{part}-{parts[part]}" for part in shown)])
    )


def usual_space(facts: Facts) -> Space | None:
    """The space of vectors where a request says nothing but its texts."""
    made = facts.ready.worker.vectors
    task = facts.pooling.task if facts.pooling.task in made else next(iter(made), None)
    if task is None:
        return None
    prompts = facts.pooling.texts.prompts
    return find_space(
        facts, Pooling(task=task), prompt_part(prompts.get(facts.default_prompt_name or "", ""))
    )


def check_space(asked: str, space: Space | None) -> None:
    """Raises SpaceMismatch unless the vectors are from the space that a client asks for."""
    if space is None:
        raise BadRequest(
            "`require_space` is for requests that make vectors; this one makes none.", "require_space"
        )
    if found := space.differences(asked):
        raise SpaceMismatch(
            f"These vectors would be from another space than `require_space` names: {'; '.join(found)}. "
            f"They are from {space}.",
            "require_space",
        )


def prompt_part(prompt: str, *, special: bool = True) -> str:
    """What a space says of the instruction that is written before texts."""
    found = short_digest(prompt) if prompt else NONE
    return found if special else f"{found}_bare"


def short_digest(*values: object) -> str:
    return _digest(*values)[:_PART_DIGITS]


def digest_reading(tokenizer: str, pooling: PoolingConfig) -> str:
    """A digest of how the model's files have a text made to tokens; `tokenizer` is that of the tokenizer."""
    texts = pooling.texts
    return _digest(tokenizer, texts.lower_case, texts.suffix, texts.has_special, texts.chat)


def _steps(pooling: PoolingConfig, task: str) -> str:
    """A digest of the modules before and behind pooling, which have their weights in the weights' digest."""
    steps = [
        step if isinstance(step, Normalize) else msgspec.structs.replace(step, folder="")
        for step in (*pooling.token_steps, *pooling.steps)
    ]
    return short_digest(task, steps) if steps else NONE


def checked_name(asked: str | None, facts: Facts) -> str | None:
    """The operator's name for the space, without what is to be checked of it.

    Raises ConfigError if it cannot be one, or if the model is another than it says.
    """
    if asked is None:
        return None
    name, _, digest = asked.partition("=")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--space-name: {name!r} is not 1 to 64 characters of A-Z a-z 0-9 _ -")
    space = usual_space(facts)
    if digest and (space is None or space.digest != digest):
        raise ConfigError(
            f"--space-name: the model's vectors are not from the space {digest}, but from {space}. Serve "
            "what made the others, or give this one another name."
        )
    return name


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()
