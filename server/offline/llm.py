"""`LLM`: a model in one's own process, without HTTP. Engine, sampling, pooling and text are the server's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, cast

import msgspec

from engine_core.adapters.messages import AdapterState
from server.errors import ApiError, BadRequest
from server.offline import prompt_forms, request_outputs
from server.offline.engine_requests import NO_ITEMS, EngineRequest, Output, PoolingRequest
from server.offline.llm_engine import LLMEngine
from server.offline.lora_requests import Adapters
from server.offline.program_adapters import by_adapter, give_adapter
from server.offline.program_media import PreparedItems
from server.offline.transcribing import Sound, TranscribeOptions, TranscriptionOutput, listed
from server.requests.adapted_models import facts_with
from server.requests.beam_search import BeamSearchParams
from server.requests.pooling import PoolingParams, Truncation
from server.requests.sampling import RequestOutputKind, SamplingParams
from server.requests.scoring import Compared, Pairs, ScoreOptions, compare_all, read_pairs
from server.requests.unsupported_parameters import refuse_keywords
from server.run.progress_bar import ProgressDisplay
from server.source_facts import refuse_chats
from server.text.chat_template import AskedFormat
from worker.calls.messages import APPLY_MODEL

_UNSUPPORTED = ("tokenization_kwargs", "mm_processor_kwargs", "chat_template")

Sampling = SamplingParams | Sequence[SamplingParams] | None
Text = str | prompt_forms.TextPrompt | prompt_forms.ContentPrompt
Texts = Text | Sequence[Text]


class LLM:
    """Loads the model at construction. The options are those of `serve`, with underscores, read the same way.

    llm = LLM("Qwen/Qwen3-0.6B", max_model_len=4096)
    outputs = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16))
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self.llm_engine = LLMEngine(model, **options)
        self.tokenizer = self.llm_engine.tokenizer
        self.facts = self.llm_engine.facts
        self._count = 0

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
        read = prompt_forms.read_prompts(prompts)
        keep = truncate_prompt_tokens
        return self._generate(read, sampling_params, use_tqdm, priority, keep=keep, adapters=lora_request)

    def chat(
        self,
        messages: Sequence[prompt_forms.Message] | Sequence[Sequence[prompt_forms.Message]],
        sampling_params: Sampling = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        chat_template_content_format: AskedFormat | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: Adapters = None,
        **others: Any,
    ) -> list[request_outputs.RequestOutput]:
        """Answers conversations, or one, which the model's chat template writes as prompts."""
        refuse_keywords("chat", others, _UNSUPPORTED)
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                "continue_final_message",
            )
        refuse_chats(self.facts.sources)
        prompts: list[prompt_forms.Prompt] = []
        read = prompt_forms.read_conversations(messages)
        for conversation, pictures, own in self.llm_engine.adapters.with_templates(read, lora_request):
            media = self.llm_engine.media if pictures else None
            text = self.tokenizer.chat.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                template=own if chat_template is None else chat_template,
                kwargs=chat_template_kwargs,
                defaults=self.llm_engine.config.default_chat_template_kwargs,
                content_format=chat_template_content_format,
                written=None if media is None else media.facts.written_parts,
                quoted=frozenset() if media is None else media.quoted_words(),
            )
            prompts.append(prompt_forms.Prompt(text, pictures=pictures))
        return self._generate(
            prompts, sampling_params, use_tqdm, add_special_tokens=False, adapters=lora_request
        )

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
        requests = self.llm_engine.beam_requests(self._new_ids(len(read)), read, params)
        self.llm_engine.adapters.give(requests, lora_request)
        most, show = concurrency_limit or max(1, len(requests)), "generate" if use_tqdm else ""
        parts = (requests[first : first + most] for first in range(0, len(requests), most))
        outputs = [output for part in parts for output in self._run(part, show)]
        return [output for output in outputs if isinstance(output, request_outputs.BeamSearchOutput)]

    def encode(
        self,
        prompts: prompt_forms.Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: str | None = None,
        task: str | None = None,
        **options: Unpack[prompt_forms.TextOptions],
    ) -> list[request_outputs.PoolingRequestOutput[request_outputs.PoolingOutput]]:
        """Runs a task of the model on each text, by default its first. `task` is short for `pooling_task`."""
        return self._pool(
            "encode", prompts, pooling_task or task, {"pooling_params": pooling_params, **options}
        )

    def embed(
        self, prompts: prompt_forms.Prompts, **options: Unpack[prompt_forms.PoolingOptions]
    ) -> list[request_outputs.EmbeddingRequestOutput]:
        """Returns a vector for each text."""
        return [
            request_outputs.embedding_output(pooled)
            for pooled in self._pool("embed", prompts, "embed", {**options})
        ]

    def classify(
        self, prompts: prompt_forms.Prompts, **options: Unpack[prompt_forms.PoolingOptions]
    ) -> list[request_outputs.ClassificationRequestOutput]:
        """Returns the probability of each label, for each text."""
        pooled = self._pool("classify", prompts, "classify", {**options})
        states = self.llm_engine.adapters.find(options.get("lora_request"), len(pooled))
        labels = [facts_with(self.facts, state).pooling.labels for state in states]
        return list(map(request_outputs.classification_output, pooled, labels))

    def reward(
        self, prompts: prompt_forms.Prompts, **options: Unpack[prompt_forms.PoolingOptions]
    ) -> list[request_outputs.PoolingRequestOutput[request_outputs.PoolingOutput]]:
        """Returns the rewards of each text: one for each token or step, or else one for the text."""
        return self._pool("reward", prompts, "reward", {**options})

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
        asked = pooling_params or PoolingParams()
        keep = asked.truncate_prompt_tokens if truncate_prompt_tokens is None else truncate_prompt_tokens
        options = ScoreOptions(
            use_activation=asked.activates(),
            truncation=Truncation.from_request(keep, None, self.facts),
            instruction=instruction,
            names=("data_1", "data_2"),
        )
        queries, documents = prompt_forms.read_sides(data_1), prompt_forms.read_sides(data_2)
        adapter = self.llm_engine.adapters.find_one(lora_request, max(len(queries), len(documents)))
        facts = facts_with(self.facts, adapter)
        if any(side.pictures for side in (*queries, *documents)):
            compared, media = self.llm_engine.media.read_pairs(queries, documents, options)
        else:
            pairs = Pairs([side.text for side in queries], [side.text for side in documents])
            compared, media = read_pairs(pairs, options, facts, self.tokenizer), NO_ITEMS
        return self._score(compared, media, "pool" if use_tqdm else "", adapter)

    def transcribe(
        self, sounds: Sound | Sequence[Sound], **options: Unpack[TranscribeOptions]
    ) -> list[TranscriptionOutput]:
        """What is said in recordings: paths, or arrays of samples at 16 kHz."""
        return self.llm_engine.transcribe(listed(sounds), options, self.chat)

    def get_tokenizer(self) -> Any:
        """Returns the tokenizer of transformers, which is imported for this call."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call that gives none; fields that are None are the model's own defaults."""
        return SamplingParams(max_tokens=None) if "max_tokens" in self.facts.defaults else SamplingParams()

    def collective_rpc(
        self,
        method: str,
        timeout: None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Runs a method of the class of `worker_extension_cls` in every worker -> what each has returned."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Calls a function with the model in every worker -> what each has returned.

        With several ranks it must stand at the top level of a module that Python finds in other processes,
        and return what JSON could hold.
        """
        given: object = func
        if self.llm_engine.config.engine.ranks > 1:
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

    def reset_prefix_cache(self) -> bool:
        self.llm_engine.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        """Gives the memory of weights and cache back, until wake_up(); it needs enable_sleep_mode=True.

        Level 2 has the system drop the checkpoint from its cache of files, too.
        """
        self.llm_engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Loads the weights again from the checkpoint's files."""
        self.llm_engine.wake_up(tags)
        self.facts = self.llm_engine.facts

    def close(self) -> None:
        """Gives the memory back. The LLM cannot be used afterwards."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(
        self,
        prompts: list[prompt_forms.Prompt],
        sampling_params: Sampling,
        show: bool,
        priority: Sequence[int] | None = None,
        *,
        add_special_tokens: bool = True,
        keep: int | None = None,
        adapters: Adapters = None,
    ) -> list[request_outputs.RequestOutput]:
        params = prompt_forms.for_each(sampling_params, self.get_default_sampling_params(), len(prompts))
        if keep is not None:
            params = [
                each
                if each.truncate_prompt_tokens is not None
                else msgspec.structs.replace(each, truncate_prompt_tokens=keep)
                for each in params
            ]
        requests = self.llm_engine.generation_requests(
            self._new_ids(len(prompts)),
            prompts,
            params,
            kind=RequestOutputKind.FINAL_ONLY,
            add_special_tokens=add_special_tokens,
        )
        self.llm_engine.adapters.give(requests, adapters)
        outputs = self._run(requests, "generate" if show else "", priority)
        return [output for output in outputs if isinstance(output, request_outputs.RequestOutput)]

    def _pool(
        self, call: str, prompts: prompt_forms.Prompts, task: str | None, options: Mapping[str, Any]
    ) -> list[request_outputs.PoolingRequestOutput[request_outputs.PoolingOutput]]:
        """`task` wins over the task of the parameters. `options` are PoolingOptions, to be checked here."""
        refuse_keywords(call, {name: options[name] for name in options if name not in _POOLING}, _UNSUPPORTED)
        read = prompt_forms.read_prompts(prompts)
        params = prompt_forms.for_each(options.get("pooling_params"), PoolingParams(), len(read))
        reading = cast(prompt_forms.ReadOptions, options)
        ids, engine = self._new_ids(len(read)), self.llm_engine

        def make(at: list[int], adapter: AdapterState | None) -> list[PoolingRequest]:
            names, texts = [ids[index] for index in at], [read[index] for index in at]
            own = [params[index] for index in at]
            return engine.pooling_requests(names, texts, own, task, reading, adapter)

        requests = by_adapter(engine.adapters.find(options.get("lora_request"), len(read)), make)
        stage = "pool" if options.get("use_tqdm", True) else ""
        outputs = self._run(requests, stage, options.get("priority"))
        return [output for output in outputs if isinstance(output, request_outputs.PoolingRequestOutput)]

    def _score(
        self, compared: Compared, media: PreparedItems, stage: str, adapter: AdapterState | None
    ) -> list[request_outputs.ScoringRequestOutput]:
        facts = facts_with(self.facts, adapter)
        scorer = compare_all(compared, facts)
        items = next(scorer)
        outputs: list[Output] = []
        try:
            while True:
                ids = self._new_ids(len(items))
                requests = [PoolingRequest(id, item, media) for id, item in zip(ids, items, strict=True)]
                give_adapter(requests, adapter)
                try:
                    outputs = self._run(requests, stage)
                except ApiError as error:
                    items = scorer.throw(error)  # it may know a way out
                else:
                    items = scorer.send([request.vectors for request in requests])
        except StopIteration as end:
            scores: list[float] = end.value
        results = [
            request_outputs.ScoringRequestOutput(id, request_outputs.ScoringOutput(one))
            for id, one in zip(self._new_ids(len(scores)), scores, strict=True)
        ]
        if facts.score_type == "cross-encoder":  # which reads the two texts of a score as one
            for result, pooled in zip(results, outputs, strict=True):
                if isinstance(pooled, request_outputs.PoolingRequestOutput):
                    result.prompt_token_ids, result.metrics = pooled.prompt_token_ids, pooled.metrics
                    result.num_cached_tokens = pooled.num_cached_tokens
        return results

    def _new_ids(self, count: int) -> list[str]:
        self._count += count
        return [str(number) for number in range(self._count - count, self._count)]

    def _run(
        self, requests: Sequence[EngineRequest], stage: str, priority: Sequence[int] | None = None
    ) -> list[Output]:
        """Returns the last output of each request, or raises the first error. `stage` may be empty."""
        if priority is not None and len(priority) != len(requests):
            raise ValueError(f"{len(priority)} priorities for {len(requests)} prompts; give one for each")
        display = ProgressDisplay() if stage and sys.stderr.isatty() else None
        done: dict[str, Output | None] = {request.request_id: None for request in requests}
        left = len(requests)
        try:
            for request, first in zip(requests, priority or [0] * left, strict=True):
                self.llm_engine.submit(request, priority=first)
            while left:
                if display is not None:
                    display.show(stage, 1 - left / len(requests))
                for output in self.llm_engine.step():
                    if output.error is not None:
                        raise output.error
                    if output.finished and output.request_id in done:
                        done[output.request_id] = output
                        left -= 1
        finally:
            self.llm_engine.abort_request(done)
            self.llm_engine.finish_steps()
            if display is not None:
                display.done()
        return [output for output in done.values() if output is not None]


_POOLING = frozenset(prompt_forms.PoolingOptions.__annotations__)
