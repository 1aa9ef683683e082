"""`LLM`: a model in one's own process, without HTTP. Engine, sampling, pooling and text are the server's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from engine_core.engine import Engine
from engine_core.protocol import Add, Failed
from engine_core.protocol import Pooled as PooledAnswer
from server.offline.pooling import Classification, Embedding, OfflinePooling, Pooled, PooledOutput, Score
from server.options.table import from_python
from server.requests.loading import find_facts, open_tokenizer
from server.requests.pooling import PoolingParams, Truncation
from server.requests.sampling import SamplingParams
from server.requests.scoring import Pairs, ScoreOptions, score
from server.requests.task_names import GENERATE, require_task
from server.run.progress import ProgressDisplay
from server.text.output import Delta, TextOutput
from worker.protocol import TokenLogprobs, Vectors

Prompt = str | Sequence[int]
Message = Mapping[str, Any]

Form = TypeVar("Form")

_CLIENT = 0


class GenerationFailed(RuntimeError):
    """The engine could not finish a request; the message says why."""


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """One for each token, if asked for."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def extend(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass(slots=True)
class RequestOutput:
    prompt: str | None
    """None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs] | None = None
    """If asked for: one for each prompt token but the first."""


@dataclass(slots=True)
class _Choice:
    """One of the n answers to a prompt, while it is being generated."""

    request: RequestOutput
    output: CompletionOutput
    text: TextOutput


class LLM:
    """Loads the model at construction. The options are those of `serve`, with underscores, read the same way.

    llm = LLM("Qwen/Qwen3-0.6B", max_model_len=4096)
    outputs = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=16))
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        self._config = from_python({"model": model, **options})
        if self._config.data_parallel_size != 1:
            raise ValueError(
                "data_parallel_size: an LLM is one replica; for several, `facet serve --data-parallel-size`"
            )
        display = ProgressDisplay()
        self._engine = Engine.start(
            self._config.engine, lambda now: display.show(now.stage, now.fraction, now.detail)
        )
        display.done()
        folder = Path(self._engine.ready.folder)
        self.tokenizer = open_tokenizer(self._config, folder)
        self.facts = find_facts(self._config, self._engine.ready, folder, self.tokenizer)
        self._next_id = 0
        self._pooling = OfflinePooling(self._engine, self.facts, self.tokenizer)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts, each a text or a list of token ids.

        One SamplingParams for all, or one for each; none means the model's own defaults.
        """
        each = _prompts(prompts)
        params = _for_each(sampling_params, len(each))
        results = [RequestOutput(*self._encode(prompt), outputs=[]) for prompt in each]
        return self._run(results, params, show=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Conversations, or one, through the model's chat template.

        `template` holds its options: add_generation_prompt, continue_final_message, tools, documents, kwargs.
        """
        each = _conversations(messages)
        texts = [self.tokenizer.chat.render([dict(m) for m in one], **template) for one in each]
        results = [RequestOutput(text, self.tokenizer.encode(text, False), outputs=[]) for text in texts]
        return self._run(results, _for_each(sampling_params, len(results)), show=use_tqdm)

    def embed(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[PooledOutput[Embedding]]:
        """A vector for each text. `options` are those of encode."""
        return self._pool(prompts, "embed", Embedding.of, options)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], **options: Any
    ) -> list[PooledOutput[Classification]]:
        """The probability of each label, for each text. `options` are those of encode."""
        labels = self.facts.pooling.labels
        return self._pool(prompts, "classify", lambda vectors: Classification.of(vectors, labels), options)

    def reward(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[PooledOutput[Pooled]]:
        """What a reward model gives: for each token or step, or else for the whole text."""
        return self._pool(prompts, "reward", Pooled.of, options)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
        use_tqdm: bool = True,
    ) -> list[PooledOutput[Pooled]]:
        """Any task of the model, for each text; if none is named, its first.

        `prompt_name` is one of the model's instructions, written before each text. Too long a text is cut to
        `truncate_prompt_tokens` (-1 is what the model can read), or else refused.
        """
        options = {
            "pooling_params": pooling_params,
            "prompt_name": prompt_name,
            "truncate_prompt_tokens": truncate_prompt_tokens,
            "truncation_side": truncation_side,
            "use_tqdm": use_tqdm,
        }
        return self._pool(prompts, pooling_task, Pooled.of, options)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[PooledOutput[Score]]:
        """How near texts are: one to one, one to all of data_2, or each to the one in its place."""
        options = ScoreOptions(
            use_activation=None if pooling_params is None else pooling_params.use_activation,
            truncation=Truncation.asked(truncate_prompt_tokens, None, self.facts),
            instruction=instruction,
            names=("data_1", "data_2"),
        )
        pairs = Pairs(*([one] if isinstance(one, str) else list(one) for one in (data_1, data_2)))
        scorer = score(pairs, options, self.facts, self.tokenizer)
        return [PooledOutput(Score(one)) for one in self._pooling.score(scorer, show=use_tqdm)]

    def close(self) -> None:
        """Gives the memory back. The LLM is of no use afterwards."""
        self._engine.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        task: str | None,
        form: Callable[[Vectors], Form],
        options: dict[str, Any],
    ) -> list[PooledOutput[Form]]:
        sources = [one if isinstance(one, str) else list(one) for one in _prompts(prompts)]
        answers = self._pooling.pool(sources, task, **options)
        return [PooledOutput(form(vectors), item.tokens) for item, vectors in answers]

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        self.facts.check_token_ids(list(prompt), "prompt")
        return None, list(prompt)

    def _run(
        self, results: list[RequestOutput], params: list[SamplingParams], *, show: bool
    ) -> list[RequestOutput]:
        """All or nothing: what is wrong with any request is raised before the first one runs."""
        require_task(GENERATE, self.facts.tasks)
        adds: list[Add] = []
        choices: dict[int, _Choice] = {}
        for result, sampling in zip(results, params, strict=True):
            for index, one in enumerate(
                sampling.resolve(self.facts, self.tokenizer, len(result.prompt_token_ids))
            ):
                choice = self._open(result, sampling, index)
                choices[self._next_id] = choice
                adds.append(Add(id=self._next_id, tokens=result.prompt_token_ids, params=one))
                self._next_id += 1
        for add in adds:
            self._engine.add(_CLIENT, add)
        try:
            self._finish(choices, ProgressDisplay() if show else None)
        finally:
            self._engine.abort_all()
            while self._engine.busy:
                self._engine.step()
        return results

    def _open(self, result: RequestOutput, sampling: SamplingParams, index: int) -> _Choice:
        output = CompletionOutput(index)
        result.outputs.append(output)
        text = TextOutput(
            index, result.prompt_token_ids, sampling, self.tokenizer, self.facts.eos_token_ids, interval=1
        )
        return _Choice(result, output, text)

    def _finish(self, choices: dict[int, _Choice], display: ProgressDisplay | None) -> None:
        total = len(choices)
        while choices:
            if display is not None:
                display.show("generate", 1 - len(choices) / total)
            for answer in self._engine.step().get(_CLIENT, []):
                choice = choices.get(answer.id)
                if choice is None or isinstance(answer, PooledAnswer):
                    continue  # its stop string was found; the engine had gone on by a step
                if isinstance(answer, Failed):
                    raise GenerationFailed(answer.message)
                delta = choice.text.push(answer)
                if delta is None:
                    continue
                choice.output.extend(delta)
                if delta.prompt_logprobs is not None:
                    choice.request.prompt_logprobs = delta.prompt_logprobs
                if delta.finish_reason is not None:
                    del choices[answer.id]
                    if answer.finish is None:
                        self._engine.abort(_CLIENT, [answer.id])
        if display is not None:
            display.done()


def _prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    return [ids] if ids else [item for item in given if not isinstance(item, int)]


def _conversations(given: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    one = [item for item in given if isinstance(item, Mapping)]
    return [one] if one else [list(item) for item in given if not isinstance(item, Mapping)]


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(
            f"{len(params)} SamplingParams for {count} prompts; give one for all, or one for each"
        )
    return list(params)
