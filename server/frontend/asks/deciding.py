"""The ask that is answered with probabilities of fixed answers: typed questions about one text.

The text is computed once: the first prompt is sent alone, and the others find what they have in common with
it in the prefix cache. So it is with the beginning of a question behind which a model is asked several times.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine_core.protocol import Failed, Tokens
from server.access.request_state import Attributes
from server.errors import from_engine
from server.frontend.asks.parts import AnswerHead, Counts, End, Terms, head_fields
from server.frontend.frontend import Frontend
from server.media.prompt import as_media
from server.reading.decisions import AskedQuestion, ReadDecisions
from server.requests.decisions import Branch, Labels, Question, averaged, probabilities, tempered
from server.text.tokenizer import unpack


class Decide(msgspec.Struct, frozen=True, kw_only=True):
    """Answer typed questions about a text or a conversation."""

    terms: Terms
    read: ReadDecisions

    async def open(self, frontend: Frontend) -> DecidedAnswer:
        """Returns the answer when all questions are decided. Raises the error that refuses or ends it."""
        run = _Run(frontend, self.terms, self.read)
        found = await run.decide()
        return DecidedAnswer(head=run.head, end=run.end, questions=self.read.questions, found=found)


class Found(msgspec.Struct, frozen=True):
    """The probability of each option of a question, in order; or why it has no answer."""

    probabilities: list[float]
    refusal: str = ""


class DecidedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `Decide`."""

    head: AnswerHead
    end: End
    questions: list[Question]
    found: list[Found]
    """What was found of each question, in order."""

    @property
    def decided(self) -> list[tuple[Question, list[float]]]:
        """Each question with the probabilities of its options; none if it has no answer."""
        return [(one, found.probabilities) for one, found in zip(self.questions, self.found, strict=True)]


class _Row:
    """A prompt behind which an engine tells the log-probabilities of some tokens."""

    def __init__(self, asked: AskedQuestion, branch: Branch) -> None:
        self.tail, self.branch = [*asked.tokens, *branch.begun], branch
        self.told: Sequence[float] = ()


class _Run:
    """A request whose questions are being decided: its places, its counts and its times."""

    def __init__(self, frontend: Frontend, terms: Terms, read: ReadDecisions) -> None:
        """Lets the request in."""
        self._frontend, self._terms, self._read = frontend, terms, read
        ends = frontend.facts.eos_token_ids
        self._labels = [Labels(asked.labels, ends) for asked in read.asked]
        self._rows = [
            [_Row(asked, branch) for branch in labels.branches]
            for asked, labels in zip(read.asked, self._labels, strict=True)
        ]
        self._state_ids, self._state = unpack(read.state.ids), terms.state
        self._cached, self._failed = 0, dict[int, Failed]()
        rows = sum(map(len, self._rows))
        # The state counts once, however many questions read it.
        self._tokens = len(self._state_ids) + sum(len(row.tail) for rows in self._rows for row in rows)
        places = frontend.engine_requests.places_for(rows, self._state.caller)
        self._admission = self._state.admit(frontend.admissions, places)
        self._group = frontend.new_group()
        self.head = AnswerHead(**head_fields(frontend, terms, terms.take_id(self._admission)))
        self._state.work = self

    @property
    def end(self) -> End:
        media = sum([placed.embeddings for placed in self._read.state.media])
        return End(Counts(self._tokens, self._cached, 0, None, media), self._state.times)

    def describe(self) -> Attributes:
        """What a trace tells of the request."""
        return {
            "gen_ai.request.id": self.head.id,
            "gen_ai.response.model": self.head.model,
            "gen_ai.usage.prompt_tokens": self._tokens,
            "gen_ai.usage.completion_tokens": 0,
        }

    async def decide(self) -> list[Found]:
        self._admission.check_tokens(self._tokens)
        self._admission.read(self._tokens)
        self._state.times.submit()
        work = self._admission.begin_work(self._tokens)
        try:
            for wave in self._waves():
                await self._send(wave)
        finally:
            work.end()
        return [self._found(index) for index in range(len(self._read.questions))]

    def _waves(self) -> list[list[tuple[int, _Row]]]:
        """The prompts to send, each with the index of its question: first the one that computes the state,
        then the first of each question, then those that go on behind it."""
        owned = [
            [(asked.question, row) for row in rows]
            for asked, rows in zip(self._read.asked, self._rows, strict=True)
        ]
        first = [rows[0] for rows in owned if rows]
        rest = [row for rows in owned for row in rows[1:]]
        facts = self._frontend.facts.ready.worker
        caches = self._frontend.config.engine.enable_prefix_caching and facts.keeps_prefixes
        if not caches:
            return [[*first, *rest]]
        shares = len(self._state_ids) >= facts.block_size
        return list(filter(None, [first[:1], first[1:], rest] if shares else [first, rest]))

    async def _send(self, wave: list[tuple[int, _Row]]) -> None:
        """Asks an engine about all prompts of a wave, and notes what it tells."""
        state, terms, times = self._state, self._terms, self._state.times
        options = terms.add_options(self._admission, begun=times.steps > 0)
        options["group"] = self._group
        options["most_guesses"] = 0
        if self._read.state.media:
            options["media"] = as_media(self._read.state.media, state.media_items)
        prompts = [([*self._state_ids, *row.tail], row.branch.sampling) for _, row in wave]
        answers = await self._frontend.engine_requests.tell(
            prompts, self._admission, replica=terms.replica, **options
        )
        times.add_round([answer for answer in answers if isinstance(answer, Tokens)])
        for (question, row), answer in zip(wave, answers, strict=True):
            if isinstance(answer, Failed):
                self._fail(question, answer)
            else:
                row.told = answer.logprobs[0].told
        if not times.cached_tokens and isinstance(answers[0], Tokens):
            self._cached = times.cached_tokens = min(answers[0].cached, len(self._state_ids))

    def _fail(self, question: int, failed: Failed) -> None:
        """Notes that a question has no answer. Raises the error if it is not the question's fault alone, or
        if none is left."""
        self._failed[question] = failed
        if failed.code not in (400, 500) or len(self._failed) == len(
            {one.question for one in self._read.asked}
        ):
            raise from_engine(failed, self._frontend.admissions.seconds_to_wait())

    def _found(self, index: int) -> Found:
        if (reason := self._read.refusals.get(index)) is not None:
            return Found([], reason)
        if (failed := self._failed.get(index)) is not None:
            return Found([], failed.message)
        temperature = self._frontend.facts.temperatures.get(self._read.questions[index].kind, 1.0)
        orders = [
            probabilities(labels.likelihoods([row.told for row in rows]))
            for asked, labels, rows in zip(self._read.asked, self._labels, self._rows, strict=True)
            if asked.question == index
        ]
        return Found(tempered(averaged(orders), temperature))
