"""What a search has found, in words: what made the vectors, and how Facet goes on making them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

import msgspec
import numpy as np

from server.requests.index_check.search import CHANGES, Found, lengths_of

_MODES = ("MEAN", "CLS", "LAST", "MAX", "MEAN_SQRT_LEN", "WEIGHTED_MEAN")


class Report(msgspec.Struct, kw_only=True):
    """The answer for one model."""

    model: str
    matches: bool
    """Whether this model made the vectors, in a way that was found."""
    nearness: float
    """The median cosine of given vectors and those made in this way; of bits, the part that agrees."""
    least: float
    """The same of the sample that is farthest off."""
    as_published: float
    """The same median where the checkpoint is served as its files say."""
    samples: int
    pooling: str
    modules: str | None = None
    """The number of modules behind pooling that were applied, if the checkpoint has any."""
    prompt: str = ""
    most_tokens: int | None = None
    """The length at which texts were cut, if any was."""
    special_tokens: bool = True
    texts: str = ""
    """What was done to texts before they were read."""
    normalized: str
    dimensions: int
    numbers: str
    """The type of the numbers."""
    serve: list[str] = []
    """The arguments of `facet` with which a server goes on making them."""
    request: dict[str, object] = {}
    """The fields that requests then need."""
    served: float | None = None
    """The nearness of vectors of a server that was started so, if one was."""
    lacks: list[str] = []
    """What of the way Facet has no option for."""
    notes: list[str] = []
    """What these samples cannot tell, what else is to be done, and which samples were left out."""

    @property
    def command(self) -> str:
        return shlex.join(["facet", *self.serve])


def make_report(found: Found) -> Report:
    best, given, model = found.best, found.given, found.model
    reading, steps = best.reading, model.poolings.steps
    width = best.made.shape[1]
    bits = given.are_bits(width)
    cut = max(map(len, model.encode(reading, given.texts)), default=0) >= reading.keep
    lengths = lengths_of(found)
    report = Report(
        model=model.name,
        matches=found.matches,
        nearness=float(np.median(best.near)),
        least=float(np.min(best.near)),
        as_published=float(np.median(found.usual.near)),
        samples=len(given.texts),
        pooling=_pooling_by_length(found, lengths),
        modules=f"{best.steps} of {len(steps)}" if steps else None,
        prompt=reading.prompt,
        most_tokens=reading.keep if cut else None,
        special_tokens=reading.special,
        texts=reading.change,
        normalized=lengths,
        dimensions=width if bits else given.width,
        numbers="binary" if bits else given.kind,
    )
    if found.matches:
        _add_serving(report, found, width)
        told = (*found.unknown, *_precision(report, given.is_float))
        report.notes += [f"{one[0].upper()}{one[1:]}." for one in told]
    report.notes += [f"Left out: {one}." for one in given.left_out[:5]]
    return report


def _pooling_by_length(found: Found, lengths: str) -> str:
    """The mode; a mean by the root of the length points where a mean does, and only its length differs."""
    mode = found.best.mode
    if mode != "MEAN" or lengths != "scaled" or found.best.steps:
        return mode
    given, tokens = found.given.lengths, found.model.encode(found.best.reading, found.given.texts)
    made = np.linalg.norm(found.best.made, axis=1) * np.sqrt(list(map(len, tokens)))
    return "MEAN_SQRT_LEN" if given is not None and np.allclose(given, made, rtol=0.01) else mode


def _precision(report: Report, is_float: bool) -> list[str]:
    if is_float and report.nearness < 0.9999:
        return [
            f"cosines of {report.nearness:.5f} are those of quantized weights or of other arithmetic: the "
            "same way, not the same numbers"
        ]
    return []


def _add_serving(report: Report, found: Found, width: int) -> None:
    """The command and the fields of requests, and what of the way they cannot say."""
    best, model, lacks = found.best, found.model, report.lacks
    pooler: dict[str, object] = {}
    if report.pooling not in (*_MODES, "+".join(model.pooling.modes)):
        lacks.append(f"the pooling {report.pooling}")
    elif report.pooling != ("+".join(model.pooling.modes) or model.usual_mode):
        pooler["pooling_type"] = report.pooling
    if best.steps < len(model.poolings.steps):
        folders = [getattr(step, "folder", "") or "Normalize" for step in model.poolings.steps[best.steps :]]
        lacks.append(f"vectors without {', '.join(folders)}: serve a copy whose modules.json leaves them out")
    if report.normalized == "raw" and model.pooling.normalize:
        pooler["use_activation"] = False
    elif report.normalized == "normalized" and not model.pooling.normalize:
        pooler["use_activation"] = True
    elif report.normalized in ("cut", "scaled") and report.pooling != "MEAN_SQRT_LEN":
        lacks.append(
            f"vectors whose lengths are {report.normalized}: cosines are the same, dot products are not"
        )
    if report.pooling == "MEAN_SQRT_LEN":
        pooler["use_activation"] = False
    if report.dimensions < width:
        pooler["dimensions"] = report.dimensions
    report.serve = ["serve", model.name]
    if pooler:
        report.serve += ["--pooler-config", json.dumps(pooler)]
    _add_reading(report, found)
    if report.numbers in ("int8", "uint8", "binary"):
        report.notes.append(f"The index has made {report.numbers} of floats: do so with those of answers.")


def _add_reading(report: Report, found: Found) -> None:
    texts, reading = found.model.pooling.texts, found.best.reading
    usual = found.model.usual
    if reading.prompt != usual.prompt:
        names = [name for name, prompt in texts.prompts.items() if prompt == reading.prompt]
        if names:
            report.serve += ["--default-prompt-name", names[0]]
        elif usual.prompt:
            report.lacks.append("texts without the model's default prompt")
        else:
            report.notes.append(
                f"Write {reading.prompt!r} before each text: the checkpoint has no such prompt."
            )
    if report.most_tokens is not None:
        report.request["truncate_prompt_tokens"] = report.most_tokens
        if report.most_tokens > usual.keep:
            report.serve += ["--max-model-len", str(report.most_tokens)]
    if not reading.special:
        report.request["add_special_tokens"] = False
    if reading.change:
        report.notes.append(f"Send texts {reading.change}.")


def written(reports: Sequence[Report]) -> str:
    """The reports for people, the best model first."""
    lines: list[str] = []
    for report in sorted(reports, key=lambda one: -one.nearness):
        what = "made" if report.matches else "did not, in any way that was tried, make"
        lines += [f"{report.model} {what} these vectors: {_measured(report)}"]
        if not report.matches:
            lines += [f"  {note}" for note in report.notes]
            continue
        told = {
            "pooling": report.pooling,
            "modules applied": report.modules,
            "prompt": repr(report.prompt) if report.prompt else "none",
            "cut at": f"{report.most_tokens} tokens" if report.most_tokens else "no text was",
            "special tokens": None if report.special_tokens else "none",
            "lengths": report.normalized,
            "dimensions": str(report.dimensions),
            "numbers": report.numbers,
        }
        lines += [f"  {name + ':':17}{value}" for name, value in told.items() if value is not None]
        lines += ["", f"  {report.command}"]
        if report.request:
            lines.append(f"  with these fields in requests: {json.dumps(report.request)}")
        if report.served is not None:
            lines.append(f"  served so, its vectors have {_unit(report)} {report.served:.6f}")
        lines += ["", *(f"  No option of Facet makes {one}." for one in report.lacks)]
        lines += [f"  {note}" for note in report.notes]
    return "\n".join(lines)


def texts_to_send(found: Found) -> list[str]:
    """The texts as requests have them to a server that was started as the report says."""
    reading, model = found.best.reading, found.model
    named = reading.prompt in (model.usual.prompt, *model.pooling.texts.prompts.values())
    before = "" if named else reading.prompt
    return [before + CHANGES[reading.change](text) for text in found.given.texts]


def _unit(report: Report) -> str:
    return "bits that agree" if report.numbers == "binary" else "a cosine of"


def _measured(report: Report) -> str:
    return (
        f"{_unit(report)} {report.nearness:.6f} (least {report.least:.6f}) of {report.samples} samples; "
        f"as published {report.as_published:.6f}"
    )
