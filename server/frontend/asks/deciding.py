"""The ask that is answered with probabilities of fixed answers: typed questions about one text.

The text is computed once: the first prompt is sent alone, and the others find what they have in common with
it in the prefix cache. So it is with the beginning of a question behind which a model is asked several times.
Engines are told where such beginnings end, so that no prompt computes a token of them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import msgspec

from engine_core.client.in_flight import AddOptions
from engine_core.protocol import Tokens
from server.access.request_state import Attributes
from server.errors import from_engine
from server.frontend.asks.parts import AnswerHead, Counts, End, Terms, head_fields
from server.frontend.frontend import Frontend
from server.media.prompt import as_media
from server.model_facts import DECIDE
from server.reading.decisions import AskedQuestion, ReadDecisions
from server.requests.decisions import Branch, Labels, Question, averaged, probabilities, tempered
from server.requests.pooling import PooledText
from server.requests.vectors import as_array
from server.text.tokenizer import unpack
from worker.protocol import Pooling


class Decide(msgspec.Struct, frozen=True, kw_only=True):
    """Answer typed questions about a text or a conversation."""

    terms: Terms
    read: ReadDecisions

    async def open(self, frontend: Frontend) -> DecidedAnswer:
        """Returns the answer when all questions are decided. Raises the error that refuses or ends it."""
        return await _Run(frontend, self.terms, self.read).decide()


class DecidedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `Decide`."""

    head: AnswerHead
    end: End
    decided: list[tuple[Question, list[float]]]
    """Each question with the probabilities of its options; none if it has no answer."""
    refusals: dict[int, str]
    """Why questions have no answer, by their index."""


class _Row:
    """A prompt behind which an engine tells the log-probabilities of some tokens."""

    def __init__(self, asked: AskedQuestion, branch: Branch, first: Branch | None) -> None:
        """`first`: the branch with which those of a question begin, if there are several."""
        self.question, self.branch = asked.question, branch
        self._tokens = asked.tokens
        self.shared = [] if first is None else [len(asked.tokens) + len(first.begun)]
        """The length of what the prompts of a question have in common behind the state."""
        self.told: Sequence[float] = ()

    @property
    def tail(self) -> list[int]:
        """The tokens behind the state: of a request with many questions, only some are there at a time."""
        return [*self._tokens, *self.branch.begun]

    @property
    def length(self) -> int:
        return len(self._tokens) + len(self.branch.begun)


class _Run:
    """A request whose questions are being decided: its places, its counts and its times."""

    def __init__(self, frontend: Frontend, terms: Terms, read: ReadDecisions) -> None:
        """Lets the request in."""
        self._frontend, self._terms, self._read, self._state = frontend, terms, read, terms.state
        ends = frontend.facts.eos_token_ids
        self._labels = [Labels(asked.labels, ends) for asked in read.asked]
        self._rows = [
            [_Row(asked, branch, labels.first) for branch in labels.branches]
            for asked, labels in zip(read.asked, self._labels, strict=True)
        ]
        self._state_ids, self._refusals = unpack(read.state.ids), {**read.refusals}
        rows = list(chain(*self._rows))
        # The state counts once, however many questions read it.
        self._tokens = len(self._state_ids) + sum(row.length for row in rows)
        places = frontend.engine_requests.places_for(len(rows), self._state.caller)
        self._admission = self._state.admit(frontend.admissions, places)
        self._options: AddOptions = {"group": frontend.new_group(), "most_guesses": 0}
        self._head = AnswerHead(**head_fields(frontend, terms, terms.take_id(self._admission)))
        self._state.work = self

    def describe(self) -> Attributes:
        """What a trace tells of the request."""
        return {
            "gen_ai.request.id": self._head.id,
            "gen_ai.response.model": self._head.model,
            "gen_ai.usage.prompt_tokens": self._tokens,
            "gen_ai.usage.completion_tokens": 0,
        }

    async def decide(self) -> DecidedAnswer:
        admission, times, read = self._admission, self._state.times, self._read
        admission.check_tokens(self._tokens)
        admission.read(self._tokens)
        times.submit()
        work = admission.begin_work(self._tokens)
        try:
            for wave in filter(None, self._waves()):
                await self._send(wave)
        finally:
            work.end()
        media = sum([placed.embeddings for placed in read.state.media])
        return DecidedAnswer(
            head=self._head,
            end=End(Counts(self._tokens, times.cached_tokens, 0, None, media), times),
            decided=[(question, self._found(index)) for index, question in enumerate(read.questions)],
            refusals=self._refusals,
        )

    def _waves(self) -> list[list[_Row]]:
        """The prompts to send: first the one that computes the state, then the first of each question, then
        those that go on behind it."""
        first, rest = (
            [rows[0] for rows in self._rows if rows],
            [row for rows in self._rows for row in rows[1:]],
        )
        facts = self._frontend.facts.ready.worker
        if not (self._frontend.config.engine.enable_prefix_caching and facts.keeps_prefixes):
            return [[*first, *rest]]
        shares = len(self._state_ids) >= facts.block_size
        return [first[:1], first[1:], rest] if shares else [first, rest]

    async def _send(self, wave: list[_Row]) -> None:
        """Asks an engine about all prompts of a wave, and notes what it tells."""
        media, times = self._read.state.media, self._state.times
        options: AddOptions = {
            **self._terms.add_options(self._admission, begun=times.steps > 0),
            **self._options,
        }
        if DECIDE in self._frontend.facts.tasks:
            await self._score(wave, options)
            return
        if media:
            options["media"] = as_media(media, self._state.media_items)
        state = len(self._state_ids)
        prompts = (
            (
                [*self._state_ids, *row.tail],
                row.branch.sampling,
                state,
                *(state + each for each in row.shared),
            )
            for row in wave
        )
        lengths = [state + row.length for row in wave]
        answers = await self._frontend.engine_requests.tell(
            prompts, lengths, self._admission, replica=self._terms.replica, **options
        )
        told = [answer for answer in answers if isinstance(answer, Tokens)]
        if told and not times.cached_tokens:
            times.cached_tokens = min(told[0].cached, len(self._state_ids))
        times.add_round(told)
        for row, answer in zip(wave, answers, strict=True):
            if isinstance(answer, Tokens):
                row.told = answer.logprobs[0].told
                continue
            self._refusals[row.question] = answer.message
            if answer.code not in (400, 500) or len(self._refusals) == len(self._read.questions):
                raise from_engine(answer, self._frontend.admissions.seconds_to_wait())

    async def _score(self, wave: list[_Row], options: AddOptions) -> None:
        """Asks an engine for what the model's head gives each option of a wave. Raises the first failure."""
        times, options["shared"] = self._state.times, (len(self._state_ids),)
        items = [PooledText([*self._state_ids, *row.tail], Pooling(task="decide")) for row in wave]
        scored = await self._frontend.engine_requests.pool(
            items, self._admission, replica=self._terms.replica, **options
        )
        if not times.cached_tokens:
            times.cached_tokens = min(scored[0].cached, len(self._state_ids))
        times.add_round(scored)
        for row, answer in zip(wave, scored, strict=True):
            row.told = as_array(answer.vectors)[:, 0].tolist()

    def _found(self, index: int) -> list[float]:
        """The probabilities of the options of a question, averaged over their orders."""
        if index in self._refusals:
            return []
        temperature = self._frontend.facts.temperatures.get(self._read.questions[index].kind, 1.0)
        orders = [
            probabilities(labels.likelihoods([row.told for row in rows]))
            for asked, labels, rows in zip(self._read.asked, self._labels, self._rows, strict=True)
            if asked.question == index
        ]
        return tempered(averaged(orders), temperature)
