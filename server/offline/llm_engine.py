"""`LLMEngine`: an engine in this process, for programs with a loop of their own; `LLM` runs on it too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from engine_core.adapters.messages import AdapterState
from engine_core.engine import Engine
from engine_core.protocol import Add, Admitted, Alone, Grammar, Standing, Tokens
from engine_core.reason_codes import SENTENCES
from server.grammars.form_grammar import AskedForm, build_grammar
from server.model_facts import GENERATE, TRANSCRIPTION, Facts, require_task
from server.offline.engine_requests import (
    BeamRequest,
    EngineRequest,
    GenerationRequest,
    Output,
    PoolingRequest,
)
from server.offline.lora_requests import LoRARequest
from server.offline.program_adapters import ProgramAdapters, give_adapter
from server.offline.program_media import Encoded, ProgramMedia, encode_rows
from server.offline.prompt_forms import (
    Prompt,
    PromptLike,
    ReadOptions,
    encode_prompts,
    read_items,
    read_prompt,
    reader_for,
)
from server.offline.request_outputs import RequestOutput
from server.offline.spoken_sounds import transcribe_in_chats
from server.offline.transcribing import Sound, TranscribeOptions, TranscriptionOutput, transcribe
from server.options.server_config import ServerConfig
from server.options.server_options import EngineArgs, from_python
from server.requests.adapted_models import facts_with
from server.requests.beam_search import BeamSearchParams
from server.requests.checkpoint_facts import find_facts, open_tokenizer, open_transformers_tokenizer
from server.requests.pooling import PoolingParams
from server.requests.sampling import RequestOutputKind, SamplingParams
from server.requests.sleep_mode import check_tags, sleep_level
from server.requests.unsupported_parameters import refuse_keywords
from server.run.progress_bar import ProgressDisplay
from server.text.control_tokens import without_cuts
from worker.host.machine import forget_files

_MOST_GRAMMARS = 1024
"""Grammars that are kept for later requests."""
_CLIENT = 0
_UNSUPPORTED = ("arrival_time", "tokenization_kwargs", "trace_headers", "prompt_text")

_log = logging.getLogger(__name__)


class LLMEngine:
    """Loads the model at construction. Options are those of `serve`, with underscores.

    engine = LLMEngine("Qwen/Qwen3-0.6B", max_model_len=4096)
    engine.add_request("1", "Hello", SamplingParams(max_tokens=16))
    while engine.has_unfinished_requests():
        for output in engine.step():
            ...
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self.config = from_python({"model": model, **options})
        _check_alone(self.config)
        self._engine = _start(self.config)
        self._prepare()
        self._folder = Path(self._engine.ready.folder)
        self.tokenizer = open_tokenizer(self.config, self._folder)
        self.facts = self._find_facts()
        self.adapters = ProgramAdapters(self._engine, self.config, self.tokenizer)
        self._grammars: dict[bytes, Grammar] = {}
        """Grammars by the form that was asked for, as msgpack."""
        self._transformers_tokenizer: Any = None
        self._last_id = 0
        self._running: dict[int, tuple[EngineRequest, int]] = {}
        """Id of a sequence in the engine -> its request, and its index among the request's sequences."""
        self._sequences: dict[str, set[int]] = {}
        """Request id -> ids of its sequences that are not finished."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        return cls(**engine_args.options())

    def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> None:
        """Checks a request and queues it; step() returns its outputs. Raises BadRequest."""
        refuse_keywords("add_request", others, _UNSUPPORTED)
        read = read_prompt(prompt)
        [adapter] = self.adapters.find(lora_request, 1)
        if isinstance(params, PoolingParams):
            [request] = self.pooling_requests([request_id], [read], [params], adapter=adapter)
        elif isinstance(params, SamplingParams):
            [request] = self.generation_requests([request_id], [read], [params])
        else:
            raise TypeError(f"params are SamplingParams or PoolingParams, not {type(params).__name__}")
        give_adapter([request], adapter)
        self.submit(request, priority=priority)

    def step(self) -> list[Output]:
        """Runs one step of the model, and returns the outputs of requests that have new ones."""
        changed: dict[str, EngineRequest] = {}
        for answer in self._engine.step().get(_CLIENT, []):
            if isinstance(answer, Admitted | Alone | Standing) or answer.id not in self._running:
                continue  # no output yet, or none any more: the request was ended while this step ran
            request, index = self._running[answer.id]
            if request.take(index, answer):
                del self._running[answer.id]
                self._sequences[request.request_id].discard(answer.id)
                if isinstance(answer, Tokens) and answer.finish is None:
                    self._engine.abort(_CLIENT, [answer.id])  # a stop string, which the engine cannot see
            changed[request.request_id] = request
        for request_id, request in changed.items():
            if request.finished:
                self.abort_request(request_id)  # the other answers of a request that failed
            elif not self._sequences[request_id]:
                self._send(request)
        return [output for request in changed.values() if (output := request.output()) is not None]

    def transcribe(
        self,
        sounds: Sequence[Sound],
        options: TranscribeOptions,
        chat: Callable[..., list[RequestOutput]],
    ) -> list[TranscriptionOutput]:
        """What is said in recordings. Other requests must be finished. Raises BadRequest.

        `chat` is `LLM.chat`, by which a model transcribes that hears sounds in chats.
        """
        require_task(TRANSCRIPTION, self.facts.tasks)
        if self._sequences:
            raise ValueError("transcribe() runs alone: finish other requests first")
        most = self.config.media.max_audio_seconds
        if self.facts.ready.worker.source_kind != "audio":
            return transcribe_in_chats(chat, self.media.facts.transcribes, sounds, options, most)
        return transcribe(self._engine, self.facts, self.tokenizer, self._folder, sounds, options, most)

    def has_unfinished_requests(self) -> bool:
        return bool(self._sequences)

    def get_num_unfinished_requests(self) -> int:
        return len(self._sequences)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends these requests: step() returns nothing of them any more. Unknown ids are passed over."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            ids = self._sequences.pop(request_id, None)
            if ids:
                for id in ids:
                    del self._running[id]
                self._engine.abort(_CLIENT, ids)

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer of transformers, which is imported for this call."""
        if self._transformers_tokenizer is None:
            self._transformers_tokenizer = open_transformers_tokenizer(self.config, self._folder)
        return self._transformers_tokenizer

    def collective_rpc(
        self,
        method: str,
        timeout: None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Runs a method of the class of `worker_extension_cls` in every worker -> what each has returned."""
        if timeout is not None:
            raise ValueError("timeout: this process waits for its workers; leave it out, or use AsyncLLM")
        return self._engine.calls.wait_for(method, list(args), kwargs or {})

    def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Gives the memory of weights and cache back, until wake_up(). All requests must be finished.

        Level 2 has the system drop the checkpoint from its cache of files, too.
        """
        level = sleep_level(level, self.config.engine)
        if self._sequences:
            raise RuntimeError("sleep() is for an engine without requests: finish or abort them first")
        self.finish_steps()
        self._engine.refusal = SENTENCES["asleep"], "asleep"
        self._engine.fall_asleep()
        if level > 1:
            forget_files(self._folder)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Loads the weights again from the checkpoint's files."""
        check_tags(tags)
        self._engine.wake()
        self._prepare()
        self.facts = self._find_facts()

    def is_sleeping(self) -> bool:
        return self._engine.asleep

    def shutdown(self) -> None:
        """Gives the memory back. The engine cannot be used afterwards."""
        self._engine.stop()

    def _find_facts(self) -> Facts:
        return find_facts(self.config, self._engine.ready, self._folder, self.tokenizer)

    def _prepare(self) -> None:
        """Does the work that makes steps quicker: a batch of prompts leaves no idle moment for it."""
        while self._engine.prepare(wait=True):
            pass

    def generation_requests(
        self,
        request_ids: list[str],
        prompts: list[Prompt],
        params: list[SamplingParams],
        *,
        kind: RequestOutputKind | None = None,
        add_special_tokens: bool = True,
    ) -> list[GenerationRequest]:
        """Checks and encodes requests, so that all are right before one is submitted. Raises BadRequest."""
        encoded = self._encode(prompts, params, add_special_tokens=add_special_tokens)
        return [
            GenerationRequest(
                *(request_id, prompt, each, sampling, self.facts, self.tokenizer),
                kind=kind,
                least_interval=self.config.stream_interval,
                grammar=self._grammar(asked) if (asked := sampling.asked_form()) else None,
            )
            for request_id, prompt, each, sampling in zip(request_ids, prompts, encoded, params, strict=True)
        ]

    def beam_requests(
        self, request_ids: list[str], prompts: list[Prompt], search: BeamSearchParams
    ) -> list[BeamRequest]:
        """The same for beam searches."""
        encoded = self._encode(prompts, [search.sampling()] * len(prompts), add_special_tokens=True)
        return [
            BeamRequest(request_id, prompt, each, search, self.facts, self.tokenizer)
            for request_id, prompt, each in zip(request_ids, prompts, encoded, strict=True)
        ]

    def _encode(
        self, prompts: list[Prompt], params: list[SamplingParams], *, add_special_tokens: bool
    ) -> list[Encoded]:
        """The tokens of prompts that are to be answered. Raises BadRequest."""
        require_task(GENERATE, self.facts.tasks)
        texts = [prompt for prompt in prompts if not prompt.pictures and prompt.rows is None]
        of_texts = iter(encode_prompts(texts, self.tokenizer, add_special_tokens=add_special_tokens))
        found: list[Encoded] = []
        for prompt, sampling in zip(prompts, params, strict=True):
            if prompt.rows is not None:
                encoded = encode_rows(prompt.rows, sampling, self.facts)
            elif prompt.pictures:
                encoded = self.media.encode(
                    prompt.text or "", prompt.pictures, sampling, add_special_tokens=add_special_tokens
                )
            else:
                text = None if prompt.text is None else without_cuts(prompt.text)
                encoded = Encoded(text, sampling.cut_prompt(next(of_texts), self.facts))
            self.facts.check_token_ids(encoded.ids, "prompt")
            found.append(encoded)
        return found

    def pooling_requests(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: Sequence[PoolingParams],
        task: str | None = None,
        options: ReadOptions | None = None,
        adapter: AdapterState | None = None,
    ) -> list[PoolingRequest]:
        """The same for texts and pictures to pool. `task` wins over the task of the parameters."""
        facts = facts_with(self.facts, adapter)
        given = [pair for pair in zip(prompts, params, strict=True) if not pair[0].pictures]
        texts, of_texts = [prompt for prompt, _ in given], [one for _, one in given]
        items = iter(read_items(texts, of_texts, facts, self.tokenizer, task, options))
        requests: list[PoolingRequest] = []
        for index, (request_id, prompt, one) in enumerate(zip(request_ids, prompts, params, strict=True)):
            if prompt.pictures:
                reader, resolved = reader_for(one, facts, self.tokenizer, task, options)
                read = self.media.read_item(prompt.text or "", prompt.pictures, reader, resolved, index)
                request = PoolingRequest(request_id, *read)
            else:
                request = PoolingRequest(request_id, next(items))
            request.salt = prompt.salt
            requests.append(request)
        give_adapter(requests, adapter)
        return requests

    @cached_property
    def media(self) -> ProgramMedia:
        """What prepares pictures. Raises BadRequest if the model takes none."""
        return ProgramMedia(self._folder, self.facts, self.tokenizer, self.config)

    def _grammar(self, asked: AskedForm) -> Grammar:
        """Raises BadRequest if there is none, and logs what of it is not enforced.

        The program is its own client, so no other process proves it first.
        """
        key = msgspec.msgpack.encode(asked)
        if (known := self._grammars.get(key)) is not None:
            return known
        tokenizer = self.tokenizer
        special = {name: id for name, id in tokenizer.added_tokens.items() if id in tokenizer.special_ids}
        built = build_grammar(asked, special)
        if built.ignored:
            _log.warning("%s: not enforced: %s", asked.field, ", ".join(built.ignored))
        self._engine.spell(tokenizer.spelling(self.facts.eos_token_ids))
        if len(self._grammars) >= _MOST_GRAMMARS:
            self._grammars.clear()
        return self._grammars.setdefault(key, built.for_engine())

    def submit(self, request: EngineRequest, *, priority: int = 0) -> None:
        if request.request_id in self._sequences:
            raise ValueError(f"a request with the id {request.request_id!r} is not finished yet")
        self._sequences[request.request_id] = set[int]()
        self._send(request, priority)

    def _send(self, request: EngineRequest, priority: int = 0) -> None:
        """Give the engine the sequences of a request, or of the next round of a beam search."""
        sequences, ids = request.sequences, self._sequences[request.request_id]
        group = self._last_id + 1 if len(sequences) > 1 else 0
        for index, (tokens, params) in enumerate(sequences):
            self._last_id += 1
            self._running[self._last_id] = request, index
            ids.add(self._last_id)
            add = Add(
                id=self._last_id,
                tokens=tokens,
                params=params,
                priority=priority,
                salt=request.salt,
                group=group,
                times_each=request.may_end_early,
                grammar=request.grammar,
                media=request.media,
                source=request.source,
                most_guesses=request.most_guesses,
                prompt_len=request.prompt_len,
                adapter=request.adapter,
            )
            self._engine.add(_CLIENT, add)

    def finish_steps(self) -> None:
        """Waits for steps that still run although no request is left."""
        while self._engine.busy and not self._sequences:
            self._engine.step()


def _check_alone(config: ServerConfig) -> None:
    if len(config.replicas.numbers) != 1:
        raise ValueError(
            "data_parallel_size: an LLM and an LLMEngine are one replica, numbered by data_parallel_rank; "
            "for several, AsyncLLM(data_parallel_size=...) or `facet serve --data-parallel-size`"
        )


def _start(config: ServerConfig) -> Engine:
    display, asked = ProgressDisplay(), config.engine
    if asked.max_token_gap_ms is None:
        # Nobody waits for one answer of a list: long steps take the least time.
        asked = msgspec.structs.replace(asked, max_token_gap_ms=0.0)
    engine = Engine.start(asked, lambda now: display.show(now.phase, now.fraction, now.detail))
    display.done()
    return engine
