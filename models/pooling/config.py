"""The pooling of a checkpoint: how hidden states become vectors and labels, by its files and --pooler-config.

--pooler-config comes first, then the files of sentence-transformers, then the family's default, which is left
open here, since only its class knows it. No torch: the server reads labels, prompts and limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec

from models.config import ConfigError, ModelConfig
from models.plain_files import typed
from models.pooling.entity_files import EntityFacts, read_entities
from models.pooling.representations import (
    Splade,
    TokenVectors,
    TokenWeights,
    find_token_ids,
    read_flag_heads,
    token_vectors,
)
from models.pooling.routed_folder import query_weights
from models.pooling.sentence_files import Mode, Modules, Step, read_modules
from models.pooling.text_files import TextFacts, read_texts

Activation = Literal["identity", "sigmoid", "softmax"]
Task = Literal["embed", "token_embed", "classify", "token_classify", "sparse_embed", "ner"]

_MODES: tuple[Mode, ...] = ("CLS", "LAST", "MEAN", "MAX", "MEAN_SQRT_LEN", "WEIGHTED_MEAN")
_QWEN3_RERANKER_TOKENS = ["no", "yes"]
JINA_RANKING = "JinaVLForRanking"
"""The architecture of jina-reranker-m0."""
_JINA_MEAN, _JINA_PAIR_END = 2.65, 100
_QUERIES = {
    "ColPaliForRetrieval": ("<bos>Question: ", "<pad>" * 10 + "\n"),
    "ColQwen2ForRetrieval": ("Query: ", "<|endoftext|>" * 10 + "\n"),
}
"""What models that search among pictures read in front of a query and behind it, by their architecture: their
processors write it, not a template."""
TWO_WAY, PLAIN = "from_2_way_softmax", "no_post_processing"


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about pooling that the pooler and the server need."""

    # tokens
    modes: tuple[Mode, ...] = ()
    """The modes whose results are laid side by side to one vector; empty means the family's mode."""
    tokens: Literal["ALL", "STEP"] | None = None
    """The tokens that get an answer of their own; None means the family's choice."""
    include_prompt: bool = True
    """False if the tokens of an instruction do not enter the vector."""
    step_tag_id: int | None = None
    """The token at whose positions STEP answers."""

    # vectors
    token_steps: tuple[Step, ...] = ()
    steps: tuple[Step, ...] = ()
    normalize: bool = True
    dimensions: int | None = None
    """The number of dimensions to which vectors are cut if a request does not say."""
    matryoshka: bool = False
    """Whether requests may ask for fewer dimensions."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """The numbers of dimensions that they may ask for; empty means any."""

    # weights of tokens, and vectors of tokens
    sparse: Splade | TokenWeights | None = None
    static_queries: bool = False
    """Whether queries have static weights of their tokens, and are not read by the model."""
    ends_sparse: bool = False
    """Whether the vector of a text is a sparse one, because its last step keeps few numbers."""
    token_vectors: TokenVectors = TokenVectors()

    # entities
    entities: EntityFacts | None = None
    """Set if the model finds entities of labels that a request names."""

    # labels and scores
    num_labels: int = 2
    labels: tuple[str, ...] = ()
    """The names of the labels in order, if config.json has them."""
    activation: Activation = "softmax"
    classifier_tokens: tuple[int, ...] = ()
    """The tokens of the vocabulary whose logits are the labels; empty if the checkpoint has a classifier."""
    two_way: bool = False
    """True if two tokens (false, true) make one label: how far the second logit is above the first."""
    logit_mean: float = 0.0
    logit_sigma: float = 1.0

    # both
    task: Task | None = None
    """The one task that the operator wants the server to offer."""
    use_activation: bool | None = None
    """Whether vectors are normalised or labels activated; None goes by the checkpoint."""
    max_embed_len: int | None = None
    """The longest text in tokens that is read in windows, to one vector. None: none is."""

    # texts
    texts: TextFacts = TextFacts()
    use_sep_token: bool | None = None
    """Whether a separator stands between the texts of a pair; None leaves it to the tokenizer."""


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of --pooler-config, as vLLM 0.32 and 0.11 name them. `LLM` takes one, too."""

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    dimensions: int | None = None
    logit_mean: float | None = None
    logit_bias: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] = ()
    enable_chunked_processing: bool = False
    max_embed_len: Annotated[int, msgspec.Meta(ge=1)] | None = None
    enable_flash_late_interaction: bool = True
    """A choice between vLLM's ways to compute MaxSim, on which its results do not depend."""

    @property
    def activates(self) -> bool | None:
        named = (self.use_activation, self.normalize, self.softmax, self.activation)
        return next((value for value in named if value is not None), None)


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that concern a classifier or the width of vectors."""

    num_labels: int | None = None
    id2label: dict[int, str] = {}
    problem_type: str | None = None
    sentence_transformers: dict[str, object] = {}
    sbert_ce_default_activation_function: str | None = None
    classifier_from_token: tuple[str | int, ...] | None = None
    method: str | None = None
    is_original_qwen3_reranker: bool = False
    use_sep_token: bool | None = None
    is_matryoshka: bool = False
    matryoshka_dimensions: tuple[int, ...] | None = None
    matryoshka_dims: tuple[int, ...] | None = None


def read_pooling(folder: Path, config: ModelConfig, pooler_config: Mapping[str, object]) -> PoolingConfig:
    asked = _read_asked(pooler_config)
    head = _read_head(config)
    modules = read_modules(folder)
    texts = _as_queries(read_texts(folder), config.architecture)
    splade = Splade() if _upper(asked.pooling_type) == "SPLADE" else modules and modules.splade
    if splade and not (folder / "config_sentence_transformers.json").exists():
        texts = msgspec.structs.replace(texts, similarity="dot")
    modes, tokens = _asked_modes(asked)
    weights, vectors = read_flag_heads(folder)
    if modules is None:
        modules = Modules(normalize=True)
    elif modules.mask is not None or modules.token_pooling is not None:
        vectors = token_vectors(folder, modules.mask, modules.token_pooling)
    elif not modules.modes:
        modules = msgspec.structs.replace(modules, normalize=True)  # vectors for tokens are compared by angle
    classifier_tokens, two_way = _classifier_tokens(folder, head, modules, asked)
    ranks = config.architecture == JINA_RANKING  # whose own code has these numbers
    num_labels = 1 if ranks else _num_labels(head, classifier_tokens, two_way)
    widths = head.matryoshka_dimensions or head.matryoshka_dims or ()
    return PoolingConfig(
        modes=modes or modules.modes,
        tokens=tokens,
        include_prompt=modules.include_prompt,
        step_tag_id=asked.step_tag_id,
        token_steps=modules.token_steps,
        steps=modules.steps,
        normalize=modules.normalize,
        dimensions=asked.dimensions or texts.truncate_dim,
        sparse=splade or weights,
        static_queries=query_weights(folder) is not None,
        ends_sparse=modules.is_sparse and modules.splade is None,
        token_vectors=vectors or TokenVectors(),
        entities=read_entities(config),
        matryoshka=head.is_matryoshka or bool(widths),
        matryoshka_dimensions=widths,
        num_labels=num_labels,
        labels=_labels(head, num_labels),
        activation=_activation(head, texts, num_labels),
        classifier_tokens=classifier_tokens,
        two_way=two_way,
        logit_mean=_logit_mean(asked, _JINA_MEAN if ranks else 0.0),
        logit_sigma=1.0 if asked.logit_sigma is None else asked.logit_sigma,
        task=_task(asked.task),
        use_activation=asked.activates,
        max_embed_len=asked.max_embed_len,
        texts=texts,
        use_sep_token=head.use_sep_token,
    )


def _logit_mean(asked: PoolerConfig, usual: float) -> float:
    return next((value for value in (asked.logit_mean, asked.logit_bias) if value is not None), usual)


def _as_queries(texts: TextFacts, architecture: str) -> TextFacts:
    if architecture == JINA_RANKING:
        return msgspec.structs.replace(texts, pair_end=_JINA_PAIR_END)
    if architecture not in _QUERIES:
        return texts
    before, behind = _QUERIES[architecture]
    prompts = {"query": before, **texts.prompts}
    return msgspec.structs.replace(
        texts,
        prompts=prompts,
        default_prompt_name="query",
        suffix=behind,
        has_special=before.startswith("<bos>"),
    )


def scores_by_tokens(config: ModelConfig) -> bool:
    """Whether config.json (or --hf-overrides) makes a classifier out of tokens of the vocabulary."""
    head = _read_head(config)
    return head.classifier_from_token is not None or head.is_original_qwen3_reranker


def _read_asked(pooler_config: Mapping[str, object]) -> PoolerConfig:
    try:
        asked = msgspec.convert(dict(pooler_config), PoolerConfig)
    except msgspec.ValidationError as error:
        fields = ", ".join(PoolerConfig.__struct_fields__)
        raise ConfigError(f"--pooler-config: {error}; its fields are {fields}") from None
    if asked.logit_sigma == 0:
        raise ConfigError("--pooler-config: logit_sigma cannot be 0 (division by zero)")
    if asked.max_embed_len is not None and not asked.enable_chunked_processing:
        raise ConfigError(
            "--pooler-config: max_embed_len is the length of texts that are read in windows: say "
            '"enable_chunked_processing": true, too'
        )
    if asked.dimensions is not None and asked.dimensions < 1:
        raise ConfigError(f"--pooler-config: dimensions is {asked.dimensions}, but must be at least 1")
    return asked


def _read_head(config: ModelConfig) -> _Head:
    fields = {**config.raw, **config.whole}  # a composite has them beside its text's config
    place = f"config.json of this {config.architecture}"
    return typed(fields, _Head, place, strict=False)  # labels are numbered by strings


def _asked_modes(asked: PoolerConfig) -> tuple[tuple[Mode, ...], Literal["ALL", "STEP"] | None]:
    """The modes for texts and for tokens; `pooling_type` stands for whichever of the two knows its word."""
    general = _upper(asked.pooling_type)
    of_text, of_tokens = _upper(asked.seq_pooling_type), _upper(asked.tok_pooling_type)
    if general is not None and (of_text or of_tokens):
        raise ConfigError("--pooler-config: set pooling_type, or seq_pooling_type and tok_pooling_type")
    if general in ("ALL", "STEP"):
        of_tokens = general
    elif general == "SPLADE":  # no vector, but weights of the vocabulary
        general = None
    elif general is not None:
        of_text = general
    if of_text is not None and of_text not in _MODES:
        raise ConfigError(
            f"--pooler-config: no pooling {of_text}; there are {', '.join(_MODES)}, ALL, STEP, SPLADE"
        )
    if of_tokens not in (None, "ALL", "STEP"):
        raise ConfigError(f"--pooler-config: tok_pooling_type is {of_tokens!r}, but must be ALL or STEP")
    return () if of_text is None else (of_text,), of_tokens


def _upper(word: str | None) -> str | None:
    return None if word is None else word.upper()


_TASKS: dict[str, Task | None] = {
    "embed": "embed",
    "token_embed": "token_embed",
    "classify": "classify",
    "token_classify": "token_classify",
    "sparse_embed": "sparse_embed",
    "ner": "ner",
    # As vLLM 0.11 called them; "encode" was whatever the model did.
    "score": "classify",
    "reward": "token_classify",
    "encode": None,
}


def _task(name: str | None) -> Task | None:
    if name is None:
        return None
    if name not in _TASKS:
        raise ConfigError(f"--pooler-config: no task {name!r}; there are {', '.join(_TASKS)}")
    return _TASKS[name]


def _classifier_tokens(
    folder: Path, head: _Head, modules: Modules, asked: PoolerConfig
) -> tuple[tuple[int, ...], bool]:
    """Find (the tokens whose logits are the labels, whether two of them make one label)."""
    if asked.returned_token_ids:
        return asked.returned_token_ids, False
    named, method = head.classifier_from_token, head.method
    if head.is_original_qwen3_reranker:
        named, method = named or tuple(_QWEN3_RERANKER_TOKENS), method or TWO_WAY
    if named is None:
        return modules.score_tokens, len(modules.score_tokens) == 2
    if method not in (TWO_WAY, PLAIN):
        raise ConfigError(
            f"config.json: 'classifier_from_token' needs a 'method', not {method!r}. There are {TWO_WAY} "
            f"(two tokens, the false one first, give one score) and {PLAIN} (each token is a label)."
        )
    if method == TWO_WAY and len(named) != 2:
        raise ConfigError(
            f"config.json: {TWO_WAY} needs two tokens in 'classifier_from_token', not {len(named)}"
        )
    return _token_ids(folder, named), method == TWO_WAY


def _token_ids(folder: Path, names: tuple[str | int, ...]) -> tuple[int, ...]:
    if all(isinstance(name, int) for name in names):
        return cast("tuple[int, ...]", names)
    texts = [name for name in names if isinstance(name, str)]
    found = iter(find_token_ids(folder, texts))
    ids = [name if isinstance(name, int) else next(found) for name in names]
    if None in ids:
        raise ConfigError(
            f"'classifier_from_token' names {names[ids.index(None)]!r}, which is not a token of "
            f"{folder / 'tokenizer.json'}; words that make several tokens cannot be used"
        )
    return tuple(cast("list[int]", ids))


def _num_labels(head: _Head, tokens: tuple[int, ...], two_way: bool) -> int:
    if tokens:
        return 1 if two_way else len(tokens)
    return head.num_labels or len(head.id2label) or 2


def _labels(head: _Head, num_labels: int) -> tuple[str, ...]:
    """The labels' names; empty if --hf-overrides has made more or fewer labels than config.json names."""
    if sorted(head.id2label) != list(range(num_labels)):
        return ()
    return tuple(head.id2label[index] for index in range(num_labels))


def _activation(head: _Head, texts: TextFacts, num_labels: int) -> Activation:
    usual: Activation = "softmax" if num_labels > 1 else "sigmoid"
    match head.problem_type:
        case "regression":
            return "identity"
        case "single_label_classification":
            return usual
        case "multi_label_classification":
            return "sigmoid"
        case _:
            pass
    of_config = head.sentence_transformers.get("activation_fn")
    named = of_config or head.sbert_ce_default_activation_function or texts.activation
    if named is None:
        return usual
    known: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": usual}
    library, _, name = str(named).rpartition(".")
    if not library.startswith("torch.nn.modules") or name not in known:
        raise ConfigError(
            f"the checkpoint asks for the activation {named!r}; supported are Identity, Sigmoid and Softmax "
            "of torch.nn.modules"
        )
    return known[name]
