"""Transcripts of the HTTP API over a `FakeFrontend`: what an engine would say stands in the transcript.

`flags` are those of `serve`, and `engine` says what the engine is: `reply` and other fields of a
`FakeFrontend`, `facts` of its model as far as they differ, `vectors` for each text in turn, `tokenizer`,
errors by their class, and `failures` of the prompts of decisions by their numbers. `asked` is what the answer
made the engine do: prompts, parameters that are not the usual ones, and grammars; `checked` is what was asked
of the form of answers.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import msgspec
from fake_api import make_app, make_client
from fake_frontend import BOS, FakeFrontend, byte_tokenizer, vectors
from transcripts import Case, answer_of, asking, keep, request_of

from engine_core.engine_stats import GuessReport, Timing
from engine_core.protocol import Failed
from server import errors
from server.access.admission import Admission
from server.frontend.text_output import Delta
from server.model_facts import Facts
from server.options.parse_server_options import parse
from server.requests.pooling import PooledText
from server.requests.sampling_params import SamplingParams
from server.text.tokenizer import Tokenizer
from worker.protocol import Pooling, Sampling

PLAIN = ("reply", "reply_ids", "per_step", "cached", "tokens_before_error", "waits", "expected")
"""Fields of a `FakeFrontend` that a transcript writes as they are."""
_OPTIONS = (
    "priority",
    "salt",
    "adapter",
    "thinking",
    "most_guesses",
    "reports_guesses",
    "interval",
    "replica",
    "grammar",
)
"""What the engine is told of a request beside its prompt and its parameters."""


class Noted(FakeFrontend):
    """A frontend that notes what it is asked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.noted: list[Any] = []

    def generate(
        self,
        prompt: Any,
        sampling: SamplingParams,
        admission: Admission,
        *,
        params: list[Sampling] | None = None,
        **options: Any,
    ) -> AsyncGenerator[Delta, None]:
        stream = super().generate(prompt, sampling, admission, params=params, **options)
        tokens = self.asked[-1][0]
        found = params or sampling.resolve(self.facts, self.tokenizer, len(tokens))
        self.noted.append(_note(tokens, [_params(one) for one in found], options))
        return stream

    async def pool(self, items: Sequence[PooledText], admission: Admission, **options: Any) -> Any:
        found = await super().pool(items, admission, **options)
        for item in self.pooled[-1][0]:
            self.noted.append(_note(item.tokens, [_params(item.params)], options))
        return found

    async def tell(self, prompts: Any, lengths: Sequence[int], admission: Admission, **options: Any) -> Any:
        prompts = list(prompts)
        self.noted.append([_note(tokens, [_params(params)], options) for tokens, params, *_ in prompts])
        return await super().tell(prompts, lengths, admission, **options)


def _note(tokens: Any, params: list[Any], options: Mapping[str, Any]) -> Any:
    each = params[:1] if all(one == params[0] for one in params) else params
    told = {
        name: _builtins(options[name]) for name in _OPTIONS if options.get(name) not in (None, 0, "", False)
    }
    told.pop("interval", None) if told.get("interval") == 1 else None
    return [_text(list(tokens)), each[0] if len(each) == 1 else each, len(params), told]


def _builtins(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def _params(value: Sampling | Pooling) -> dict[str, Any]:
    """Returns the parameters that are not the usual ones; what the server has drawn is `#`."""
    found = _builtins(value)
    for field in msgspec.structs.fields(type(value)):
        if field.name in found and found[field.name] == field.default:
            del found[field.name]
    drawn = {name: "#" for name in ("late_query", "late_document") if name in found}
    return found | drawn | ({"seed": "#"} if found.get("seed", 0) >= 1 << 32 else {})


def _text(tokens: list[int]) -> object:
    """Returns the text whose bytes the tokens are, as far as they are one."""
    try:
        start = "<bos>" if tokens[:1] == [BOS] else ""
        return start + bytes(tokens[len(start) and 1 :]).decode()
    except ValueError:
        return tokens


def set_up(frontend: Noted, engine: Mapping[str, Any], plain: FakeFrontend) -> None:
    """Makes the frontend one of the engine that a transcript describes; `plain` has what it does not name."""
    for name in PLAIN:
        setattr(frontend, name, engine.get(name, getattr(plain, name)))
    facts = merged(_builtins(plain.facts), engine.get("facts", {}))
    frontend.facts = msgspec.convert(facts, Facts, strict=False)
    frontend.tokenizer = _tokenizer(**engine["tokenizer"]) if "tokenizer" in engine else plain.tokenizer
    answers = iter(engine.get("vectors", ()))
    frontend.answer_of = lambda item: vectors(next(answers, [len(item.tokens), -1.5]))
    frontend.guesses = msgspec.convert(engine.get("guesses"), GuessReport | None)
    frontend.timing = msgspec.convert(engine.get("timing"), Timing | None)
    frontend.error, frontend.unready = _error(engine.get("error")), _error(engine.get("unready"))
    frontend.pool_errors = [one for one in [_error(engine.get("pool_error"))] if one is not None]
    frontend.told.clear()
    frontend.tell_errors = {int(at): Failed(0, *told) for at, told in engine.get("failures", {}).items()}
    slots, queue = engine.get("places", (plain.facts.ready.worker.max_num_seqs, None))
    frontend.with_places(slots, queue=queue)
    frontend.noted.clear()
    frontend.checked.clear()


def _tokenizer(more: Sequence[str] = (), **options: Any) -> Tokenizer:
    return byte_tokenizer(*more, **options)


def merged(whole: Any, part: Any) -> Any:
    """Returns a tree of objects with other values where `part` names some."""
    if not isinstance(whole, dict) or not isinstance(part, dict):
        return part
    return {**whole, **{name: merged(whole.get(name), value) for name, value in part.items()}}


def _error(said: Mapping[str, Any] | None) -> errors.ApiError | None:
    if said is None:
        return None
    found: errors.ApiError = getattr(errors, said["class"])(said["message"])
    found.param, found.retry_after = said.get("param"), said.get("retry_after")
    return found


async def replay(cases: Sequence[Case], folder: Path) -> list[Case]:
    """Returns the cases with the answers that they get now. Those of the same flags are asked of one app."""
    answered: list[Case] = []
    plain = FakeFrontend()
    for number, (flags, group) in enumerate(groupby(cases, key=lambda case: case.get("flags", []))):
        frontend = Noted()
        config = parse(["org/tiny", *flags], {})
        options = {name: getattr(config, name) for name in type(config).__struct_fields__ if name != "engine"}
        app = make_app(frontend, work_folder=folder / f"{number}", **options)
        kept: dict[str, str] = {}
        async with make_client(app) as client:
            for case in group:
                set_up(frontend, case.get("engine", {}), plain)
                answered.append(await _answered(client, frontend, case, kept))
    return answered


async def _answered(client: httpx.AsyncClient, frontend: Noted, case: Case, kept: dict[str, str]) -> Case:
    response = await client.request(**request_of(case, kept))
    keep(case, response, kept)
    noted: Case = {"asked": list(frontend.noted)} if frontend.noted else {}
    noted |= {"checked": [_builtins(one) for one in frontend.checked]} if frontend.checked else {}
    return {**asking(case), **answer_of(case, response, live=False), **noted}
