"""Asks that are answered with text, and their answers while they come: parts, counts, and how they ended."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from copy import copy
from typing import Any, Generic, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from engine_core.client.in_flight import AddOptions
from engine_core.protocol import Standing
from server.access.admission import Admission
from server.access.request_state import Attributes
from server.errors import BadRequest
from server.frontend.asks.answer_plan import ChoiceReader, TokenByToken, plan_answer, plan_completions
from server.frontend.asks.parts import (
    ConversationHead,
    Counts,
    End,
    Head,
    Part,
    Terms,
    head_fields,
    media_tokens,
)
from server.frontend.frontend import Frontend
from server.frontend.merged_generators import merged
from server.frontend.text_output import Delta
from server.grammars.response_format import AskedForm
from server.media.prompt import as_media
from server.options.server_flags import GuessReportLevel
from server.output_parsing.unread_text import CallEnded, Text
from server.reading.prompts import Conversation, Prompt
from server.requests.beam_search import BeamParams
from server.requests.sampling_params import SamplingParams
from server.requests.speculation_reports import AnswerMetrics, report_guesses
from server.requests.timing import RawHeaders
from server.schemas.chat import ChatRequest
from server.schemas.logprobs import TokenNames
from worker.protocol import Sampling

_log = logging.getLogger(__name__)

H_co = TypeVar("H_co", bound=Head, covariant=True)


class Shown(msgspec.Struct, frozen=True):
    """What an answer shows beside its text."""

    usage: bool = False
    usage_always: bool = False
    names_as_ids: bool | None = None
    """Whether tokens are written as `token_id:123`; None leaves it to the operator."""


class Complete(msgspec.Struct, frozen=True, kw_only=True):
    """Continue prompts."""

    terms: Terms
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    form: AskedForm | None = None
    """What the answers are held to, beside the parameters."""
    thinking_budget: int | None = None
    interval: int = 1
    """The tokens of a part of the answer at least, unless it is the first or the last of its choice."""
    beams: BeamParams | None = None
    shown: Shown = Shown()
    counts_output: bool = True

    async def open(self, frontend: Frontend) -> Answer[Head]:
        """Raises the error that refuses the request. It is sent when the first part is asked for."""
        admission = self._admit(frontend)
        owner = admission.caller.owner
        plan, bounds = await plan_completions(
            frontend, self.form, self.thinking_budget, self.sampling, self.prompts, owner
        )
        answer: Answer[Head] = Answer(frontend, self, admission, bounds, plan.warnings, self.sampling)
        answer.head = Head(**answer.head_fields(self))
        return answer

    def _admit(self, frontend: Frontend) -> Admission:
        """Lets in the request, before anything is computed for it."""
        limits, prompts, n = frontend.facts.limits, len(self.prompts), self.sampling.n
        n = min(max(n, 1), limits.n)  # a wrong one is refused where parameters are checked
        if prompts * n > limits.answers:
            raise BadRequest(
                f"prompt and n may ask for at most {limits.answers} answers together, got {prompts} x {n}.",
                "n",
            )
        return self.terms.state.admit(frontend.admissions, prompts * n)


class Converse(Complete, frozen=True, kw_only=True):
    """Write the next message of a conversation. `prompts` holds the conversation's own, and those of others
    that are answered with it in the same way."""

    chat: ChatRequest
    """What is asked, in the words of chat completions."""
    conversation: Conversation
    token_by_token: bool = False
    """Whether a part of the answer has the text of one token at most, however many came at once."""

    async def open(self, frontend: Frontend) -> Answer[ConversationHead]:
        admission = self._admit(frontend)
        owner, conversation = admission.caller.owner, self.conversation
        plan = await plan_answer(frontend, frontend.config, self.chat, conversation, owner)
        sampling, format = copy(self.sampling), plan.format
        if format is not None:
            sampling.shown_as = dict(format.marks)
        elif sampling.logprobs is not None:
            sampling.shown_as = {}  # who writes logprobs has to know the characters of each token
        if conversation.warnings:
            _log.info("request %s: %s", self.terms.id, "; ".join(conversation.warnings))
        warnings = (*conversation.warnings, *plan.warnings)
        bounds, choices = [plan.bounds for _ in self.prompts], range(sampling.n)
        answer: Answer[ConversationHead] = Answer(frontend, self, admission, bounds, warnings, sampling)
        answer.readers = [ChoiceReader(conversation, self.chat, plan) for _ in self.prompts for _ in choices]
        answer.head = ConversationHead(
            **answer.head_fields(self),
            conversation=conversation,
            dialect=format.dialect.name if format and format.dialect else "",
            is_read=format is not None,
            counts_reasoning=bool(format and format.thinking),
            names_call=self.chat.tool_choice is not None and self.chat.choice.is_named,
        )
        return answer


class Answer(Generic[H_co]):
    """The answer to an ask while it comes."""

    head: H_co

    def __init__(
        self,
        frontend: Frontend,
        asked: Complete,
        admission: Admission,
        bounds: Sequence[AddOptions],
        warnings: Sequence[str],
        sampling: SamplingParams,
    ) -> None:
        """`bounds` say for each prompt what its answers are held to."""
        terms, config = asked.terms, frontend.config
        self.warnings, self.readers = warnings, list[ChoiceReader]()
        """What of the request has no effect; and what reads each choice, if it belongs to a conversation."""
        self.frontend, self._asked, self._sampling, self._admission = frontend, asked, sampling, admission
        self._state, self._times = terms.state, terms.state.times
        self._id = terms.take_id(admission)
        self._options, self._bounds = terms.add_options(admission), bounds
        self._guess_level: GuessReportLevel = config.reports.per_request_spec_decode_metrics
        self._metrics: AnswerMetrics | UnsetType = UNSET
        prompts = asked.prompts
        if self._guess_level != "none" and len(prompts) == sampling.n == 1:
            self._options["reports_guesses"] = True
        if len(prompts) > 1:
            self._options["group"] = frontend.new_group()
        # Checks the sampling parameters, so n is valid from here on.
        self._streams = self._generate_all()
        self._running = len(prompts) * sampling.n
        """Number of choices whose last part is still to come."""
        self._output, self._cached = [0] * self._running, [0] * len(prompts)
        has_media = bool(self._state.media_items)
        self._media = [media_tokens(prompt) if has_media else 0 for prompt in prompts]
        self._state.work = self

    def head_fields(self, asked: Complete) -> dict[str, Any]:
        """The fields of a head that all answers have."""
        frontend, config, shown = self.frontend, self.frontend.config, asked.shown
        as_ids = config.return_tokens_as_token_ids if shown.names_as_ids is None else shown.names_as_ids
        forced = config.enable_force_include_usage
        return {
            **head_fields(frontend, asked.terms, self._id),
            "fingerprint": frontend.facts.ready.worker.fingerprint or None,
            "names": TokenNames(
                frontend.tokenizer, as_ids=as_ids, hides_special=self._sampling.skip_special_tokens
            ),
            "prompts": asked.prompts,
            "n": self._sampling.n,
            "sends_usage": forced or shown.usage,
            "sends_usage_always": forced or shown.usage_always,
        }

    async def parts(self) -> AsyncGenerator[Part]:
        """Yields the parts of all choices as they come. To be called once; closing it ends the request."""
        self._times.submit()
        streams, several = self._streams, len(self._streams) > 1
        reads = bool(self.readers) and self._asked.counts_output
        by_token = isinstance(self._asked, Converse) and self._asked.token_by_token
        cut = TokenByToken() if by_token else None
        async with aclosing(cast("Any", merged(streams) if several else streams[0])) as deltas:
            async for one in deltas:
                prompt, delta = one if several else (0, one)
                part = self._count(prompt, delta)
                if cut is None or part.is_notice:
                    yield self._read(part, delta.widths) if reads and not part.is_notice else part
                    continue
                end, part.end = part.end, None
                for piece, widths in cut.pieces(delta):
                    part = replace(part, delta=piece)
                    if piece.finish_reason is not None:
                        part.end = end
                    yield self._read(part, widths)

    async def whole(self) -> list[Part]:
        """All parts, once they have come. Of the calls it has those that are complete."""
        for each in self.readers:
            if each.reader is not None:
                each.reader.hold_calls()
        async with aclosing(self.parts()) as parts:
            return [part async for part in parts if not part.is_notice]

    def _count(self, prompt: int, delta: Delta) -> Part:
        """Counts the delta's tokens, and notes its times."""
        choice, times = prompt * self._sampling.n + delta.index, self._times
        if self._asked.counts_output:
            self._output[choice] += len(delta.token_ids)
        if delta.index == 0 and delta.cached_tokens:
            self._cached[prompt] += delta.cached_tokens
            times.cached_tokens += delta.cached_tokens
        if delta.expected is not None and times.expected is None:
            times.expected = delta.expected
        given = self._lengths[prompt], self._cached[prompt], self._output[choice], None, self._media[prompt]
        counts = Counts(*given)
        if delta.finish_reason is None:
            is_notice = delta.expected is not None and not delta.token_ids
            return Part(choice, delta, counts, is_notice=is_notice)
        self._running -= 1
        if delta.timing is not None:
            times.add(delta.timing)
        if delta.guesses is not None:
            self._metrics = report_guesses(delta.guesses, self._guess_level)
        end = None if self._running else End(self.counts, times, self._metrics)
        return Part(choice, delta, counts, end=end)

    def _read(self, part: Part, widths: Sequence[int]) -> Part:
        """The same part of a conversation's answer with what it says. `widths` are the characters of tokens
        that the reader of its choice has not heard of."""
        reader, delta = self.readers[part.choice], part.delta
        if (own := reader.reader) is None:
            part.said = (Text(delta.text),) if delta.text else ()
            return part
        said = own.push(delta.text, widths)
        if delta.finish_reason is not None:
            said += own.finish()
            if own.repairs:
                self._tell_repairs(own.repairs)
        for one in said:
            if type(one) is CallEnded:
                reader.has_calls = True
        part.said, part.has_calls = said, reader.has_calls
        if reader.counts_reasoning:
            part.counts = replace(part.counts, reasoning=own.reasoning_tokens)
            if part.end is not None:
                part.end = replace(part.end, counts=self.counts)
        return part

    def _tell_repairs(self, repairs: Sequence[str]) -> None:
        dialect = self.head.dialect if isinstance(self.head, ConversationHead) else ""
        self.frontend.metrics.repaired_calls(dialect).inc(len(repairs))
        for wrong in repairs:
            _log.warning("%s: a malformed tool call was repaired (%s): %s", self._id, dialect, wrong)

    def _generate_all(self) -> list[AsyncGenerator[Delta]]:
        prompts, sampling = self._asked.prompts, self._sampling
        self._lengths = lengths = [prompt.length for prompt in prompts]
        self._admission.check_tokens(sampling.n * sum(lengths))
        self._admission.read(sum(lengths))
        if len(prompts) == 1 and sampling.n == 1:
            return [self._generate(0)]
        resolved = sampling.resolve_all(self.frontend.facts, self.frontend.tokenizer, lengths)
        return [self._generate(number, params) for number, params in enumerate(resolved)]

    def _generate(self, number: int, params: list[Sampling] | None = None) -> AsyncGenerator[Delta]:
        """The answers to the prompt of this number."""
        options: AddOptions = {**self._options, **self._bounds[number]}
        prompt = self._asked.prompts[number]
        if prompt.rows or prompt.media:
            items = as_media(prompt.media, self._state.media_items) if prompt.media else ()
            media = (*(each.as_media() for each in prompt.rows), *items)
            options["media"] = tuple(sorted(media, key=lambda one: one.at))
        return self.frontend.engine_requests.generate(
            prompt.ids,
            self._sampling,
            self._admission,
            params=params,
            interval=self._asked.interval,
            replica=self._asked.terms.replica,
            beams=self._asked.beams,
            **options,
        )

    @property
    def counts(self) -> Counts:
        """The tokens of all prompts and choices so far."""
        reasoning = None
        for each in self.readers:
            if each.counts_reasoning and each.reader is not None:
                reasoning = (reasoning or 0) + each.reader.reasoning_tokens
        return Counts(sum(self._lengths), sum(self._cached), sum(self._output), reasoning, sum(self._media))

    def set_paused(self, paused: bool) -> None:
        """Has nothing more computed while the answer is not read, or has it go on."""
        self.frontend.set_paused(self._admission, paused)

    @property
    def expected_header(self) -> Callable[[], RawHeaders]:
        """Returns the header that tells when the first token is expected."""
        return self._times.expected_header

    async def standing(self) -> Standing | None:
        """How far an answer has come of which nothing comes; None if nobody knows."""
        return await self._admission.standing()

    def describe(self) -> Attributes:
        """What a trace tells of the request."""
        counts, asked = self.counts, self._sampling
        return {
            "gen_ai.request.id": self._id,
            "gen_ai.response.model": self.head.model,
            "gen_ai.request.n": asked.n,
            "gen_ai.request.max_tokens": asked.max_tokens,
            "gen_ai.request.temperature": asked.temperature,
            "gen_ai.request.top_p": asked.top_p,
            "gen_ai.usage.num_sequences": len(self._output),
            "gen_ai.usage.prompt_tokens": counts.prompt,
            "gen_ai.usage.completion_tokens": counts.output,
        }
