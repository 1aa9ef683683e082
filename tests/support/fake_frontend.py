"""A Frontend without an engine: it "generates" what a test tells it to, through the server's own text output.

Tokens are bytes (0 to 255), so a test can read and write them; `EOS` ends a text. Logprobs are made up, but
always the same for the same token: -0.5 for the chosen one, then -1.5, -2.5 and so on for the ids above it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

import numpy as np
import tokenizers
from fake_client import FakeClient
from fake_helpers import FakeGrammars, FakeLongBodies
from model_facts import READY, changed
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from engine_core.client.in_flight import AddOptions
from engine_core.client.operator_commands import OperatorCommands
from engine_core.config import EngineConfig
from engine_core.engine_stats import GuessReport, Timing
from engine_core.prompt_media import Media
from engine_core.protocol import Failed, Pooled, Tokens
from server import errors
from server.access.admission import Admission, Admissions
from server.access.client_identity import Caller
from server.access.keyring import Access
from server.errors import ApiError, NotFound, Status
from server.frontend.asks import Ask
from server.frontend.text_output import Delta, TextOutput
from server.grammar_checks.grammar_job import AskedGrammar
from server.helpers.job_queue import Helpers
from server.media.media_cache import KeptItem as MediaItem
from server.media.media_reader import MediaReader
from server.media.prompt import as_media
from server.metrics.server_metrics import Metrics
from server.model_facts import Facts
from server.options.server_flags import ServerConfig
from server.reading.reading_context import ReadingContext, ReadingOptions
from server.requests.pooling import PooledText
from server.requests.sampling_params import SamplingParams
from server.text.chat_template import ChatTemplate
from server.text.detokenizer import byte_level_table
from server.text.tokenizer import TokenIds, Tokenizer, unpack
from worker.protocol import Sampling, TokenLogprobs, Vectors

R = TypeVar("R")

EOS, BOS, VOCAB_SIZE = 256, 257, 258
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }}{% endfor %}]{% endif %}"
    "{% if mood %}({{ mood }}){% endif %}"
    "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(*more: str, template: str = TEMPLATE, special_in_messages: bool = False) -> Tokenizer:
    """Every byte is a token. BOS is written before a text when special tokens are asked for. `more` are
    further special tokens, with the ids behind it."""
    specials = {"<eos>": EOS, "<bos>": BOS, **{name: VOCAB_SIZE + n for n, name in enumerate(more)}}
    model = tokenizers.Tokenizer(models.BPE({**byte_level_table(), **specials}, []))
    model.add_special_tokens([AddedToken(name, normalized=False) for name in specials])
    model.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    model.decoder = decoders.ByteLevel()
    model.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="$A $B", special_tokens=[("<bos>", BOS)]
    )
    chat = ChatTemplate({"default": template}, {"bos_token": "<bos>", "eos_token": "<eos>"})
    return Tokenizer(model, chat, special_in_messages=special_in_messages)


@dataclass
class FakeFrontend:
    reply: str = "Hello, world."
    """The text of every choice; EOS follows."""
    reply_ids: list[int] = field(default_factory=list)
    """The tokens of the reply, if they are not its bytes."""
    logprob_of: Callable[[int], float] | None = None
    """A function from a choice's number to the logprob of its tokens, in place of the usual ones."""
    per_step: int = 3
    """The number of tokens in one message of the engine."""
    cached: int = 0
    """The reason why not more was cached, which comes if a request asks for it."""
    error: ApiError | None = None
    """An error to raise when `tokens_before_error` tokens are out."""
    tokens_before_error: int = 0
    unready: ApiError | None = None
    adapters: None = None
    gate: asyncio.Event | None = None
    """An event that each message but the first waits for."""
    delay: float = 0.0
    """The seconds before the first message."""
    facts: Facts = field(
        default_factory=lambda: Facts(
            model_names=("org/tiny", "tiny"),
            root="org/tiny",
            created=1_700_000_000,
            ready=changed(READY, vocab_size=VOCAB_SIZE, max_num_seqs=256),
            max_model_len=128,
            eos_token_ids=(EOS,),
        )
    )
    config: ServerConfig = field(default_factory=lambda: ServerConfig(engine=EngineConfig(model="org/tiny")))
    checked: list[AskedGrammar] = field(default_factory=list)
    """What was asked of the form of answers."""
    read_elsewhere: list[str] = field(default_factory=list)
    """The name of the reading of each body that the helper was given."""
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    media: MediaReader | None = None
    transcriber: Any = None
    helpers: Helpers = field(default_factory=Helpers)
    folder: Path = Path("/nowhere")
    orders: OperatorCommands = field(default_factory=lambda: FakeClient().orders)
    metrics: Metrics = field(default_factory=lambda: Metrics("org/tiny"))
    status: Status = errors.READY
    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)
    timing: Timing | None = None
    """The times that the engine reports of each choice and of each text."""
    guesses: GuessReport | None = None
    """What the engine tells of guesses, if a request asks for it."""
    expected: float | None = None
    """The seconds in which it expects the first token, or the vectors."""
    waits: bool = False
    """Whether it says so before the first message."""
    asked: list[tuple[list[int], SamplingParams, dict[str, object]]] = field(default_factory=list)
    """The prompt, the sampling and the other arguments of each call of generate."""
    answer_of: Callable[[PooledText], Vectors] = lambda item: vectors([len(item.tokens), -1.5])
    """A function from an item to its vectors."""
    pool_errors: list[ApiError] = field(default_factory=list)
    """Errors, each of which is raised once instead of an answer."""
    pooled: list[tuple[list[PooledText], dict[str, object]]] = field(default_factory=list)
    """The items and the other arguments of each call of pool."""
    pooled_media: list[tuple[Media, ...]] = field(default_factory=list)
    """The media of each item of the last call of pool."""
    told: list[tuple[list[list[int]], dict[str, object]]] = field(default_factory=list)
    """The prompts and the other arguments of each call of tell."""
    told_of: Callable[[list[int], int], float] = lambda prompt, token: -1.0 - token / 256
    """A function from a prompt and a token to the log-probability of that behind it."""
    tell_errors: dict[int, Failed] = field(default_factory=dict)
    """The failures of prompts, by their numbers among all."""
    groups: int = 0
    flow: list[tuple[Admission, bool]] = field(default_factory=list)
    """What was said of clients that do not read, or do again."""
    admissions: Admissions = field(init=False)
    access: Access = field(init=False)
    running: int = 0
    most_running: int = 0
    finished: int = 0  # streams that ended by themselves

    def __post_init__(self) -> None:
        self.access = Access(self.config.access, self.metrics.key_counters)
        self.with_places(self.facts.ready.worker.max_num_seqs, queue=None)

    def with_places(self, slots: int, *, queue: int | None) -> FakeFrontend:
        """Lets in so many sequences that run, and that wait."""
        self.admissions = Admissions(queue, None, FakeClient(), self.metrics.rejected)
        self.admissions.slots = slots
        return self

    @property
    def live(self) -> int:
        return self.admissions.live

    def places_for(self, texts: int, caller: Caller) -> int:
        return min(texts, self.admissions.most_for(caller))

    @property
    def reading_context(self) -> ReadingContext:
        return ReadingContext(self.facts, self.tokenizer, self.reading)

    @property
    def grammars(self) -> FakeGrammars:
        return FakeGrammars(self.checked)

    @property
    def long_bodies(self) -> FakeLongBodies:
        return FakeLongBodies(self.reading_context, self.read_elsewhere)

    def serve(self, *tasks: str, **fields: Any) -> None:
        """Make the model one that does `tasks`; `fields` are other facts of it."""
        known = {"tasks": tasks, "max_text_len": 128, "widths": {"embed": 8, "token_embed": 8}, **fields}
        self.facts = changed(self.facts, **known)

    def pooled_tokens(self) -> list[list[int]]:
        """The tokens of each item of the last call of pool."""
        return [unpack(item.tokens) for item in self.pooled[-1][0]]

    def require_ready(self) -> None:
        if self.unready is not None:
            raise self.unready

    def check_model(self, name: str | None) -> None:
        if name and not self.facts.is_name(name):
            raise NotFound(
                f"The model `{name}` does not exist. Valid aliases: {', '.join(self.facts.model_names)}",
                "model",
            )

    def set_paused(self, admission: Admission, paused: bool) -> None:
        self.flow.append((admission, paused))

    def new_group(self) -> int:
        self.groups += 1
        return self.groups

    @property
    def engine_requests(self) -> Self:
        return self

    def ask(self, asked: Ask[R]) -> Awaitable[R]:
        return asked.open(self)

    def generate(
        self,
        prompt: TokenIds,
        sampling: SamplingParams,
        admission: Admission,
        *,
        params: list[Sampling] | None = None,
        interval: int = 1,
        replica: int | None = None,
        **options: Unpack[AddOptions],
    ) -> AsyncGenerator[Delta, None]:
        prompt = unpack(prompt)
        params = params or sampling.resolve(self.facts, self.tokenizer, len(prompt))
        rest = {**options, "interval": interval, "request_id": admission.id, "replica": replica}
        self.asked.append((prompt, sampling, rest))
        return self._generate(prompt, sampling, params, interval)

    async def _generate(
        self, prompt: list[int], sampling: SamplingParams, params: list[Sampling], interval: int
    ) -> AsyncGenerator[Delta, None]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self.waits:
                yield Delta(0, expected=self.expected)
            await asyncio.sleep(self.delay)
            outputs = [
                TextOutput(i, prompt, sampling, self.tokenizer, self.facts.eos_token_ids, interval)
                for i in range(len(params))
            ]
            sources = [self._messages(prompt, one, i) for i, one in enumerate(params)]
            live = set(range(len(params)))
            while live:
                for i in sorted(live):
                    self._maybe_fail(outputs[i])
                    delta = outputs[i].push(next(sources[i]))
                    if delta is None:
                        continue
                    if delta.finish_reason is not None:
                        live.discard(i)
                    yield delta
                if self.gate is not None and live:
                    await self.gate.wait()
            self.finished += 1
        finally:
            self.running -= 1

    async def pool(
        self,
        items: Sequence[PooledText],
        admission: Admission,
        *,
        replica: int | None = None,
        media_items: Mapping[bytes, MediaItem] = {},
        tell: Callable[[], None] = lambda: None,
        **options: Unpack[AddOptions],
    ) -> list[Pooled]:
        """Answers each item with `answer_of`; waits at the gate, if there is one."""
        rest = {**options, "request_id": admission.id, "replica": replica}
        items = [PooledText(unpack(item.tokens), item.params, item.media) for item in items]
        self.pooled_media = [as_media(item.media, media_items) for item in items]
        self.pooled.append((list(items), rest))
        self.running += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.pool_errors:
                raise self.pool_errors.pop(0)
            more = {"cached": self.cached, "timing": self.timing, "expected": self.expected}
            for _ in items:
                tell()
            return [Pooled(id=0, vectors=self.answer_of(item), **more) for item in items]
        finally:
            self.running -= 1

    async def tell(
        self,
        prompts: Iterable[tuple[list[int], Sampling, *tuple[int, ...]]],
        lengths: Sequence[int],
        admission: Admission,
        *,
        replica: int | None = None,
        **options: Unpack[AddOptions],
    ) -> list[Tokens | Failed]:
        """Tells of each prompt what `told_of` says."""
        prompts, first = list(prompts), sum(len(sent) for sent, _ in self.told)
        assert [len(tokens) for tokens, *_ in prompts] == [*lengths]
        self.told.append(([tokens for tokens, *_ in prompts], {**options, "replica": replica}))
        more = {"cached": self.cached, "timing": self.timing, "finish": "length"}
        return [
            self.tell_errors.get(first + number)
            or Tokens(
                id=0,
                tokens=[0],
                logprobs=[TokenLogprobs([0], [0.0], 1, [self.told_of(tokens, id) for id in params.told])],
                **more,
            )
            for number, (tokens, params, *_) in enumerate(prompts)
        ]

    def _maybe_fail(self, output: TextOutput) -> None:
        if self.error is not None and output.count >= self.tokens_before_error:
            raise self.error

    def _logprobs(self, tokens: list[int], count: int | None, choice: int) -> list[TokenLogprobs]:
        if count is None:
            return []
        if self.logprob_of is not None:
            return [TokenLogprobs([id], [self.logprob_of(choice)], 1) for id in tokens]
        return [logprobs_of(id, count) for id in tokens]

    def _messages(self, prompt: list[int], params: Sampling, choice: int):
        tokens = [*(self.reply_ids or self.reply.encode()), EOS][: params.max_tokens]
        finish = "stop" if tokens[-1] in params.stop_token_ids else "length"
        for start in range(0, len(tokens), self.per_step):
            new = tokens[start : start + self.per_step]
            first = start == 0
            yield Tokens(
                id=0,
                tokens=new,
                logprobs=self._logprobs(new, params.logprobs, choice),
                prompt_logprobs=(
                    [logprobs_of(id, params.prompt_logprobs) for id in prompt[1:]]
                    if first and params.prompt_logprobs is not None
                    else None
                ),
                cached=self.cached if first else 0,
                finish=finish if start + self.per_step >= len(tokens) else None,
                timing=self.timing,
                expected=self.expected if first else None,
                guesses=self.guesses if "reports_guesses" in self.asked[-1][2] else None,
            )


def that_embeds_too(**fields: Any) -> FakeFrontend:
    """A frontend whose model generates, and embeds each text as [1.0]. `fields` are its own."""
    frontend = FakeFrontend(answer_of=lambda item: vectors([1.0]), **fields)
    frontend.serve("generate", "embed")
    return frontend


def vectors(numbers: object) -> Vectors:
    """The vectors of a list of numbers, or of a list of such lists."""
    array = np.asarray(numbers, dtype="<f4")
    return Vectors(array.tobytes(), array.shape)


def logprobs_of(id: int, count: int) -> TokenLogprobs:
    """The chosen token is the most likely one."""
    count = VOCAB_SIZE if count == -1 else count
    ids = [(id + i) % VOCAB_SIZE for i in range(count)]
    return TokenLogprobs([id, *ids], [-0.5, *(-0.5 - i for i in range(count))], 1)
