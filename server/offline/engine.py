"""`LLMEngine`: an engine in this process, for programs with a loop of their own; `LLM` runs on it too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine_core.engine import Engine
from engine_core.protocol import Add, Tokens
from server.offline.engine_args import EngineArgs
from server.offline.pooling import read_items
from server.offline.prompts import Prompt, PromptLike, encode_prompts, read_prompt
from server.offline.transformers_tokenizer import open_transformers_tokenizer
from server.offline.work import Generation, Output, PooledText, Work
from server.options.table import ServerConfig, from_python
from server.requests.loading import find_facts, open_tokenizer
from server.requests.pooling import PoolingParams
from server.requests.sampling import RequestOutputKind, SamplingParams
from server.requests.task_names import GENERATE, require_task
from server.requests.unsupported import refuse_keywords
from server.run.progress import ProgressDisplay

_CLIENT = 0
_OF_VLLM = ("arrival_time", "lora_request", "tokenization_kwargs", "trace_headers", "prompt_text")


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
        self._folder = Path(self._engine.ready.folder)
        self.tokenizer = open_tokenizer(self.config, self._folder)
        self.facts = find_facts(self.config, self._engine.ready, self._folder, self.tokenizer)
        self._transformers_tokenizer: Any = None
        self._last_id = 0
        self._running: dict[int, tuple[Work, int]] = {}
        """Number of a sequence in the engine -> its request, and which of the request's sequences it is."""
        self._sequences: dict[str, set[int]] = {}
        """Request id -> numbers of its sequences that go on."""

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
        **others: Any,
    ) -> None:
        """Checks the request and queues it; step() answers. Raises BadRequest if it cannot be run."""
        refuse_keywords("add_request", others, _OF_VLLM)
        read = read_prompt(prompt)
        if isinstance(params, PoolingParams):
            [item] = read_items([read], [params], self.facts, self.tokenizer)
            work: Work = PooledText(request_id, item)
        elif isinstance(params, SamplingParams):
            [work] = self.generations([request_id], [read], [params])
        else:
            raise TypeError(f"params are SamplingParams or PoolingParams, not {type(params).__name__}")
        self.submit(work, priority=priority, salt=read.salt)

    def step(self) -> list[Output]:
        """Runs one step; returns the outputs of the requests that it changed."""
        changed: dict[str, Work] = {}
        for answer in self._engine.step().get(_CLIENT, []):
            if answer.id not in self._running:
                continue  # the request was ended while this step ran
            work, index = self._running[answer.id]
            if work.take(index, answer):
                del self._running[answer.id]
                self._sequences[work.request_id].discard(answer.id)
                if isinstance(answer, Tokens) and answer.finish is None:
                    self._engine.abort(_CLIENT, [answer.id])  # a stop string, which the engine cannot see
            changed[work.request_id] = work
        for request_id, work in changed.items():
            if work.finished:
                self.abort_request(request_id)  # the other answers of a request that failed
        return [output for work in changed.values() if (output := work.output()) is not None]

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
        """The tokenizer as a class of transformers, which is imported for it."""
        if self._transformers_tokenizer is None:
            self._transformers_tokenizer = open_transformers_tokenizer(self.config, self._folder)
        return self._transformers_tokenizer

    def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Gives the memory back. The engine cannot be used afterwards."""
        self._engine.stop()

    def generations(
        self,
        request_ids: list[str],
        prompts: list[Prompt],
        params: list[SamplingParams],
        *,
        kind: RequestOutputKind | None = None,
        add_special_tokens: bool = True,
    ) -> list[Generation]:
        """Checks requests before any of them is submitted. Raises BadRequest."""
        require_task(GENERATE, self.facts.tasks)
        encoded = encode_prompts(prompts, self.tokenizer, add_special_tokens=add_special_tokens)
        works: list[Generation] = []
        for request_id, prompt, tokens, sampling in zip(request_ids, prompts, encoded, params, strict=True):
            self.facts.check_token_ids(tokens, "prompt")
            works.append(
                Generation(
                    request_id,
                    prompt.text,
                    tokens,
                    sampling,
                    self.facts,
                    self.tokenizer,
                    kind=kind,
                    least_interval=self.config.stream_interval,
                )
            )
        return works

    def submit(self, work: Work, *, priority: int = 0, salt: str = "") -> None:
        if work.request_id in self._sequences:
            raise ValueError(f"a request with the id {work.request_id!r} is not finished yet")
        ids = self._sequences[work.request_id] = set[int]()
        for index, params in enumerate(work.params):
            self._last_id += 1
            self._running[self._last_id] = work, index
            ids.add(self._last_id)
            add = Add(id=self._last_id, tokens=work.tokens, params=params, priority=priority, salt=salt)
            self._engine.add(_CLIENT, add)

    def settle(self) -> None:
        """Brings steps that still run to their end, if they are of no request any more."""
        while self._engine.busy and not self._sequences:
            self._engine.step()


def _check_alone(config: ServerConfig) -> None:
    if config.data_parallel_size != 1:
        raise ValueError(
            "data_parallel_size: an LLM and an LLMEngine are one replica; for several, "
            "AsyncLLM(data_parallel_size=...) or `facet serve --data-parallel-size`"
        )


def _start(config: ServerConfig) -> Engine:
    display = ProgressDisplay()
    engine = Engine.start(config.engine, lambda now: display.show(now.stage, now.fraction, now.detail))
    display.done()
    return engine
