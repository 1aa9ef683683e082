"""Calls of `LLM`: many requests, all checked before any runs, whose outputs keep the order of the prompts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from itertools import count
from typing import Any, TypeVar

from msgspec.structs import replace

from server.errors import ApiError, BadRequest
from server.frontend.frontend import Frontend
from server.media.inline_files import InlineFiles
from server.offline.lora_requests import Adapters, LoRARequest, spread
from server.offline.program_requests import (
    PROMPTS_AT_ONCE,
    Answers,
    Encoded,
    PreparedItems,
    adapted,
    all_of,
    encode,
    encode_chat,
    open_answers,
    open_search,
    outputs_of,
    pool,
    read_items,
    read_prepared,
)
from server.offline.prompt_forms import Message, PoolingOptions, Prompt, for_each, priorities, read_sides
from server.offline.request_outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from server.reading.pooled_conversations import read_media_pairs
from server.reading.prompts import ReadingContext
from server.requests.beam_search import BeamSearchParams
from server.requests.pooling import PoolingParams, Truncation
from server.requests.sampling_params import RequestOutputKind, SamplingParams
from server.requests.scoring import Compared, Pairs, ScoreOptions, compare_all, read_pairs
from server.terminal.progress_bar import ProgressDisplay
from server.text.chat_template import AskedFormat
from server.text.tokenizer import LONG_TEXT

R = TypeVar("R")
Pooled = PoolingRequestOutput[PoolingOutput]


class Progress:
    """Shows how many requests of a call have ended, if a terminal is there to show it."""

    def __init__(self, stage: str, total: int, *, shows: bool) -> None:
        self._stage, self._total, self._done = stage, total, 0
        self._display = ProgressDisplay() if shows and total and sys.stderr.isatty() else None

    def tell(self, ended: int = 1) -> None:
        """Note that so many more have ended."""
        self._done += ended
        if self._display is not None:
            self._display.show(self._stage, self._done / self._total)

    async def during(self, work: Coroutine[Any, Any, R]) -> R:
        """Shows it until this ends, and returns what that returns."""
        self.tell(0)
        try:
            return await work
        finally:
            if self._display is not None:
                self._display.done()


class Batches:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend, self._numbers = frontend, count()

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of a call that gives none; fields that are None are the model's own defaults."""
        decides = "max_tokens" in self._frontend.facts.defaults
        return SamplingParams(max_tokens=None) if decides else SamplingParams()

    def _names(self, number: int) -> list[str]:
        """The next ids of requests."""
        return [str(next(self._numbers)) for _ in range(number)]

    async def frontends(self, asked: Adapters, number: int) -> list[Frontend]:
        """The frontend for each of so many requests, by the adapter that it names. Raises BadRequest."""
        by_name: dict[str, LoRARequest] = {}
        adapters = spread(asked, number)
        for one in adapters:
            if one is not None and by_name.setdefault(one.name, one).path != one.path:
                raise BadRequest(f"lora_request: two adapters have the name {one.name}", "lora_request")
        found = {name: await adapted(self._frontend, one) for name, one in by_name.items()}
        return [self._frontend if one is None else found[one.name] for one in adapters]

    async def generate(
        self,
        prompts: Sequence[Prompt | Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        adapters: Adapters,
        priority: Sequence[int] | None,
        shows: bool,
        keep: int | None = None,
        content_format: AskedFormat | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """The answers to prompts, or to conversations, which `template` says how to write. `keep` is for
        truncate_prompt_tokens, if parameters do not say it."""
        number = len(prompts)
        params, first = for_each(sampling, self.default_params, number), priorities(priority, number)
        frontends, turns = await self.frontends(adapters, number), asyncio.Semaphore(PROMPTS_AT_ONCE)
        if keep is not None:
            params = [
                replace(one, truncate_prompt_tokens=keep) if one.truncate_prompt_tokens is None else one
                for one in params
            ]

        async def read(index: int) -> Encoded:
            prompt, own, frontend = prompts[index], params[index], frontends[index]
            if isinstance(prompt, Prompt):
                return await encode(frontend, prompt, own)
            return await encode_chat(frontend, prompt, own, content_format, template)

        async def read_slowly(index: int) -> Encoded:
            async with turns:
                return await read(index)

        slow = [index for index, prompt in enumerate(prompts) if _is_slow(prompt)]
        found = dict(zip(slow, await all_of([read_slowly(index) for index in slow]), strict=True))
        encoded = [found[index] if index in found else await read(index) for index in range(number)]
        kind = RequestOutputKind.FINAL_ONLY
        answers = [
            await open_answers(frontend, one, own, name, kind=kind, priority=rank)
            for frontend, one, own, name, rank in zip(
                *(frontends, encoded, params, self._names(number), first), strict=True
            )
        ]
        progress = Progress("generate", number, shows=shows)
        return await progress.during(all_of([one.last(progress.tell) for one in answers]))

    async def beam_search(
        self,
        prompts: Sequence[Prompt],
        search: BeamSearchParams,
        adapters: Adapters,
        at_once: int,
        shows: bool,
    ) -> list[BeamSearchOutput]:
        """The likeliest answers to each of these, which are searched for `at_once` of them at a time."""
        frontends, params = await self.frontends(adapters, len(prompts)), search.sampling()
        encoded = [await encode(*each, params) for each in zip(frontends, prompts, strict=True)]
        asked = zip(frontends, encoded, self._names(len(prompts)), strict=True)
        answers = [await open_search(frontend, one, search, name) for frontend, one, name in asked]
        turns, progress = asyncio.Semaphore(at_once), Progress("generate", len(prompts), shows=shows)

        async def find(answers: Answers, prompt: Encoded) -> BeamSearchOutput:
            async with turns:
                output = await answers.last(progress.tell)
            return self._sequences(output, list(prompt.ids), search)

        return await progress.during(all_of(list(map(find, answers, encoded))))

    def _sequences(
        self, output: RequestOutput, prompt: list[int], search: BeamSearchParams
    ) -> BeamSearchOutput:
        def sequence(found: CompletionOutput) -> BeamSearchSequence:
            tokens, stops = [*prompt, *found.token_ids], found.finish_reason == "stop"
            written = tokens[:-1] if stops and not search.include_stop_str_in_output else tokens
            return BeamSearchSequence(
                tokens=tokens,
                logprobs=found.logprobs or [],
                cum_logprob=found.cumulative_logprob or 0.0,
                text=self._frontend.tokenizer.decode(written, False),
                finish_reason=found.finish_reason,
                stop_reason=tokens[-1] if stops else None,
            )

        found = [sequence(each) for each in output.outputs if each.token_ids]
        return BeamSearchOutput(found, output.request_id)

    async def pool(
        self, prompts: Sequence[Prompt], task: str | None, options: PoolingOptions
    ) -> list[Pooled]:
        """What the engine makes of texts; `task` wins over that of their parameters."""
        params = for_each(options.get("pooling_params"), PoolingParams(), len(prompts))
        priority = priorities(options.get("priority"), len(prompts))
        frontends = await self.frontends(options.get("lora_request"), len(prompts))
        groups: dict[tuple[Frontend, str, int], list[int]] = {}
        for index, (frontend, prompt, first) in enumerate(zip(frontends, prompts, priority, strict=True)):
            groups.setdefault((frontend, prompt.salt, first), []).append(index)
        read = [
            await read_items(frontend, [prompts[at] for at in of], [params[at] for at in of], task, options)
            for (frontend, _, _), of in groups.items()
        ]
        names = self._names(len(prompts))
        progress = Progress("pool", len(prompts), shows=options.get("use_tqdm", True))
        works = [
            pool(frontend, *own, [names[at] for at in of], tell=progress.tell, salt=salt, priority=first)
            for own, ((frontend, salt, first), of) in zip(read, groups.items(), strict=True)
        ]
        pooled = await progress.during(all_of(works))
        places = [at for of in groups.values() for at in of]
        found = dict(zip(places, (output for outputs in pooled for output in outputs), strict=True))
        return [found[index] for index in range(len(prompts))]

    async def score(
        self,
        sides: tuple[object, object],
        params: PoolingParams,
        keep: int | None,
        instruction: str | None,
        adapters: Adapters,
        shows: bool,
    ) -> list[ScoringRequestOutput]:
        """The scores of texts that are compared, all by one adapter. `keep` is in place of the parameters'
        truncate_prompt_tokens."""
        files = InlineFiles()
        pairs = Pairs(*[await asyncio.to_thread(read_sides, side, files) for side in sides])
        number = max(len(pairs.queries), len(pairs.documents))
        frontends = await self.frontends(adapters, number) or [self._frontend]
        if len(set(frontends)) > 1:
            raise BadRequest("texts are compared by one adapter: give one LoRARequest", "lora_request")
        frontend, facts = frontends[0], frontends[0].facts
        options = ScoreOptions(
            use_activation=params.activates(),
            truncation=Truncation.from_request(
                params.truncate_prompt_tokens if keep is None else keep, None, facts
            ),
            instruction=instruction,
            names=("data_1", "data_2"),
        )

        def read(context: ReadingContext) -> Compared:
            if pairs.has_media:
                return read_media_pairs(pairs, options, context, "")
            return read_pairs(pairs, options, facts, context.tokenizer)

        compared, media = await read_prepared(frontend, read, files)
        return await self._compare(frontend, compared, media, shows)

    async def _compare(
        self, frontend: Frontend, compared: Compared, media: PreparedItems, shows: bool
    ) -> list[ScoringRequestOutput]:
        scorer = compare_all(compared, frontend.facts)
        items, scores, outputs = next(scorer), list[float](), list[Pooled]()
        while not scores:
            progress, started = Progress("pool", len(items), shows=shows), RequestMetrics()
            work = frontend.pool(items, media_items=media, tell=progress.tell)
            try:
                answers = await progress.during(work)
                outputs = outputs_of(self._names(len(items)), items, answers, started)
                items = scorer.send([answer.vectors for answer in answers])
            except ApiError as error:
                items = scorer.throw(error)  # it may know a way out
            except StopIteration as end:
                scores = end.value
        names = self._names(len(scores))
        results = [
            ScoringRequestOutput(*each) for each in zip(names, map(ScoringOutput, scores), strict=True)
        ]
        if frontend.facts.score_type == "cross-encoder":  # which reads the two texts of a score as one
            for result, pooled in zip(results, outputs, strict=True):
                result.prompt_token_ids, result.metrics = pooled.prompt_token_ids, pooled.metrics
                result.num_cached_tokens = pooled.num_cached_tokens
        return results


def _is_slow(prompt: Prompt | Sequence[Message]) -> bool:
    """Whether others need not wait until it is read: it may have media, or is long."""
    if isinstance(prompt, Prompt):
        return bool(prompt.media) or len(prompt.text or "") >= LONG_TEXT
    return any(isinstance(message.get("content"), list) for message in prompt)
