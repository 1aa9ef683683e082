"""`AsyncLLM`: the HTTP server without HTTP, for one's own asyncio program."""

from __future__ import annotations

import asyncio
import os
import uuid
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, Literal, TypeVar

from engine_core.engine_children import EngineProcesses, start_engines
from engine_core.protocol import PauseMode
from server.errors import ApiError, Unavailable, for_programs
from server.frontend.frontend import Frontend
from server.metrics.stat_loggers import MakeStatLogger
from server.offline.engine_connection import SHUT_DOWN, Connection
from server.offline.program_batches import State, decide
from server.offline.program_requests import Asked, open_answers, open_texts
from server.offline.prompt_forms import LoRARequest, PromptLike, read_params, read_prompt
from server.offline.request_outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from server.options.parse_server_options import EngineArgs, program_config
from server.options.server_flags import VllmConfig
from server.requests.beam_search import BeamSearchParams
from server.requests.checkpoint_facts import open_transformers_tokenizer
from server.requests.pooling import PoolingParams
from server.requests.sampling_params import SamplingParams
from server.requests.sleep_mode import check_tags, sleep_level
from server.requests.unsupported_parameters import refuse_keywords
from server.run.start_checks import with_ray
from server.schemas.decisions.openai_decisions import Decision

R = TypeVar("R")

SECONDS_TO_END = 3.0
"""An engine process that has not ended by itself after this time is killed."""
_UNSUPPORTED = (
    *("tokenization_kwargs", "trace_headers", "session_id", "reasoning_ended"),
    "reasoning_parser_kwargs",
)


class AsyncLLM:
    """Starts the engine's processes at construction; they end with this object, and with this program.

    Options are those of `serve`, with underscores. The first request, or `start`, binds it to the event loop
    that runs then. Create it in a thread that lives as long as it is used: Linux ends processes with the
    thread that started them.

    async with AsyncLLM("Qwen/Qwen3-0.6B") as engine:
        async for output in engine.generate("Hello", SamplingParams(max_tokens=16), "1"):
            print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | VllmConfig = "demo",
        *,
        stat_loggers: Sequence[MakeStatLogger] = (),
        **options: Any,
    ) -> None:
        """`stat_loggers`: classes that are told how engines do (docs/plugins.md)."""
        self.config = with_ray(program_config(model, options))
        if self.config.headless:
            raise ValueError("headless: an AsyncLLM builder requests itself; `serve --headless` does not")
        self._engines = start_engines(
            self.config.engine, self.config.replicas, log_level=self.config.log.style
        )
        self._stat_loggers = stat_loggers
        self._connection: Connection | None = None
        self._opened: list[Connection] = []
        self._unsent: dict[int, str] = {}
        """The ids of requests that wait for the model, or whose prompts are read."""
        self._stop = weakref.finalize(self, _stop_engines, self._engines, self._opened, os.getpid())

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, stat_loggers: Sequence[MakeStatLogger] = ()
    ) -> AsyncLLM:
        return cls.from_vllm_config(engine_args.create_engine_config(), stat_loggers)

    @classmethod
    def from_vllm_config(
        cls, vllm_config: VllmConfig, stat_loggers: Sequence[MakeStatLogger] | None = None
    ) -> AsyncLLM:
        return cls(vllm_config, stat_loggers=stat_loggers or ())

    async def start(self) -> None:
        """Waits until the model can be used, as the first request does; raises Unavailable if it cannot."""
        await self._ready()

    def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of a request as they come, each with all of the answer so far.

        `output_kind` of the parameters asks for other outputs. Closing the generator, or cancelling the task
        that reads it, ends the request in the engine. `data_parallel_rank` names the replica to use.
        """
        refuse_keywords("generate", others, _UNSUPPORTED)
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"generate() takes SamplingParams, not {type(sampling_params).__name__}")
        [params] = read_params([sampling_params])
        asked = Asked(
            request_id or uuid.uuid4().hex,
            read_prompt(prompt),
            params,
            priority,
            lora_request,
            data_parallel_rank,
            prompt_text,
        )
        return self._outputs(asked)

    def beam_search(
        self,
        prompt: PromptLike,
        request_id: str,
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields one output with the likeliest answers to a prompt, the best one first."""
        [params] = read_params([params])
        return self._outputs(Asked(request_id, read_prompt(prompt), params, adapter=lora_request))

    async def _outputs(self, asked: Asked) -> AsyncGenerator[RequestOutput, None]:
        [answers], is_wanted = await self._read(asked, open_answers)
        with closing(answers.state):
            if not is_wanted:
                yield answers.builder.abort()
                return
            async with aclosing(answers.outputs()) as outputs:
                async for output in outputs:
                    yield output

    async def encode(
        self,
        prompt: PromptLike,
        pooling_params: PoolingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yields one output: the vector of the text, or whatever else the task makes of it."""
        refuse_keywords("encode", others, _UNSUPPORTED)
        if not isinstance(pooling_params, PoolingParams):
            raise TypeError(f"encode() takes PoolingParams, not {type(pooling_params).__name__}")
        name, read = request_id or uuid.uuid4().hex, read_prompt(prompt)
        [params] = read_params([pooling_params])
        asked = Asked(name, read, params, priority, lora_request, data_parallel_rank)
        pool_texts, is_wanted = await self._read(asked, open_texts)
        if not is_wanted:
            raise Unavailable("the request was ended before it was done")
        [output] = await pool_texts()
        yield output

    async def _read(
        self, asked: Asked, read: Callable[[Frontend, list[Asked]], Awaitable[R]]
    ) -> tuple[R, bool]:
        """What `read` makes of a request, and whether that is still wanted: it may be aborted meanwhile."""
        self._unsent[id(asked)] = asked.name
        try:
            with for_programs():
                found = await read(await self._ready(), [asked])
        finally:
            is_wanted = self._unsent.pop(id(asked), None) is not None
        return found, is_wanted

    async def decide(
        self,
        input: State,
        questions: Sequence[Mapping[str, Any]],
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Decision:
        """Answers typed questions about a text or a conversation, as /v1/decisions does."""
        name = request_id or uuid.uuid4().hex
        [decision] = await decide(await self._ready(), input, questions, lora_request, name)
        return decision

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests: generators of answers finish with the reason "abort", and those of `encode` raise
        Unavailable. Unknown ids are passed over."""
        if self._connection is not None:
            names = {request_id} if isinstance(request_id, str) else set(request_id)
            self._unsent = {key: name for key, name in self._unsent.items() if name not in names}
            await self._connection.frontend.abort(names)

    async def get_tokenizer(self) -> Any:
        """Returns the tokenizer of transformers, which is imported for this call."""
        frontend = await self._ready()
        return await asyncio.to_thread(open_transformers_tokenizer, self.config, frontend.folder)

    async def reset_prefix_cache(self) -> bool:
        (await self._ready()).orders.reset_prefix_cache()
        return True

    async def reset_mm_cache(self) -> None:
        """Forgets the prepared pictures and sounds that are kept for later requests."""
        (await self._ready()).forget_media()

    async def sleep(self, level: int = 1, mode: Literal["abort", "wait"] = "abort") -> None:
        """Gives the memory of weights and cache back, on all replicas, until wake_up(); it needs
        enable_sleep_mode=True. Requests that run are ended, or waited for."""
        orders = (await self._ready()).orders
        await orders.sleep(sleep_level(level, self.config.engine), abort=mode == "abort")

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Loads the weights again from the checkpoint's files; raises Unavailable if they cannot be."""
        check_tags(tags)
        if problem := await (await self._ready()).orders.wake():
            raise Unavailable(problem)

    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
    ) -> None:
        """Has all replicas compute nothing until resume_generation(). Requests that run are ended, finished
        first, or stand still ("keep"); others wait."""
        mode = "wait" if wait_for_inflight_requests else mode
        await (await self._ready()).orders.pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        await (await self._ready()).orders.resume()

    async def is_paused(self) -> bool:
        return self._connection is not None and self._connection.client.orders.paused

    async def is_sleeping(self) -> bool:
        return self._connection is not None and self._connection.client.orders.asleep

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Runs a method of the class of `worker_extension_cls` in every worker -> what each has returned."""
        frontend = await self._ready()
        async with asyncio.timeout(timeout):
            return await frontend.call_workers(method, list(args), kwargs or {})

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begins to record what workers do, as `profiler_config` says."""
        await self.collective_rpc("profile", args=[True, profile_prefix])

    async def stop_profile(self) -> list[str]:
        """Ends the recording, and returns the path of each worker's file."""
        return await self.collective_rpc("profile", args=[False])

    async def check_health(self) -> None:
        """Raises Unavailable if no engine works any more."""
        if self.dead_error is not None:
            raise self.dead_error

    @property
    def is_running(self) -> bool:
        """True while requests can be sent; they wait if the model is still loading."""
        return self.dead_error is None

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        return not self.is_running

    @property
    def dead_error(self) -> ApiError | None:
        """The reason why no request can be run any more; None while requests can be run."""
        if not self._stop.alive:
            return Unavailable(SHUT_DOWN)
        if self._connection is not None:
            dead = self._connection.client.dead
            return None if dead is None else Unavailable(f"The engine has stopped: {dead}")
        if self.config.replicas.started and all(one.exit_code is not None for one in self._engines.engines):
            return Unavailable("The engine has stopped: its process has ended")
        return None

    def shutdown(self) -> None:
        """Ends the engine's processes, and with them all requests. Further calls do nothing."""
        self._stop()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)  # other tasks of the program go on meanwhile

    async def _ready(self) -> Frontend:
        if not self._stop.alive:
            raise Unavailable(SHUT_DOWN)
        if self._connection is None:
            self._connection = Connection(self.config, self._engines, self._stat_loggers)
            self._opened.append(self._connection)
        return await self._connection.ready()


AsyncLLMEngine = AsyncLLM
"""The name that older versions of vLLM have for it."""


def _stop_engines(engines: EngineProcesses, opened: Sequence[Connection], owner: int) -> None:
    if os.getpid() != owner:
        return  # a process that the owner has forked ends, and the owner goes on
    for connection in opened:
        connection.close()
    engines.stop(SECONDS_TO_END)
