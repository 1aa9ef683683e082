"""Receipts of `facet prove`: what decides a model's answers, and digests of what it computed."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from server.terminal.console import CommandError
from server.terminal.doctor import processor_name
from worker.proof.messages import Computed, Proof, ProofOrder

_ANSWERS, _LENGTH = 200, 8
_SHORTEST, _LONGEST = 3, 24
_TOKENS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_CONFIG = ("config.json",)
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


class AnswerDigests(msgspec.Struct, frozen=True):
    """Digests of what was computed of one prompt."""

    layers: list[str]
    answer: str
    """A digest of the tokens and of the bits of their log-probabilities, or of those of a vector."""


class Receipt(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    facts: dict[str, str]
    """What decides the answers."""
    answers: list[AnswerDigests]


def receipt_order(order: ProofOrder) -> ProofOrder:
    """The order with the prompts of receipts: tokens drawn from the vocabulary, the same ones each time.

    Raises CommandError if the model answers about a source.
    """
    if order.config.model.raw.get("is_encoder_decoder"):
        raise CommandError(
            "receipts are of models that only read a text, and this one has an encoder for its source"
        )
    drawn, vocab_size = random.Random(0), order.config.model.vocab_size
    prompts = [
        [drawn.randrange(vocab_size) for _ in range(drawn.randint(_SHORTEST, _LONGEST))]
        for _ in range(_ANSWERS)
    ]
    return msgspec.structs.replace(order, prompts=prompts, length=_LENGTH, operations=False)


def receipt_of(model: str, order: ProofOrder, proof: Proof, ranks: int = 1) -> Receipt:
    folder, options = Path(order.config.folder), order.config.options
    facts = {
        "weights": proof.weights[:16],
        "config.json": _digest_files(folder, _CONFIG),
        "tokenizer": _digest_files(folder, _TOKENS),
        "chat template": _digest_files(folder, _TEMPLATES),
        "device": proof.device,
        "kernels": proof.kernels,
        "processor": processor_name(Path("/proc/cpuinfo")),
        "number type": proof.dtype,
        "threads": str(options.cpu_threads or "by the machine"),
        "ranks": str(ranks),
        **{name: version(name) for name in ("facet-serve", "torch", "transformers")},
    }
    return Receipt(model, proof.dtype, facts, [_digests(each) for each in proof.computed])


def read_receipt(path: Path) -> Receipt:
    """Reads a receipt. Raises CommandError if it cannot be used."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Receipt)
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise CommandError(f"{path} is no receipt of `facet prove --receipt`: {error}") from None


def difference(kept: Receipt, found: Receipt) -> str:
    """Tells which layer differs first, and in how many answers; "" if all bits are equal."""
    pairs = list(zip(kept.answers, found.answers, strict=False))
    wrong = [pair for pair in pairs if pair[0] != pair[1]]
    if not wrong and len(kept.answers) == len(found.answers):
        return ""
    firsts = [_first_difference(*pair) for pair in wrong]
    layer = min(firsts, default=0)
    where = (
        f"layer {layer} is the first that differs"
        if layer < len(kept.answers[0].layers)
        else "all layers are equal, and the head differs"
    )
    return f"{len(wrong)} of {len(pairs)} answers differ; {where}"


def changes(kept: Receipt, found: Receipt) -> list[str]:
    """What decides answers and is not as it was."""
    return [
        f"{name}: {kept.facts.get(name, 'unknown')}, now {now}"
        for name, now in found.facts.items()
        if kept.facts.get(name) != now
    ]


def _first_difference(kept: AnswerDigests, found: AnswerDigests) -> int:
    pairs = zip(kept.layers, found.layers, strict=False)
    return next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), len(kept.layers))


def _digests(computed: Computed) -> AnswerDigests:
    numbers: Sequence[float] = computed.logprobs or computed.vector
    answer = array("q", computed.tokens).tobytes() + array("d", numbers).tobytes()
    return AnswerDigests([_short(layer) for layer in computed.layers], _short(answer))


def _digest_files(folder: Path, names: Sequence[str]) -> str:
    found = [(folder / name).read_bytes() for name in names if (folder / name).is_file()]
    return _short(b"".join(found)) if found else "none"


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
