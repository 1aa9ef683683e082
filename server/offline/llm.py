"""`LLM`: a model in one's own process, without HTTP. What a request says and becomes is as in the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from numbers import Integral
from typing import Any, TypedDict, Unpack

from msgspec.structs import replace

from server.offline import program_batches, prompt_forms, request_outputs
from server.offline.llm_engine import LLMEngine
from server.offline.program_requests import Asked, PooledOutput, adapted
from server.offline.prompt_forms import Adapters, LoRARequest, for_each
from server.offline.transcribing import Sound, TranscribeOptions, TranscriptionOutput, transcribe
from server.options.server_flags import VllmConfig
from server.requests.beam_search import BeamSearchParams
from server.requests.pooling import PoolingParams
from server.requests.sampling_params import SamplingParams
from server.requests.unsupported_parameters import refuse_keywords
from server.schemas.decisions.openai_decisions import Decision
from server.text.chat_template import AskedFormat
from worker.calls.messages import APPLY_MODEL

_UNSUPPORTED = ("tokenization_kwargs", "chat_template")

Sampling = SamplingParams | Sequence[SamplingParams] | None
Text = str | prompt_forms.TextPrompt | prompt_forms.ContentPrompt
Texts = Text | Sequence[Text]


class TemplateOptions(TypedDict, total=False):
    """Keyword arguments of `LLM.chat`, which say how conversations are written."""

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None
    mm_processor_kwargs: dict[str, Any] | None
    media_io_kwargs: dict[str, Any] | None


class LLM(LLMEngine):
    """Loads the model at construction. The options are those of `serve`, with underscores, read the same way.

    llm = LLM("Qwen/Qwen3-0.6B", max_model_len=4096)
    outputs = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16))
    """

    def __init__(self, model: str | VllmConfig = "demo", **options: Any) -> None:
        super().__init__(model, **options)
        self._numbers = count()

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, which takes requests one by one, too."""
        return self

    def generate(
        self,
        prompts: prompt_forms.Prompts,
        sampling_params: Sampling = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        truncate_prompt_tokens: int | None = None,
        lora_request: Adapters = None,
        **others: Any,
    ) -> list[request_outputs.RequestOutput]:
        """Returns the answers in the order of the prompts. Give one SamplingParams for all, or one for each.

        `truncate_prompt_tokens` is for those that do not say it themselves: the last tokens of a prompt are
        kept, and those of a text to pool are its first. If any request is refused, none runs.
        """
        refuse_keywords("generate", others, _UNSUPPORTED)
        read, keep = prompt_forms.read_prompts(prompts), truncate_prompt_tokens
        params = self._sampling(sampling_params, len(read))
        if keep is not None:
            params = [
                replace(one, truncate_prompt_tokens=keep) if one.truncate_prompt_tokens is None else one
                for one in params
            ]
        asked = self._asked(read, params, lora_request, priority)
        return self.local.call(program_batches.generate(self.frontend, asked, use_tqdm))

    def chat(
        self,
        messages: Sequence[prompt_forms.Message] | Sequence[Sequence[prompt_forms.Message]],
        sampling_params: Sampling = None,
        use_tqdm: bool = True,
        *,
        chat_template_content_format: AskedFormat | None = None,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
        **template: Unpack[TemplateOptions],
    ) -> list[request_outputs.RequestOutput]:
        """Answers conversations, or one, which the model's chat template writes as prompts."""
        _refuse_others("chat", template, TemplateOptions)
        read = [
            prompt_forms.Conversation(one, template, chat_template_content_format)
            for one in prompt_forms.read_conversations(messages)
        ]
        asked = self._asked(read, self._sampling(sampling_params, len(read)), lora_request, priority)
        return self.local.call(program_batches.generate(self.frontend, asked, use_tqdm))

    def beam_search(
        self,
        prompts: prompt_forms.Prompts,
        params: BeamSearchParams,
        lora_request: Adapters = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[request_outputs.BeamSearchOutput]:
        """Finds the likeliest answers to each prompt, for `concurrency_limit` prompts at a time, if given."""
        if concurrency_limit is not None and concurrency_limit < 1:
            raise ValueError(f"concurrency_limit must be 1 or more, got {concurrency_limit}")
        read = prompt_forms.read_prompts(prompts)
        asked = self._asked(read, [params] * len(read), lora_request)
        found = program_batches.search(self.frontend, asked, params, concurrency_limit, use_tqdm)
        return self.local.call(found)

    def encode(
        self,
        prompts: prompt_forms.Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        task: str | None = None,
        **options: Unpack[prompt_forms.TextOptions],
    ) -> list[PooledOutput]:
        """Runs a task of the model on each text, by default its first. `task` is short for `pooling_task`."""
        asked = prompt_forms.PoolingOptions(pooling_params=pooling_params, **options)
        return self._pool("encode", prompts, pooling_task or task, asked)

    def embed(
        self, prompts: prompt_forms.Prompts, **options: Unpack[prompt_forms.PoolingOptions]
    ) -> list[request_outputs.EmbeddingRequestOutput]:
        """Returns a vector for each text."""
        pooled = self._pool("embed", prompts, "embed", options)
        return [request_outputs.embedding_output(each) for each in pooled]

    def classify(
        self, prompts: prompt_forms.Prompts, **options: Unpack[prompt_forms.PoolingOptions]
    ) -> list[request_outputs.ClassificationRequestOutput]:
        """Returns the probability of each label, for each text."""
        pooled = self._pool("classify", prompts, "classify", options)
        adapters = for_each("lora_request", LoRARequest, options.get("lora_request"), None, len(pooled))
        frontends = self.local.call(adapted(self.frontend, adapters))
        labels = [frontend.facts.pooling.labels for frontend in frontends]
        return list(map(request_outputs.classification_output, pooled, labels))

    def reward(
        self, prompts: prompt_forms.Prompts, **options: Unpack[prompt_forms.PoolingOptions]
    ) -> list[PooledOutput]:
        """Returns the rewards of each text: one for each token or step, or else one for the text."""
        return self._pool("reward", prompts, "reward", options)

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        lora_request: Adapters = None,
        **others: Any,
    ) -> list[request_outputs.ScoringRequestOutput]:
        """Compares texts: one with one, one with all of data_2, or each with the one at its index.

        {"content": [...]} has pictures too, as the content of a message.
        """
        refuse_keywords("score", others, _UNSUPPORTED)
        sides, [params] = (data_1, data_2), prompt_forms.read_params([pooling_params or PoolingParams()])
        if truncate_prompt_tokens is not None:
            params = replace(params, truncate_prompt_tokens=truncate_prompt_tokens)
        return self.local.call(
            program_batches.score(
                self.frontend, sides, params, instruction, lora_request, self._names, use_tqdm
            )
        )

    def transcribe(
        self, sounds: Sound | Sequence[Sound], **options: Unpack[TranscribeOptions]
    ) -> list[TranscriptionOutput]:
        """What is said in recordings: paths, or arrays of samples at 16 kHz."""
        return self.local.call(transcribe(self.frontend, sounds, options))

    def decide(
        self,
        inputs: program_batches.State | Sequence[program_batches.State],
        questions: Sequence[Mapping[str, Any]],
        *,
        lora_request: LoRARequest | None = None,
    ) -> list[Decision]:
        """Answers typed questions about a text, a conversation, or each of several, with probabilities: as
        /v1/decisions does (docs/decisions_api.md)."""
        return self.local.call(program_batches.decide(self.frontend, inputs, questions, lora_request))

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call that gives none; fields that are None are the model's own defaults."""
        decides = "max_tokens" in self.facts.defaults
        return SamplingParams(max_tokens=None) if decides else SamplingParams()

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Calls a function with the model in every worker -> what each has returned.

        With several ranks it must stand at the top level of a module that Python finds in other processes,
        and return what JSON could hold.
        """
        given: object = func
        if self.config.engine.ranks > 1:
            given = f"{func.__module__}:{func.__qualname__}"
            if func.__module__ == "__main__" or "<" in func.__qualname__:
                raise ValueError(
                    f"{given}: other processes cannot import it: define it at the top level of a module of "
                    "its own"
                )
        return self.collective_rpc(APPLY_MODEL, args=[given])

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begins to record what workers do, as `profiler_config` says."""
        self.collective_rpc("profile", args=[True, profile_prefix])

    def stop_profile(self) -> list[str]:
        """Ends the recording, and returns the path of each worker's file."""
        return self.collective_rpc("profile", args=[False])

    def close(self) -> None:
        """Gives the memory back. The LLM cannot be used afterwards."""
        self.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pool(
        self,
        call: str,
        prompts: prompt_forms.Prompts,
        task: str | None,
        options: prompt_forms.PoolingOptions,
    ) -> list[PooledOutput]:
        """`task` wins over the task of the parameters."""
        _refuse_others(call, options, prompt_forms.PoolingOptions)
        read, given = prompt_forms.read_prompts(prompts), options.get("pooling_params")
        params = for_each("pooling_params", PoolingParams, given, PoolingParams(), len(read))
        asked = self._asked(read, params, options.get("lora_request"), options.get("priority"))
        shows = options.get("use_tqdm", True)
        return self.local.call(program_batches.pool(self.frontend, asked, task, options, shows))

    def _sampling(self, given: Sampling, number: int) -> Sequence[SamplingParams]:
        default = self.get_default_sampling_params()
        return for_each("sampling_params", SamplingParams, given, default, number)

    def _names(self, number: int) -> list[str]:
        """The next ids of requests."""
        return [str(next(self._numbers)) for _ in range(number)]

    def _asked(
        self,
        prompts: Sequence[prompt_forms.Prompt | prompt_forms.Conversation],
        params: Sequence[SamplingParams | PoolingParams | BeamSearchParams],
        adapters: Adapters,
        priority: Sequence[int] | None = None,
    ) -> list[Asked]:
        """The requests of a call."""
        number = len(prompts)
        ranks = for_each("priority", Integral, priority, 0, number)
        loras = for_each("lora_request", LoRARequest, adapters, None, number)
        params = self._read_params(params)
        given = zip(self._names(number), prompts, params, ranks, loras, strict=True)
        return [Asked(*each) for each in given]


def _refuse_others(call: str, given: Mapping[str, Any], known: type) -> None:
    others = {name: given[name] for name in given if name not in known.__annotations__}
    refuse_keywords(call, others, _UNSUPPORTED)
