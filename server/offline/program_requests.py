"""Requests of programs: the server's readers read them, and its frontend runs them, as those of HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from numbers import Integral
from typing import Any, Protocol, TypeVar

import msgspec

from engine_core.protocol import Pooled
from server.access.request_state import RequestState
from server.errors import BadRequest
from server.frontend.asks.answers import Complete
from server.frontend.asks.parts import Terms
from server.frontend.asks.pooling import Pool
from server.frontend.frontend import Frontend
from server.media.inline_files import InlineFiles
from server.media.media_cache import KeptItem
from server.media.media_parts import read_part
from server.media.prompt import LaidMedia, Written
from server.media.prompt_embeds import check_rows, cut_rows, row_width
from server.model_facts import GENERATE, Facts, require_task
from server.offline.media_forms import as_array, as_part, with_files
from server.offline.output_builder import Answers, OutputBuilder, tokens_per_output
from server.offline.prompt_forms import Conversation, LoRARequest, Prompt, ReadOptions, validated
from server.offline.request_outputs import PoolingOutput, PoolingRequestOutput, RequestMetrics
from server.reading.placed_texts import PlacedText
from server.reading.pooled_conversations import item_with_media
from server.reading.prompts import Prompt as ReadPrompt
from server.reading.prompts import prepare_prompt, write_chat
from server.reading.reading_context import ReadingContext
from server.requests.beam_search import BeamSearchParams
from server.requests.pooling import PooledText, PoolingParams, ReadTexts, TextReader, Truncation, find_prompt
from server.requests.prompt_length import kept_tokens
from server.requests.sampling_params import RequestOutputKind, SamplingParams
from server.schemas.chat import ChatRequest
from server.text.control_tokens import without_cuts
from server.text.tokenizer import LONG_TEXT, unpack
from worker.protocol import Pooling

R = TypeVar("R")
PooledOutput = PoolingRequestOutput[PoolingOutput]

PROMPTS_AT_ONCE = 4
"""The prompts of a call that are read at the same time, of those that are long or have media."""
WITHOUT_LORA = "lora_request: {} cannot be used, for the model was loaded without enable_lora=True"

_log = logging.getLogger(__name__)


class PoolTexts(Protocol):
    def __call__(self, tell: Callable[[], None] = ...) -> Coroutine[Any, Any, list[PooledOutput]]:
        """What the engine makes of texts, in order. Raises the first error."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a program."""

    name: str
    """The id that its outputs have."""
    prompt: Prompt | Conversation
    params: SamplingParams | BeamSearchParams | PoolingParams
    priority: int = 0
    adapter: LoRARequest | None = None
    replica: int | None = None
    shown: str | None = None
    """The text that outputs show in place of the prompt's own."""

    def __post_init__(self) -> None:
        if not isinstance(self.adapter, LoRARequest | None):
            raise TypeError(f"lora_request is a LoRARequest, not {type(self.adapter).__name__}")
        if not isinstance(self.priority, Integral):
            raise TypeError(f"priority is a whole number, not {type(self.priority).__name__}")

    def terms(self, state: RequestState, id: str) -> Terms:
        """How the request is run, under this id."""
        replica, priority, salt = self.replica, int(self.priority), self.prompt.salt
        return Terms(state, id, replica=replica, priority=priority, salt=salt, shares_id=True)

    @property
    def sampling(self) -> SamplingParams:
        if isinstance(self.params, SamplingParams):
            return self.params
        if not isinstance(self.params, BeamSearchParams):
            raise TypeError(f"answers need SamplingParams, not {type(self.params).__name__}")
        params = self.params.sampling()
        params.n = max(1, self.params.beam_width)
        return params

    @property
    def pooling(self) -> PoolingParams:
        if not isinstance(self.params, PoolingParams):
            raise TypeError(f"texts to pool need PoolingParams, not {type(self.params).__name__}")
        return self.params

    @property
    def text(self) -> Prompt:
        """The prompt of a text to pool. Raises BadRequest."""
        if not isinstance(self.prompt, Prompt) or self.prompt.rows is not None:
            raise BadRequest(
                "prompt_embeds are answered, not pooled: give a text or its token ids.", "prompts"
            )
        return self.prompt


async def all_of(works: Sequence[Coroutine[Any, Any, R]], at_once: int | None = None) -> list[R]:
    """What these return, in order, of which so many run at a time. The first error ends all of them, and is
    raised once they have ended."""
    if len(works) < 2:
        return [await work for work in works]
    turns = asyncio.Semaphore(at_once or max(1, len(works)))

    async def in_turn(work: Coroutine[Any, Any, R]) -> R:
        async with turns:
            return await work

    tasks = [asyncio.create_task(work if at_once is None else in_turn(work)) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for work in works:
            work.close()  # of those whose turn has not come
        raise


async def adapted(frontend: Frontend, asked: Sequence[LoRARequest | None]) -> list[Frontend]:
    """The frontend for each of these, with the adapter that it names, which is loaded. Raises BadRequest."""
    by_name: dict[str, LoRARequest] = {}
    for one in asked:
        if one is not None and by_name.setdefault(one.name, one).path != one.path:
            raise BadRequest(f"lora_request: two adapters have the name {one.name}", "lora_request")
    found: dict[str, Frontend] = {}
    for one in by_name.values():
        if (served := frontend.adapters) is None:
            raise BadRequest(WITHOUT_LORA.format(one.name), "lora_request")
        found[one.name] = served.adapted(await served.use(one.name, one.path))
    return [frontend if one is None else found[one.name] for one in asked]


async def read_prepared(
    state: RequestState, read: Callable[[ReadingContext], R], in_thread: bool = False
) -> R:
    """What `read` returns, whose media have been prepared."""
    context: ReadingContext = state.frontend.reading_context

    async def read_with(media: LaidMedia) -> R:
        known = replace(context, media=media) if media else context
        return await asyncio.to_thread(read, known) if media or in_thread else read(known)

    return await state.read_with_media(read_with)


def _placed(prompt: Prompt, files: InlineFiles) -> PlacedText:
    """A text with media, whose files go to `files`."""
    parts = [read_part(as_part(kind, given, files)) for kind, given in prompt.media]
    return PlacedText(prompt.text or "", parts, prompt.salt, prompt.settings)


# Prompts to answer.


@cache
def _warn_once(warning: str) -> None:
    """Logs what may hold for many prompts alike."""
    _log.warning("%s", warning)


async def open_answers(
    frontend: Frontend, asked: Sequence[Asked], kind: RequestOutputKind | None = None
) -> list[Answers]:
    """Reads, checks and admits requests, which are sent when their outputs are asked for. The caller closes
    the answers. `kind` is in place of that of the parameters. Raises ApiError."""
    states = [RequestState(frontend=own) for own in await adapted(frontend, [one.adapter for one in asked])]
    slow = [at for at, one in enumerate(asked) if one.prompt.is_slow]  # others need not wait for these
    works = [_read(states[at], asked[at]) for at in slow]
    found = dict(zip(slow, await all_of(works, PROMPTS_AT_ONCE), strict=True)) if slow else {}
    for at, one in enumerate(asked):
        if at not in found:
            found[at] = await _read(states[at], one)
    try:
        return [await _open(states[at], *found[at], one, kind) for at, one in enumerate(asked)]
    except BaseException:
        for state in states:
            state.close()
        raise


async def _read(state: RequestState, asked: Asked) -> tuple[str | None, ReadPrompt]:
    """The text of a prompt, and what an engine gets of it."""
    prompt, params = asked.prompt, asked.sampling
    require_task(GENERATE, state.frontend.facts.tasks)
    keep = kept_tokens(params.truncate_prompt_tokens, params.max_tokens, state.frontend.facts)
    state.inline_files = files = InlineFiles()
    given = prompt, keep, files
    read = await asyncio.to_thread(_reader, *given) if prompt.is_slow else _reader(*given)
    text, found = await read_prepared(state, read, prompt.is_slow)
    return text and without_cuts(text), found


def _reader(
    prompt: Prompt | Conversation, keep: int | None, files: InlineFiles
) -> Callable[[ReadingContext], tuple[str | None, ReadPrompt]]:
    """What reads a prompt of which `keep` tokens are left, and its text."""
    if isinstance(prompt, Conversation):
        messages = [with_files(message, files) for message in prompt.messages]
        given = {name: value for name, value in prompt.template.items() if value not in (None, [])}
        body, form = validated(ChatRequest, {"messages": messages, **given}), prompt.content_format

        def read(known: ReadingContext) -> tuple[str, ReadPrompt]:
            own = replace(known, options=msgspec.structs.replace(known.options, content_format=form))
            written = write_chat(body, own)
            return written.plain_text, prepare_prompt(written, own, keep, special=body.add_special_tokens)

        return read
    if prompt.rows is not None:
        return lambda known: (None, _read_rows(prompt.rows, known.facts, keep))
    if prompt.media:
        placed = _placed(prompt, files)
        return lambda known: (prompt.text, placed.prepare(known, keep))
    source = Written(prompt.text or "") if prompt.ids is None else prompt.ids
    return lambda known: (prompt.text, prepare_prompt(source, known, keep))


def _read_rows(given: Any, facts: Facts, keep: int | None) -> ReadPrompt:
    rows = check_rows(as_array(given), row_width(facts))
    rows = rows if keep is None else rows[max(0, len(rows) - keep) :]
    return ReadPrompt([0] * len(rows), rows=cut_rows(rows))


async def _open(
    state: RequestState, text: str | None, prompt: ReadPrompt, asked: Asked, kind: RequestOutputKind | None
) -> Answers:
    params, beams, frontend = asked.sampling, None, state.frontend
    if isinstance(asked.params, BeamSearchParams):
        beams, kind = asked.params.beams(), RequestOutputKind.FINAL_ONLY
    answer = await frontend.ask(
        Complete(
            terms=asked.terms(state, asked.name),
            prompts=[prompt],
            sampling=params,
            form=params.asked_form(),
            interval=tokens_per_output(params, frontend.config.stream_interval, kind),
            beams=beams,
        )
    )
    for warning in answer.warnings:
        _warn_once(warning)
    if beams is not None:
        params = msgspec.structs.replace(params, logprobs=beams.logprobs)
    shown = text if asked.shown is None else asked.shown
    builder = OutputBuilder(asked.name, shown, prompt.tokens, params, frontend.tokenizer, kind)
    return Answers(builder, answer, state)


# Texts to pool.


async def open_texts(
    frontend: Frontend, asked: Sequence[Asked], task: str | None = None, options: ReadOptions = ReadOptions()
) -> PoolTexts:
    """Reads texts to pool; what it returns has the engine pool them, and tells of each that has ended. `task`
    wins over that of their parameters. Raises BadRequest."""
    groups: dict[tuple[Frontend, int | None, str, int], list[int]] = {}
    for at, own in enumerate(await adapted(frontend, [one.adapter for one in asked])):
        key = own, asked[at].replica, asked[at].text.salt, asked[at].priority
        groups.setdefault(key, []).append(at)
    read = [
        await _read_items(key[0], [asked[at] for at in places], task, options)
        for key, places in groups.items()
    ]

    async def run(tell: Callable[[], None] = lambda: None) -> list[PooledOutput]:
        async def pool(state: RequestState, items: list[PooledText], places: list[int]) -> list[PooledOutput]:
            names, started = [asked[at].name for at in places], RequestMetrics()
            terms = asked[places[0]].terms(state, names[0] if len(names) == 1 else "")
            with closing(state):
                answer = await state.frontend.ask(Pool(terms=terms, texts=ReadTexts(items), tell=tell))
            return outputs_of(names, items, answer.pooled, started)

        works = [pool(*each, places) for each, places in zip(read, groups.values(), strict=True)]
        found = dict(zip(chain(*groups.values()), chain(*await all_of(works)), strict=True))
        return [found[at] for at in range(len(asked))]

    return run


async def _read_items(
    frontend: Frontend, asked: Sequence[Asked], task: str | None, options: ReadOptions
) -> tuple[RequestState, list[PooledText]]:
    """The state of a request for texts, and their items. Those without media are encoded together if their
    parameters are equal."""
    state = RequestState(frontend=frontend)

    async def read_pictured(index: int) -> tuple[PooledText, Mapping[bytes, KeptItem]]:
        files = InlineFiles()
        own = RequestState(frontend=frontend, inline_files=files)
        placed = await asyncio.to_thread(_placed, asked[index].text, files)

        def read(context: ReadingContext) -> PooledText:
            reader, resolved = _reader_for(asked[index].pooling, context, task, options)
            return item_with_media(placed.write(context), context, reader, resolved, index)

        return await read_prepared(own, read), own.media_items

    def read_plain(context: ReadingContext) -> list[PooledText]:
        if all(asked[at].pooling == asked[plain[0]].pooling for at in plain[1:]):
            runs = [plain] if plain else []
        else:
            runs = [[at] for at in plain]
        items: list[PooledText] = []
        for run in runs:
            reader, resolved = _reader_for(asked[run[0]].pooling, context, task, options)
            items += reader.read([asked[at].text.source for at in run], resolved, run[0])
        return items

    pictured = [at for at, one in enumerate(asked) if one.text.media]
    plain = [at for at, one in enumerate(asked) if not one.text.media]
    works = [read_pictured(at) for at in pictured]
    found = dict(zip(pictured, await all_of(works, PROMPTS_AT_ONCE), strict=True))
    is_long = sum(len(asked[at].text.text or "") for at in plain) >= LONG_TEXT
    texts = await read_prepared(state, read_plain, is_long)
    found.update((at, (item, {})) for at, item in zip(plain, texts, strict=True))
    state.media_items = {hash: item for _, own in found.values() for hash, item in own.items()}
    return state, [found[at][0] for at in range(len(asked))]


def _reader_for(
    params: PoolingParams, context: ReadingContext, task: str | None, options: ReadOptions
) -> tuple[TextReader, Pooling]:
    """What reads texts with these parameters, and how they are pooled; `task` wins over theirs."""
    facts, keep = context.facts, options.get("truncate_prompt_tokens")
    resolved = msgspec.structs.replace(params, task=task or params.task).resolve(facts)
    keep = params.truncate_prompt_tokens if keep is None else keep
    truncation = Truncation.from_request(keep, options.get("truncation_side"), facts)
    instruction = find_prompt(options.get("prompt_name"), facts, resolved.task)
    return TextReader(facts, context.tokenizer, truncation, instruction), resolved


def outputs_of(
    names: Sequence[str], items: Sequence[PooledText], answers: Sequence[Pooled], started: RequestMetrics
) -> list[PooledOutput]:
    """The outputs of texts that were sent when `started` was made."""
    outputs: list[PooledOutput] = []
    for name, item, answer in zip(names, items, answers, strict=True):
        metrics = RequestMetrics(arrival_time=started.arrival_time, queued_ts=started.queued_ts)
        metrics.add_pooled(answer)
        pooled = PoolingOutput.of(answer.vectors)
        output = PoolingRequestOutput(name, pooled, unpack(item.tokens), answer.cached, metrics=metrics)
        outputs.append(output)
    return outputs
