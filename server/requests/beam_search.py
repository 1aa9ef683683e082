"""Beam search: what a client may ask of it, and which answers a search follows and finds. It knows no engine.

A search goes on in rounds. In each, a model tells for every answer that is followed the likeliest tokens
behind it, twice as many as there are answers; of all these continuations the likeliest are followed in the
next round. One with a stop token has ended, and competes by its score with all that end later. The search is
over when no answer that is followed can get a better score than those that have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import msgspec

from engine_core.client.in_flight import AddOptions
from server.errors import BadRequest, invalid, refuse_for_sources
from server.model_facts import Facts
from server.requests.sampling_params import SamplingParams
from worker.protocol import Sampling, TokenLogprobs

_UNKNOWN = (
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
    *("allowed_token_ids", "min_tokens", "stop", "structured_outputs", "repetition_detection"),
)
"""The parameters that a beam search does not obey. Those of the draw have no meaning here."""
_NEUTRAL = (None, 0, "", [], {})
_MOST_LENGTH_PENALTY = 10


@dataclass(frozen=True, slots=True)
class BeamParams:
    """The parameters of a search, as a client gives them."""

    width: int
    """The number of answers that are followed at a time, and of those that are found."""
    length_penalty: float = 1.0
    """An answer's score is the sum of its logprobs by its length, the prompt's included, to this power."""
    early_stopping: bool = False
    """Whether the search ends with as many ended answers as it follows, though better ones may be found."""
    logprobs: int | None = None
    """The number of most likely tokens to report beside each token; -1 is the whole vocabulary."""

    @property
    def candidates(self) -> int:
        """The number of tokens with which each answer may go on: half of them may end it."""
        return 2 * self.width


@dataclass(frozen=True, slots=True)
class BeamRules:
    """The rules of one search: what is asked, and what its prompt and its model add to that."""

    params: BeamParams
    stops: frozenset[int]
    """The tokens that end an answer."""
    prompt_len: int
    limit: int
    """The number of tokens, the prompt's included, at which answers end."""

    def score(self, total: float, length: int) -> float:
        return total / length**self.params.length_penalty

    def sampling(self, round: BeamRound) -> Sampling:
        """The parameters of a request for the token behind an answer that this round follows."""
        shown = self.params.logprobs
        count = -1 if shown == -1 else max(self.params.candidates, shown or 0)
        return Sampling(len(round.followed[0].tokens) + 1, temperature=0.0, logprobs=count)


@dataclass(frozen=True, slots=True)
class Beam:
    """An answer, or the beginning of one."""

    tokens: list[int] = field(default_factory=list[int])
    """The stop token is included, as the last one."""
    total: float = 0.0
    """The sum of the logprobs of its tokens."""
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """An entry for each token, if asked for."""
    finish: Literal["stop", "length"] = "length"


class BeamRound(NamedTuple):
    """The state of a search between two rounds."""

    followed: list[Beam]
    """The answers to be continued, all of the same length, the likeliest first. None: the search is over."""
    found: list[Beam]
    """The best answers that have ended, the best one first."""


class BeamSearchParams(msgspec.Struct):
    """The search of `LLM.beam_search`, with vLLM's fields."""

    beam_width: int
    """The number of answers that are followed at a time, and of those that are found."""
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Without effect, because nothing is drawn: answers are compared by the model's own logprobs."""
    length_penalty: float = 1.0
    """An answer's score is the sum of its logprobs by its length, the prompt's included, to this power."""
    include_stop_str_in_output: bool = False
    """Whether the text has that of the stop token."""
    skip_special_tokens: bool = True
    """Whether special tokens, the prompt's too, are left out of the text."""

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )

    def beams(self) -> BeamParams:
        return BeamParams(self.beam_width, self.length_penalty, logprobs=2 * self.beam_width)


def read_rules(
    params: BeamParams,
    asked: SamplingParams,
    resolved: Sampling,
    prompt_len: int,
    facts: Facts,
    options: AddOptions = AddOptions(),
) -> BeamRules:
    """The rules of a search for answers to a prompt, for which `asked` resolves to `resolved`.

    Raises BadRequest if more is asked, or held to by `options`, than a search obeys.
    """
    if options.get("grammar") is not None or options.get("thinking") is not None:
        raise BadRequest(
            "beam search takes no grammar and no thinking budget: leave them, or the search, out.",
            "use_beam_search",
        )
    if facts.sources is not None:
        refuse_for_sources(use_beam_search=True)
    if facts.ready.worker.processes_logits:
        raise BadRequest(
            "beam search does not go with --logits-processors, which this server has.", "use_beam_search"
        )
    if asked.prompt_logprobs is not None:
        raise BadRequest(
            "beam search tells no logprobs of prompts: leave `prompt_logprobs`, `echo` or `logprobs` out.",
            "use_beam_search",
        )
    for name in _UNKNOWN:
        value = getattr(asked, name)
        if value not in _NEUTRAL and (name, value) != ("repetition_penalty", 1.0):
            raise BadRequest(f"beam search does not support `{name}`: leave it out.", name)
    most = min(facts.limits.n, facts.ready.worker.max_num_seqs)
    if not 1 <= params.width <= most:
        raise invalid(
            "n", f"the width of a beam search must be from 1 to {most}, got {params.width}.", params.width
        )
    if not abs(params.length_penalty) <= _MOST_LENGTH_PENALTY:
        most = _MOST_LENGTH_PENALTY
        raise invalid(
            "length_penalty",
            f"length_penalty must be from -{most} to {most}, got {params.length_penalty}.",
            params.length_penalty,
        )
    shown = params.logprobs if resolved.logprobs is None else resolved.logprobs
    limit = min(prompt_len + resolved.max_tokens, facts.ready.worker.max_model_len)
    return BeamRules(replace(params, logprobs=shown), frozenset(resolved.stop_token_ids), prompt_len, limit)


FIRST_ROUND = BeamRound([Beam()], [])
"""The beginning of every search: the empty answer is followed."""


class _Continuation(NamedTuple):
    beam: Beam
    token: int
    total: float
    entry: TokenLogprobs


def advance(round: BeamRound, entries: Sequence[TokenLogprobs], rules: BeamRules) -> BeamRound:
    """The next round, given what may follow each answer of this one: `entries`, in the same order.

    An entry begins with the sampled token, which is not looked at; its likeliest tokens are behind that.
    """
    width, length = rules.params.width, rules.prompt_len + len(round.followed[0].tokens) + 1
    going_on: list[_Continuation] = []
    ended: list[tuple[float, Beam]] = [(_score(beam, rules), beam) for beam in round.found]
    for beam, entry in zip(round.followed, entries, strict=True):
        likeliest = slice(1, 1 + rules.params.candidates)
        for token, value in zip(entry.ids[likeliest], entry.values[likeliest], strict=True):
            one = _Continuation(beam, token, beam.total + value, entry)
            if token in rules.stops:
                ended.append(_ended(one, "stop", rules))
            else:
                going_on.append(one)
    going_on = sorted(going_on, key=_total, reverse=True)[:width]
    ended = sorted(ended, key=_of_score, reverse=True)[:width]
    if not _is_over(going_on, ended, length, rules):
        return BeamRound([_grown(one, rules) for one in going_on], [beam for _, beam in ended])
    if not (rules.params.early_stopping and len(ended) == width):
        ended += [_ended(one, "length", rules) for one in going_on]
    return BeamRound([], [beam for _, beam in sorted(ended, key=_of_score, reverse=True)[:width]])


def _is_over(
    going_on: list[_Continuation], ended: list[tuple[float, Beam]], length: int, rules: BeamRules
) -> bool:
    """Whether answers that go on, of so many tokens with the prompt's, are at the limit or too unlikely."""
    if not going_on or length >= rules.limit:
        return True
    if len(ended) < rules.params.width:
        return False
    # Logprobs are not above 0, so an answer gets a better score only by its length.
    best = max(rules.score(going_on[0].total, each) for each in (length, rules.limit))
    return rules.params.early_stopping or ended[-1][0] >= best


def _ended(one: _Continuation, finish: Literal["stop", "length"], rules: BeamRules) -> tuple[float, Beam]:
    """An answer that ends with this token, behind its score."""
    beam = _grown(one, rules, finish)
    return _score(beam, rules), beam


def _score(beam: Beam, rules: BeamRules) -> float:
    """The score of an answer that has ended; a stop token does not count for its length."""
    return rules.score(beam.total, rules.prompt_len + len(beam.tokens) - (beam.finish == "stop"))


def _grown(one: _Continuation, rules: BeamRules, finish: Literal["stop", "length"] = "length") -> Beam:
    """The answer with its next token, whose logprobs it keeps if they are asked for."""
    beam, token, total, entry = one
    if (count := rules.params.logprobs) is None:
        return Beam([*beam.tokens, token], total, finish=finish)
    rank, stop = entry.ids.index(token, 1), len(entry.ids) if count == -1 else 1 + count
    told = TokenLogprobs([token, *entry.ids[1:stop]], [entry.values[rank], *entry.values[1:stop]], rank)
    return Beam([*beam.tokens, token], total, [*beam.logprobs, told], finish)


def _total(one: _Continuation) -> float:
    return one.total


def _of_score(ended: tuple[float, Beam]) -> float:
    return ended[0]
