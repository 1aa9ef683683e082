"""Requests of programs: the server's readers read them, and its frontend runs them, as those of HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar, Unpack

import msgspec

from engine_core.client.in_flight import AddOptions
from engine_core.prompt_media import Media
from engine_core.protocol import Pooled
from server.errors import ApiError, BadRequest
from server.frontend.frontend import Frontend
from server.frontend.text_output import Delta
from server.helpers.messages import ReceivedError
from server.media.inline_files import InlineFiles
from server.media.media_cache import KeptItem as MediaItem
from server.media.media_parts import read_part
from server.media.prompt import MediaNeeded, Written, as_media
from server.media.prompt_embeds import check_rows, cut_rows, row_width
from server.model_facts import GENERATE, require_task
from server.offline.lora_requests import WITHOUT_LORA, LoRARequest
from server.offline.media_forms import as_array, as_part, with_files
from server.offline.output_builder import OutputBuilder, tokens_per_output
from server.offline.prompt_forms import Message, Prompt, ReadOptions, validated
from server.offline.request_outputs import PoolingOutput, PoolingRequestOutput, RequestMetrics, RequestOutput
from server.reading.placed_texts import PlacedText
from server.reading.pooled_conversations import item_with_media
from server.reading.prompts import Prompt as ReadPrompt
from server.reading.prompts import ReadingContext, prepare_prompt, write_chat
from server.requests.beam_rounds import BeamParams
from server.requests.beam_search import BeamSearchParams
from server.requests.pooling import PooledText, PoolingParams, TextReader, Truncation, find_prompt
from server.requests.sampling_params import RequestOutputKind, SamplingParams, kept_tokens
from server.schemas.chat import ChatRequest
from server.text.chat_template import AskedFormat
from server.text.control_tokens import without_cuts
from server.text.tokenizer import LONG_TEXT, TokenIds, unpack
from worker.protocol import Pooling, Vectors

R = TypeVar("R")

PreparedItems = Mapping[bytes, MediaItem]
"""The media of a request by their hashes."""
NO_ITEMS: PreparedItems = MappingProxyType({})

_NOTHING = Vectors(b"", (0,))
"""The vectors of a request that failed."""

PROMPTS_AT_ONCE = 4
"""The prompts of a call that are read at the same time, of those that are long or have media."""

_log = logging.getLogger(__name__)


@contextmanager
def as_refusals() -> Iterator[None]:
    """Raises what a helper process has found wrong with a request as the error that programs know."""
    try:
        yield
    except ReceivedError as error:
        if error.status != BadRequest.status:
            raise
        raise BadRequest(error.message, error.param) from None


async def all_of(works: Sequence[Coroutine[Any, Any, R]]) -> list[R]:
    """What these return, in order. The first error ends all of them, and is raised once they have ended."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def adapted(frontend: Frontend, asked: LoRARequest | None) -> Frontend:
    """The frontend for a request, whose adapter is loaded if it names one. Raises BadRequest."""
    if asked is None:
        return frontend
    if not isinstance(asked, LoRARequest):
        raise TypeError(f"lora_request is a LoRARequest, not {type(asked).__name__}")
    served = frontend.adapters
    if served is None:
        raise BadRequest(WITHOUT_LORA.format(asked.name), "lora_request")
    return served.adapted(await served.use(asked.name, asked.path))


# Prompts to answer.


class Encoded(msgspec.Struct, frozen=True):
    """A prompt as an engine gets it."""

    text: str | None
    ids: TokenIds
    shown_ids: list[int]
    """The ids that outputs show: none, if the prompt has embeddings in place of tokens."""
    media: tuple[Media, ...] = ()
    salt: str = ""


async def encode(frontend: Frontend, prompt: Prompt, params: SamplingParams) -> Encoded:
    """Encodes a prompt that is to be answered. Raises BadRequest."""
    facts, text, files = frontend.facts, prompt.text, InlineFiles()
    require_task(GENERATE, facts.tasks)
    keep = kept_tokens(params.truncate_prompt_tokens, params.max_tokens, facts)
    if prompt.rows is not None:
        read, items = _read_rows(prompt, frontend, params), NO_ITEMS
    elif prompt.media:
        parts = await asyncio.to_thread(_parts, prompt, files)
        placed = PlacedText(text or "", parts, prompt.salt, prompt.settings)
        read, items = await read_prepared(frontend, lambda known: placed.prepare(known, keep), files)
    else:
        source = Written(text or "") if prompt.ids is None else prompt.ids
        is_long = prompt.ids is None and len(text or "") >= LONG_TEXT
        read, items = await read_prepared(
            frontend, lambda known: prepare_prompt(source, known, keep), files, is_long
        )
    return _encoded(read, text, items, prompt.salt)


async def encode_chat(
    frontend: Frontend,
    messages: Sequence[Message],
    params: SamplingParams,
    content_format: AskedFormat | None,
    options: Mapping[str, Any],
) -> Encoded:
    """Encodes a conversation. `options` are fields of a request for a chat. Raises BadRequest."""
    require_task(GENERATE, frontend.facts.tasks)
    keep, files = kept_tokens(params.truncate_prompt_tokens, params.max_tokens, frontend.facts), InlineFiles()
    asked = {"messages": [with_files(message, files) for message in messages], **options}
    body = validated(ChatRequest, {name: value for name, value in asked.items() if value is not None})

    def read(context: ReadingContext) -> tuple[str, ReadPrompt]:
        known = replace(
            context, options=msgspec.structs.replace(context.options, content_format=content_format)
        )
        written = write_chat(body, known)
        return written.plain_text, prepare_prompt(written, known, keep, special=body.add_special_tokens)

    (text, prompt), items = await read_prepared(frontend, read, files)
    return _encoded(prompt, text, items, body.cache_salt or "")


async def read_prepared(
    frontend: Frontend, read: Callable[[ReadingContext], R], files: InlineFiles, in_thread: bool = False
) -> tuple[R, PreparedItems]:
    """What `read` returns, and the media that were prepared for it, whose files are in `files`."""
    context = frontend.reading_context
    try:
        return (await asyncio.to_thread(read, context) if in_thread else read(context)), NO_ITEMS
    except MediaNeeded as needed:
        if frontend.media is None:
            raise
        with as_refusals():
            items = await frontend.media.prepare(needed, files, "")
        context = replace(context, media=frontend.media.lay(items))
        return await asyncio.to_thread(read, context), {item.hash: item for item in items.values()}


def _encoded(read: ReadPrompt, text: str | None, items: PreparedItems, salt: str) -> Encoded:
    media = [*(each.as_media() for each in read.rows), *as_media(read.media, items)]
    media.sort(key=lambda one: one.at)
    return Encoded(text and without_cuts(text), read.ids, read.tokens, tuple(media), salt)


def _read_rows(prompt: Prompt, frontend: Frontend, params: SamplingParams) -> ReadPrompt:
    rows = check_rows(as_array(prompt.rows), row_width(frontend.facts))
    rows = rows[len(rows) - len(params.cut_prompt([0] * len(rows), frontend.facts)) :]
    return ReadPrompt([0] * len(rows), rows=cut_rows(rows))


def _parts(prompt: Prompt, files: InlineFiles) -> list[dict[str, str]]:
    return [read_part(as_part(kind, given, files)) for kind, given in prompt.media]


@dataclass
class Answers:
    """The answers to one prompt, which is sent when the first output is asked for."""

    builder: OutputBuilder
    deltas: AsyncGenerator[Delta, None]

    async def take(self) -> AsyncGenerator[None, None]:
        """Takes what comes, piece by piece. Closing the generator ends the request."""
        async with aclosing(self.deltas):
            async for delta in self.deltas:
                if not delta.is_notice:
                    self.builder.push(delta)
                    yield

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs as they come. Closing the generator ends the request."""
        async with aclosing(self.take()) as pieces:
            async for _ in pieces:
                if (output := self.builder.output()) is not None:
                    yield output

    async def last(self, tell: Callable[[], None]) -> RequestOutput:
        """The whole answers, of which `tell` hears."""
        async with aclosing(self.deltas):
            async for delta in self.deltas:
                if not delta.is_notice:
                    self.builder.push(delta)
        tell()
        output = self.builder.output()
        assert output is not None, "answers have ended, and say nothing"
        return output


async def open_answers(
    frontend: Frontend,
    encoded: Encoded,
    params: SamplingParams,
    name: str,
    *,
    kind: RequestOutputKind | None = None,
    replica: int | None = None,
    beams: BeamParams | None = None,
    **options: Unpack[AddOptions],
) -> Answers:
    """Checks a request. `kind` is in place of that of the parameters. Raises ApiError."""
    if (asked := params.asked_form()) is not None:
        with as_refusals():
            grammar = await frontend.grammars.check(asked)
        if grammar.ignored:
            _log.warning("%s: not enforced: %s", asked.field, ", ".join(grammar.ignored))
        options["grammar"] = grammar.for_engine()
    options["salt"], options["media"] = encoded.salt, encoded.media
    interval = tokens_per_output(params, frontend.config.stream_interval, kind)
    deltas = frontend.generate(
        encoded.ids, params, interval=interval, request_id=name, replica=replica, beams=beams, **options
    )
    if beams is not None:
        params = msgspec.structs.replace(params, logprobs=beams.logprobs)
    builder = OutputBuilder(name, encoded.text, encoded.shown_ids, params, frontend.tokenizer, kind)
    return Answers(builder, deltas)


async def open_search(frontend: Frontend, encoded: Encoded, search: BeamSearchParams, name: str) -> Answers:
    """Checks a beam search, whose only output has the answers, the best one first. Raises ApiError."""
    params, final = search.sampling(), RequestOutputKind.FINAL_ONLY
    params.n = max(1, search.beam_width)
    return await open_answers(frontend, encoded, params, name, kind=final, beams=search.beams())


# Texts to pool.


def reader_for(
    params: PoolingParams,
    context: ReadingContext,
    task: str | None = None,
    options: ReadOptions | None = None,
) -> tuple[TextReader, Pooling]:
    """What reads texts with these parameters, and how they are pooled; `task` wins over theirs. Raises
    BadRequest."""
    asked, facts = options or ReadOptions(), context.facts
    resolved = msgspec.structs.replace(params, task=task or params.task).resolve(facts)
    keep = asked.get("truncate_prompt_tokens")
    keep = params.truncate_prompt_tokens if keep is None else keep
    truncation = Truncation.from_request(keep, asked.get("truncation_side"), facts)
    instruction = find_prompt(asked.get("prompt_name"), facts, resolved.task)
    return TextReader(facts, context.tokenizer, truncation, instruction), resolved


async def read_items(
    frontend: Frontend,
    prompts: Sequence[Prompt],
    params: Sequence[PoolingParams],
    task: str | None = None,
    options: ReadOptions | None = None,
) -> tuple[list[PooledText], PreparedItems]:
    """Encodes texts to pool, together if their parameters are equal, and prepares their media. Raises
    BadRequest."""
    if any(prompt.rows is not None for prompt in prompts):
        raise BadRequest("prompt_embeds are answered, not pooled: give a text or its token ids.", "prompts")
    turns = asyncio.Semaphore(PROMPTS_AT_ONCE)

    async def read_pictured(index: int) -> tuple[PooledText, PreparedItems]:
        prompt, files = prompts[index], InlineFiles()

        def read(context: ReadingContext) -> PooledText:
            reader, resolved = reader_for(params[index], context, task, options)
            return item_with_media(placed.write(context), context, reader, resolved, index)

        async with turns:
            parts = await asyncio.to_thread(_parts, prompt, files)
            placed = PlacedText(prompt.text or "", parts, prompt.salt, prompt.settings)
            return await read_prepared(frontend, read, files)

    pictured = [index for index, prompt in enumerate(prompts) if prompt.media]
    found = dict(zip(pictured, await all_of([read_pictured(index) for index in pictured]), strict=True))
    texts = [index for index, prompt in enumerate(prompts) if not prompt.media]
    is_long = sum(len(prompts[index].text or "") for index in texts) >= LONG_TEXT
    given = [prompts[index] for index in texts], [params[index] for index in texts], task, options
    read = (
        await asyncio.to_thread(_read_texts, frontend, *given) if is_long else _read_texts(frontend, *given)
    )
    plain = iter(read)
    items = [found[index][0] if index in found else next(plain) for index in range(len(prompts))]
    media: dict[bytes, MediaItem] = {}
    for _, own in found.values():
        media.update(own)
    return items, media


def _read_texts(
    frontend: Frontend,
    prompts: Sequence[Prompt],
    params: Sequence[PoolingParams],
    task: str | None,
    options: ReadOptions | None,
) -> list[PooledText]:
    context, items = frontend.reading_context, list[PooledText]()
    if prompts and all(one is params[0] or one == params[0] for one in params):
        reader, resolved = reader_for(params[0], context, task, options)
        return reader.read([prompt.source for prompt in prompts], resolved)
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        reader, resolved = reader_for(one, context, task, options)
        items += reader.read([prompt.source], resolved, index)
    return items


async def pool(
    frontend: Frontend,
    items: Sequence[PooledText],
    prepared: PreparedItems,
    names: Sequence[str],
    *,
    replica: int | None = None,
    tell: Callable[[], None] = lambda: None,
    **options: Unpack[AddOptions],
) -> list[PoolingRequestOutput[PoolingOutput]]:
    """What the engine makes of texts, in order. Raises the first error."""
    started, name = RequestMetrics(), names[0] if len(names) == 1 else ""
    answers = await frontend.pool(
        items, request_id=name, replica=replica, media_items=prepared, tell=tell, **options
    )
    return outputs_of(names, items, answers, started)


def outputs_of(
    names: Sequence[str], items: Sequence[PooledText], answers: Sequence[Pooled], started: RequestMetrics
) -> list[PoolingRequestOutput[PoolingOutput]]:
    """The outputs of texts that were sent when `started` was made."""
    outputs: list[PoolingRequestOutput[PoolingOutput]] = []
    for name, item, answer in zip(names, items, answers, strict=True):
        metrics = RequestMetrics(arrival_time=started.arrival_time, queued_ts=started.queued_ts)
        metrics.add_pooled(answer)
        pooled = PoolingOutput.of(answer.vectors)
        output = PoolingRequestOutput(name, pooled, unpack(item.tokens), answer.cached, metrics=metrics)
        outputs.append(output)
    return outputs


def failed(name: str, prompt: Prompt, error: ApiError) -> PoolingRequestOutput[PoolingOutput]:
    """The output of a text that could not be pooled."""
    return PoolingRequestOutput(name, PoolingOutput.of(_NOTHING), prompt.ids or [], error=error)
