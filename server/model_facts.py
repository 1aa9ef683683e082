"""Facts about the served model, which never change once it is ready, and the names of its tasks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Literal, cast, get_args

import msgspec

from engine_core.protocol import Ready, Source
from models.pooling.config import PoolingConfig
from server.errors import BadRequest
from server.request_limits import LIMITS, Limits
from worker.protocol import LogprobsMode, Task

Right = Literal[
    "generate", "embed", "token_embed", "classify", "token_classify", "sparse_embed", "ner", "score"
]
"""The uses of a key: a task of the model, or the comparison of texts, by whatever task."""
RIGHTS: tuple[Right, ...] = get_args(Right)

GENERATE, TRANSCRIPTION, DECIDE = "generate", "transcription", "decide"
_ALIGN = "align"
"""What the engine does for transcriptions alone: it finds times of words."""

ScoreType = Literal["cross-encoder", "bi-encoder", "late-interaction", "sparse"]
"""How two texts are compared: read together, by one vector each, by one vector for each token, or by weights
of tokens."""

SPEECH: Mapping[str, tuple[str, ...]] = {
    "WhisperForConditionalGeneration": (TRANSCRIPTION,),
    "Qwen3ASRForConditionalGeneration": (GENERATE, TRANSCRIPTION),
    "VoxtralForConditionalGeneration": (GENERATE, TRANSCRIPTION),
}
"""The tasks of models for speech by their architectures, as far as they are known before one is loaded."""

_ENDPOINTS = {
    GENERATE: "/v1/completions",
    TRANSCRIPTION: "/v1/audio/transcriptions",
    "embed": "/v1/embeddings",
    "token_embed": "/pooling",
    "sparse_embed": "/embed_sparse",
    "classify": "/classify",
    "token_classify": "/pooling",
    "ner": "/ner",
}
POOLING: tuple[Task, ...] = ("embed", "classify", "token_embed", "token_classify", "sparse_embed")
"""The pooling tasks, in the order in which one is chosen where a request names none."""

OUTPUTS: dict[str, Task] = {"dense": "embed", "sparse": "sparse_embed", "tokens": "token_embed"}
"""What a model may give of a text, in one pass: one vector, weights of tokens, a vector for each token."""

_ALIASES: dict[str, tuple[Task, ...]] = {
    "encode": ("token_embed", "token_classify"),
    "score": ("classify",),
    "reward": ("token_classify", "classify"),
    "embedding": ("embed",),
}
"""Names that vLLM 0.11 and older used, and the tasks that each may mean: the first that the model does."""

_SCORED_BY: dict[Task, ScoreType] = {
    "classify": "cross-encoder",
    "embed": "bi-encoder",
    "token_embed": "late-interaction",
    "sparse_embed": "sparse",
}


def find_outputs(names: Sequence[str], tasks: Collection[str], field: str = "outputs") -> tuple[Task, ...]:
    """The tasks of some outputs, in the order in which they were asked for by a field."""
    given = [name for name, task in OUTPUTS.items() if task in tasks]
    missing = [name for name in names if name not in given]
    if missing or len(set(names)) < len(names) or not names:
        raise BadRequest(
            f"This model gives the outputs {', '.join(given) or 'none'}, and not "
            f"{missing[0][:64]!r}, which `{field}` asks for."
            if missing
            else f"`{field}` names at least one output, and none of them twice.",
            field,
        )
    return tuple(OUTPUTS[name] for name in names)


def find_task(name: str | None, tasks: Collection[str], preferred: Task | None = None) -> Task:
    """The task that a request calls `name`. None is the model's preferred task, or else its first."""
    if name in tasks and name in POOLING:
        return name
    if name is None:
        offered = [task for task in (preferred, *POOLING) if task in tasks]
        if not offered:
            raise no_task("pooling", tasks)
        return cast(Task, offered[0])
    if name not in POOLING and name not in _ALIASES:
        known = ", ".join((*POOLING, *_ALIASES))
        raise BadRequest(f"Unsupported task: {name[:64]!r}. Tasks are {known}.", "task")
    found = [task for task in _ALIASES.get(name, (name,)) if task in tasks]
    if not found:
        raise no_task(name, tasks)
    return cast(Task, found[0])


def require_task(task: str, tasks: Collection[str]) -> None:
    if task not in tasks:
        raise no_task(task, tasks)


def no_task(wanted: str, tasks: Collection[str]) -> BadRequest:
    """The error for a task that the model does not do. It names the right endpoint or kind of model."""
    offered = ", ".join(f"{task} (POST {_ENDPOINTS[task]})" for task in tasks if task in _ENDPOINTS)
    return BadRequest(
        f"This model does not do the task {wanted!r}. It does: {offered or 'nothing'}."
        + _way_to_offer(wanted, tasks)
    )


def _way_to_offer(wanted: str, tasks: Collection[str]) -> str:
    """Why a model that could do a task for single tokens does not offer it, and how it would."""
    able = [task for task in _ALIASES.get(wanted, (wanted,)) if task.removeprefix("token_") in tasks]
    if GENERATE not in tasks or not able or not able[0].startswith("token_"):
        return ""
    return (
        " Beside generation, tasks for single tokens keep states of whole texts, so they are offered only "
        f"if the server is started with --tasks {','.join((*tasks, able[0]))}."
    )


def score_type(tasks: Collection[str], pooling: PoolingConfig) -> ScoreType | None:
    """The kind of comparison that the model computes; None if it cannot compare texts."""
    if pooling.task in _SCORED_BY and pooling.task in tasks:
        return _SCORED_BY[pooling.task]
    if "classify" in tasks and pooling.num_labels == 1:
        return "cross-encoder"
    made_for_tokens = bool(pooling.token_steps) and not pooling.modes  # such as ColBERT
    made_for_tokens = made_for_tokens or bool(pooling.token_vectors.skipped)
    if "token_embed" in tasks and (made_for_tokens or "embed" not in tasks):
        return "late-interaction"
    if "sparse_embed" in tasks and "embed" not in tasks:
        return "sparse"
    return "bi-encoder" if "embed" in tasks else None


def no_scores(tasks: Collection[str], num_labels: int) -> BadRequest:
    if "classify" in tasks:
        return BadRequest(
            "Scores need a classifier with one label, or vectors to compare; this model is a classifier with "
            f"{num_labels} labels. Use POST /classify."
        )
    return no_task("score", tasks)


class MediaFacts(msgspec.Struct, frozen=True):
    """The facts on a model's media that prompts are written by."""

    placeholder: str
    """What a chat template writes for an item."""
    written: str
    """What is put into a text for a template that takes texts only."""
    reserved: tuple[str, ...]
    """The tokens of which these consist, which are text where users write them."""
    alone: bool
    """Whether an item is a prompt of its own, for which no template has a place."""
    most: dict[str, int]
    """The most items of each kind that a prompt may have; kinds that the model does not take are missing."""
    video_placeholder: str = ""
    """What a chat template writes for a video; empty if the model takes none."""
    video_written: str = ""
    takes_embeds: bool = False
    """Whether pictures may come as embeddings."""
    transcribes: str = ""
    """By which kind of chats recordings are transcribed; empty if by none."""
    kind: Literal["image", "audio"] = "image"
    """The kind of items beside videos: pictures or sounds."""

    @property
    def written_parts(self) -> dict[str, str]:
        """What is put into a text for each type of parts."""
        return {
            "image_url": self.written,
            "image_embeds": self.written,
            "audio_url": self.written,
            "video_url": self.video_written,
        }


class SourceFacts(msgspec.Struct, frozen=True):
    longest: int
    """The most tokens of a prompt."""
    start: tuple[int, ...]
    """The tokens with which each answer begins, ahead of what is shown."""
    suppressed: tuple[int, ...] = ()
    """Tokens that the checkpoint wants in no answer."""

    def source(self, tokens: list[int]) -> Source:
        """A prompt as the encoder reads it."""
        digest = hashlib.sha256(array("q", tokens).tobytes()).hexdigest()
        return Source(digest, len(tokens), tokens=tokens)


TAG = ":latest"
"""The tag of a model's name in Ollama's API that may be left out."""
ANY_MODEL = frozenset({"tgi", "tei", "dummy", "jev-latest"})


class Facts(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    model_names: tuple[str, ...]
    """Names by which clients may call the model; answers use the first."""
    root: str
    """The model's origin for clients: a hub id or path if the operator shows it, else its first name."""
    created: int
    chat_template: str = ""
    """The template of the adapter that answers, in place of the tokenizer's own; "" if it brings none."""
    ready: Ready
    """The engine's own facts; of several replicas, as of one engine."""
    max_model_len: int
    """Longest prompt and answer together; of a model that only pools, longest text."""
    eos_token_ids: tuple[int, ...]
    defaults: dict[str, float | int] = {}
    """The checkpoint's temperature, top_p, top_k, min_p, repetition_penalty and max_tokens, if it has any."""
    max_logprobs: int = 20
    """-1 means no limit but the vocabulary."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    max_text_len: int = 0
    """Longest text to pool, in tokens: a sentence encoder may be made for less than its window."""
    pooling: PoolingConfig = PoolingConfig()
    """Pooling, labels and prompts, as the model's files say."""
    default_prompt_name: str | None = None
    score_type: ScoreType | None = None
    score_template: str | None = None
    """A chat template with the roles query and document, or its name, where one text is made of two."""
    int8_ranges: tuple[tuple[float, ...], ...] = ()
    """The least of each number of a vector and the greatest; empty if the operator has not said them."""
    temperatures: dict[str, float] = {}
    """The temperature of decisions for each kind of questions; 1 where there is none."""
    limits: Limits = LIMITS
    media: MediaFacts | None = None
    """None if requests can have texts only."""
    sources: SourceFacts | None = None
    """None if prompts are continued, and not read by an encoder."""

    def is_name(self, name: str) -> bool:
        """Whether clients may call the model so: by a name of it, with Ollama's tag or without, or by a word
        that clients of other servers send where there is but one model."""
        return name in self.model_names or name in ANY_MODEL or name.removesuffix(TAG) in self.model_names

    @cached_property
    def vocab_size(self) -> int:
        return self.ready.vocab_size

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that requests may ask for."""
        return tuple(task for task in self.ready.worker.tasks if task != _ALIGN)

    @property
    def decides_by(self) -> str | None:
        """How the model answers typed questions: by a head for options, or by the log-probabilities of
        letters; None if it does not."""
        if DECIDE in self.tasks:
            return "head"
        return "letters" if GENERATE in self.tasks and self.sources is None else None

    @property
    def tells_words(self) -> bool:
        """Whether a transcription may have times of words."""
        return _ALIGN in self.ready.worker.tasks

    @cached_property
    def longest_prompt(self) -> int:
        """The most tokens of a prompt that could be, if its answer had none."""
        return self.max_model_len if self.sources is None else self.sources.longest

    def room_for_answer(self, prompt_len: int) -> int:
        """The most tokens of an answer to a prompt of so many tokens."""
        return self.max_model_len - (prompt_len if self.sources is None else len(self.sources.start))

    def check_token_ids(self, ids: list[int], param: str) -> None:
        size = self.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= size):
            outside = [id for id in ids if not 0 <= id < size]
            raise BadRequest(
                f"token_id(s) {outside[:10]} in {param} contain out-of-vocab token ids. "
                f"Vocabulary size: {size}",
                param,
            )
