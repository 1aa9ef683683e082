"""`LLMEngine`: an engine in this process, for programs with a loop of their own; `LLM` is one, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from random import Random
from typing import Any

import msgspec

from engine_core.engine import Engine
from server.errors import ApiError, Unavailable
from server.frontend.frontend import Frontend
from server.metrics.metric_reader import Metric, read_metrics
from server.model_facts import Facts
from server.offline.local_engine import LocalEngine
from server.offline.output_builder import Answers
from server.offline.program_requests import Asked, PooledOutput, open_answers, open_texts
from server.offline.prompt_forms import Fields, LoRARequest, PromptLike, read_params, read_prompt
from server.offline.request_outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from server.options.parse_server_options import EngineArgs, program_config
from server.options.server_flags import ServerConfig, VllmConfig
from server.requests.checkpoint_facts import open_transformers_tokenizer
from server.requests.pooling import PoolingParams
from server.requests.sampling_params import SamplingParams
from server.requests.sleep_mode import check_tags, sleep_level
from server.requests.unsupported_parameters import refuse_keywords
from server.terminal.progress_bar import ProgressDisplay
from server.text.tokenizer import Tokenizer
from worker.host.garbage import without_looking_for_garbage
from worker.protocol import Vectors

_UNSUPPORTED = ("arrival_time", "tokenization_kwargs", "trace_headers", "prompt_text")

Output = RequestOutput | PooledOutput
Changed = dict[str, Callable[[], Output | None]]
"""What makes the next output of each request that has got something since the last step."""


class LLMEngine:
    """Loads the model at construction. Options are those of `serve`, with underscores.

    engine = LLMEngine("Qwen/Qwen3-0.6B", max_model_len=4096)
    engine.add_request("1", "Hello", SamplingParams(max_tokens=16))
    while engine.has_unfinished_requests():
        for output in engine.step():
            ...
    """

    def __init__(
        self, model: str | VllmConfig = "demo", *, display: ProgressDisplay | None = None, **options: Any
    ) -> None:
        """`display` shows how far the start is; by default, standard error does."""
        self.config = program_config(model, options)
        _check_alone(self.config)
        with without_looking_for_garbage():
            engine = _start(self.config, display or ProgressDisplay())
            _prepare(engine)
            self.local = LocalEngine(self.config, engine)
        self._transformers_tokenizer: Any = None
        self._random = Random(self.config.engine.worker.seed)
        self._running: dict[str, asyncio.Task[None]] = {}
        """What follows each request that is not finished, by its id."""
        self._changed: Changed = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        return cls.from_vllm_config(engine_args.create_engine_config())

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> LLMEngine:
        return cls(vllm_config)

    @property
    def frontend(self) -> Frontend:
        """The server's frontend, for what `local` runs."""
        return self.local.frontend

    @property
    def tokenizer(self) -> Tokenizer:
        return self.frontend.tokenizer

    @property
    def facts(self) -> Facts:
        return self.frontend.facts

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
        if request_id in self._running:
            raise ValueError(f"a request with the id {request_id!r} is not finished yet")
        [params] = self._read_params([params])
        asked = Asked(request_id, read_prompt(prompt), params, priority, lora_request)
        self.local.call(self._add(asked))

    def _read_params(self, given: Sequence[Fields]) -> list[Fields]:
        """Parameters as `read_params` reads them. Draws without a seed follow the option `seed`, so that the
        same calls of a program draw the same in each of its runs."""
        return [
            msgspec.structs.replace(one, seed=self._random.getrandbits(63))
            if isinstance(one, SamplingParams) and one.seed in (None, -1)
            else one
            for one in read_params(given)
        ]

    async def _add(self, asked: Asked) -> None:
        if isinstance(asked.params, PoolingParams):
            pool_texts = await open_texts(self.frontend, [asked])
            work, close = _follow_text(pool_texts(), asked, self._changed), lambda: None
        else:
            [answers] = await open_answers(self.frontend, [asked])
            work, close = _follow_answers(answers, asked.name, self._changed), answers.state.close
        self._running[asked.name] = task = asyncio.create_task(work)
        task.add_done_callback(lambda _: close())  # also if it never began

    def step(self) -> list[Output]:
        """Runs one step of the model, and returns the outputs of requests that have new ones."""
        self.local.step()
        outputs = [output for make in self._changed.values() if (output := make()) is not None]
        self._changed.clear()
        for output in outputs:
            if output.finished:
                self._running.pop(output.request_id)
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        return len(self._running)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends these requests: step() returns nothing of them any more. Unknown ids are passed over."""
        names = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        self.local.call(self._abort([self._running.pop(name) for name in names if name in self._running]))
        for name in names:
            self._changed.pop(name, None)

    async def _abort(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer of transformers, which is imported for this call."""
        if self._transformers_tokenizer is None:
            self._transformers_tokenizer = open_transformers_tokenizer(self.config, self.frontend.folder)
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
        return self.local.engine.calls.wait_for(method, list(args), kwargs or {})

    def reset_prefix_cache(self) -> bool:
        self.frontend.orders.reset_prefix_cache()
        return True

    def reset_mm_cache(self) -> None:
        """Forgets the prepared pictures and sounds that are kept for later requests."""
        self.frontend.forget_media()

    def get_metrics(self) -> list[Metric]:
        """What the page /metrics of a server would show now."""
        self.local.learn_stats()
        return read_metrics(self.frontend.metrics.page().decode())

    def sleep(self, level: int = 1) -> None:
        """Gives the memory of weights and cache back, until wake_up(). All requests must be finished.

        Level 2 has the system drop the checkpoint from its cache of files, too.
        """
        level = sleep_level(level, self.config.engine)
        if self._running:
            raise RuntimeError("sleep() is for an engine without requests: finish or abort them first")
        self.local.call(self.frontend.orders.sleep(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Loads the weights again from the checkpoint's files. Raises Unavailable if they cannot be."""
        check_tags(tags)
        if problem := self.local.call(self.frontend.orders.wake()):
            raise Unavailable(problem)
        _prepare(self.local.engine)

    def is_sleeping(self) -> bool:
        return self.frontend.orders.asleep

    def shutdown(self) -> None:
        """Gives the memory back. The engine cannot be used afterwards."""
        self.local.close()


async def _follow_answers(answers: Answers, name: str, changed: Changed) -> None:
    try:
        async with aclosing(answers.take()) as pieces:
            async for _ in pieces:
                changed[name] = answers.builder.output
    except ApiError as error:
        output = answers.builder.fail(error)
        changed[name] = lambda: output


async def _follow_text(
    pooled: Coroutine[Any, Any, list[PooledOutput]], asked: Asked, changed: Changed
) -> None:
    try:
        [output] = await pooled
    except ApiError as error:
        nothing = PoolingOutput.of(Vectors(b"", (0,)))
        output = PoolingRequestOutput(asked.name, nothing, asked.text.ids or [], error=error)
    changed[asked.name] = lambda: output


def _check_alone(config: ServerConfig) -> None:
    if len(config.replicas.numbers) != 1:
        raise ValueError(
            "data_parallel_size: an LLM and an LLMEngine are one replica, numbered by data_parallel_rank; "
            "for several, AsyncLLM(data_parallel_size=...) or `facet serve --data-parallel-size`"
        )


def _start(config: ServerConfig, display: ProgressDisplay) -> Engine:
    asked = config.engine
    if asked.max_token_gap_ms is None:
        # Nobody waits for one answer of a list: long steps take the least time.
        asked = msgspec.structs.replace(asked, max_token_gap_ms=0.0)
    engine = Engine.start(asked, lambda now: display.show(now.phase, now.fraction, now.detail))
    display.done()
    return engine


def _prepare(engine: Engine) -> None:
    """Does the work that makes steps quicker: a batch of prompts leaves no idle moment for it."""
    while engine.prepare(wait=True):
        pass
