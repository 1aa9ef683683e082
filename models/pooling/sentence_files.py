"""The files that sentence-transformers puts beside a checkpoint, read as that library reads them.

modules.json lists what the hidden states pass through: pooling, projections, norms. A module that is not
known here is an error, for a vector that lacks a step looks as good as a right one. No torch: weights are not
read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar, cast

import msgspec

from models.config import ConfigError
from models.plain_files import lies_within, read_text_bytes
from models.pooling.representations import PUNCTUATION, ExpansionFile, MaskFile, Splade, TokenPooling

Mode = Literal["CLS", "LAST", "MEAN", "MAX", "MEAN_SQRT_LEN", "WEIGHTED_MEAN"]
_MODES: dict[str, Mode] = {
    "cls": "CLS",
    "max": "MAX",
    "mean": "MEAN",
    "mean_sqrt_len_tokens": "MEAN_SQRT_LEN",
    "weightedmean": "WEIGHTED_MEAN",
    "lasttoken": "LAST",
}
# The flags of files from before version 5.4, in the order in which several modes are concatenated.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
TRANSFORMERS = ("Transformer", "MLMTransformer")
_KINDS = (
    *(*TRANSFORMERS, "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout", "LogitScore"),
    "StaticEmbedding",
    *("SpladePooling", "SparseAutoEncoder", "MultiVectorMask", "HierarchicalTokenPooling"),
)
_LIBRARIES = ("sentence_transformers.", "pylate.")
_TOKENS, _SENTENCE = "token_embeddings", "sentence_embedding"


class Dense(msgspec.Struct, frozen=True, tag=True):
    """A linear layer with an activation, by the names of its fields in its config.json."""

    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    use_residual: bool = False
    """Whether the input is added to the result, itself projected if the widths differ."""
    module_input_name: str | None = None
    module_output_name: str | None = None
    folder: str = ""
    """The folder of its weights, within the checkpoint."""


class LayerNorm(msgspec.Struct, frozen=True, tag=True):
    dimension: int
    folder: str = ""


class Normalize(msgspec.Struct, frozen=True, tag=True):
    pass


class SparseAutoEncoder(msgspec.Struct, frozen=True, tag=True):
    """Makes a vector wide, and keeps its `k` largest numbers, as far as they are above zero."""

    input_dim: int
    hidden_dim: int = 512
    k: int = 8
    normalize: bool = False
    folder: str = ""


Step = Dense | LayerNorm | Normalize | SparseAutoEncoder


class Modules(msgspec.Struct, frozen=True, kw_only=True):
    """The steps from hidden states to vectors or scores, as modules.json lists them."""

    modes: tuple[Mode, ...] = ()
    """The modes of the Pooling module; empty if there is none, so that every token has a vector."""
    include_prompt: bool = True
    token_steps: tuple[Step, ...] = ()
    """The steps for each token, before pooling."""
    steps: tuple[Step, ...] = ()
    """The steps for the pooled vectors."""
    normalize: bool = False
    """Whether vectors are brought to length 1 at the end."""
    score_tokens: tuple[int, ...] = ()
    """The tokens by whose logits a causal model scores: (false, true), or (true,) alone."""
    splade: Splade | None = None
    mask: MaskFile | None = None
    token_pooling: TokenPooling | None = None

    @property
    def is_sparse(self) -> bool:
        return self.splade is not None or any(isinstance(step, SparseAutoEncoder) for step in self.steps)


class Module(msgspec.Struct):
    type: str
    path: str = ""
    idx: int = 0

    @property
    def kind(self) -> str:
        """The name of the class, with its module unless that belongs to a library that we know."""
        return self.type.rpartition(".")[2] if self.type.startswith(_LIBRARIES) else self.type


class _NormalizeFile(msgspec.Struct):
    module_input_name: str = _SENTENCE
    module_output_name: str | None = None


class _ScoreFile(msgspec.Struct):
    true_token_id: int
    false_token_id: int | None = None


class SettingsFile(msgspec.Struct):
    prompts: dict[str, str | None] = {}
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    truncate_dim: int | None = None
    activation_fn: str | None = None
    max_active_dims: int | None = None
    model_type: str | None = None
    # PyLate's
    query_prefix: str | None = None
    document_prefix: str | None = None
    query_length: int | None = None
    document_length: int | None = None
    do_query_expansion: bool | None = None
    attend_to_expansion_tokens: bool | None = None
    skiplist_words: tuple[str, ...] | None = None

    @property
    def is_pylate(self) -> bool:
        """Whether PyLate up to version 3 wrote this: what it computes is not all in modules.json."""
        return self.model_type == "ColBERT"

    @property
    def expansion(self) -> ExpansionFile | None:
        marks = (self.query_prefix, self.document_prefix, self.query_length, self.document_length)
        if self.do_query_expansion is False or not (self.is_pylate or any(marks)):
            return None
        return ExpansionFile("fixed", self.query_length or 32, self.attend_to_expansion_tokens is True)

    @property
    def all_prompts(self) -> dict[str, str]:
        prompts = {name: prompt or "" for name, prompt in self.prompts.items()}
        for name, prefix in (("query", self.query_prefix), ("document", self.document_prefix)):
            if prefix:
                prompts[name] = prefix + prompts.get(name, "").removeprefix(prefix)
        return prompts


def makes_vectors(folder: Path) -> bool:
    """Whether the checkpoint was made for vectors, whatever its architecture is called."""
    kinds = {module.kind for module in list_modules(folder)}
    return not kinds.isdisjoint(("Pooling", "SpladePooling", "MultiVectorMask"))


def read_markers(folder: Path) -> list[str]:
    """Tokens of the vocabulary that PyLate writes before texts, which are one token each."""
    settings = read_settings(folder)
    prefixes = [prefix for prefix in (settings.query_prefix, settings.document_prefix) if prefix]
    return [name for prefix in prefixes if prefix.strip() for name in (prefix, prefix.split()[0])]


def makes_scores(folder: Path) -> bool:
    """Whether a model that generates scores by the logits of one or two tokens."""
    return any(module.kind == "LogitScore" for module in list_modules(folder))


def read_modules(folder: Path) -> Modules | None:
    """Read modules.json and the files it names; None if the folder has no modules.json."""
    modules = list_modules(folder)
    if not modules:
        return None
    chain = _Chain(folder)
    for module in modules:
        chain.add(module)
    found, settings = chain.result(), read_settings(folder)
    if not settings.is_pylate:
        return found
    words = settings.skiplist_words
    mask = found.mask or (PUNCTUATION if words is None else MaskFile(words))
    return msgspec.structs.replace(found, mask=mask, normalize=True)


def read_settings(folder: Path) -> SettingsFile:
    path = folder / "config_sentence_transformers.json"
    return read_file(path, SettingsFile) if path.exists() else SettingsFile()


class _Chain:
    """The modules collected in order; an order or a module that we could not follow is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modes: tuple[Mode, ...] = ()
        self.include_prompt = True
        self.token_steps: list[Step] = []
        self.steps: list[Step] = []
        self.score_tokens: tuple[int, ...] = ()
        self.splade: Splade | None = None
        self.mask: MaskFile | None = None
        self.token_pooling: TokenPooling | None = None

    def add(self, module: Module) -> None:
        path = self.folder / module.path / "config.json"
        if self.token_pooling is not None or (self.splade is not None and module.kind != "Dropout"):
            raise ConfigError(
                f"{self.folder / 'modules.json'}: {module.kind} behind the pooling of tokens is not supported"
            )
        match module.kind:
            case "Transformer" | "MLMTransformer" | "Dropout":
                pass
            case "StaticEmbedding":
                self.modes = ("MEAN",)
            case "SpladePooling":
                self.splade = read_file(path, Splade)
            case "SparseAutoEncoder":
                step = msgspec.structs.replace(read_file(path, SparseAutoEncoder), folder=module.path)
                self._add_step(module, step, _SENTENCE, None)
            case "MultiVectorMask":
                self.mask = read_file(path, MaskFile)
            case "HierarchicalTokenPooling":
                self.token_pooling = read_file(path, TokenPooling)
            case "Pooling":
                self._add_pooling(path)
            case "Dense":
                self._add_dense(module, path)
            case "LayerNorm":
                norm = msgspec.structs.replace(read_file(path, LayerNorm), folder=module.path)
                self._add_step(module, norm, _SENTENCE, None)
            case "Normalize":
                file = read_file(path, _NormalizeFile) if path.is_file() else _NormalizeFile()
                self._add_step(module, Normalize(), file.module_input_name, file.module_output_name)
            case "LogitScore":
                file = read_file(path, _ScoreFile)
                both = (file.false_token_id, file.true_token_id)
                self.score_tokens = tuple(token for token in both if token is not None)
            case _:
                raise ConfigError(
                    f"{self.folder / 'modules.json'} has the module {module.type}, which is not supported: "
                    f"without it the vectors would be wrong. Supported are {', '.join(_KINDS)}."
                )

    def result(self) -> Modules:
        last = self.steps if self.modes else self.token_steps
        normalize = bool(last) and isinstance(last[-1], Normalize)
        if normalize:
            last.pop()
        return Modules(
            modes=self.modes,
            include_prompt=self.include_prompt,
            token_steps=tuple(self.token_steps),
            steps=tuple(self.steps),
            normalize=normalize,
            score_tokens=self.score_tokens,
            splade=self.splade,
            mask=self.mask,
            token_pooling=self.token_pooling,
        )

    def _add_pooling(self, path: Path) -> None:
        if self.modes:
            raise ConfigError(f"{self.folder / 'modules.json'} has more than one Pooling")
        fields = read_file(path, dict[str, object])
        self.modes = _pooling_modes(path, fields)
        self.include_prompt = fields.get("include_prompt", True) is not False

    def _add_dense(self, module: Module, path: Path) -> None:
        step = msgspec.structs.replace(read_file(path, Dense), folder=module.path)
        default = _TOKENS if module.type.startswith("pylate.") else _SENTENCE
        self._add_step(module, step, step.module_input_name or default, step.module_output_name)

    def _add_step(self, module: Module, step: Step, reads: str, writes: str | None) -> None:
        expected = _SENTENCE if self.modes else _TOKENS
        if reads != expected or (writes or reads) != expected:
            raise ConfigError(
                f"{self.folder / module.path}: a {module.kind} that turns {reads} into {writes or reads} "
                f"{'after' if self.modes else 'before'} pooling is not supported; "
                f"here it must turn {expected} into {expected}"
            )
        (self.steps if self.modes else self.token_steps).append(step)


def _pooling_modes(path: Path, fields: dict[str, object]) -> tuple[Mode, ...]:
    named = fields.get("pooling_mode")
    if named is None:
        flags = [name for name in fields if name.startswith("pooling_mode_") and fields[name] is True]
        if unknown := [name for name in flags if name not in _FLAGS]:
            raise ConfigError(f"{path}: {unknown[0]} is not supported; there are {', '.join(_FLAGS)}")
        names: list[object] = [_FLAGS[flag] for flag in _FLAGS if flag in flags] or ["mean"]
    else:
        names = cast("list[object]", named) if isinstance(named, list) else [named]
    if unknown := [name for name in names if name not in _MODES]:
        raise ConfigError(f"{path}: the pooling mode {unknown[0]!r} is none of {', '.join(_MODES)}")
    return tuple(_MODES[str(name)] for name in names)


def list_modules(folder: Path) -> list[Module]:
    path = folder / "modules.json"
    if not path.exists():
        return []
    modules = read_file(path, list[Module])
    if outside := [module.path for module in modules if not lies_within(module.path)]:
        raise ConfigError(f"{path}: {outside[0]!r} is outside of the model's folder")
    return sorted(modules, key=lambda module: module.idx)


_File = TypeVar("_File")


def read_file(path: Path, kind: type[_File]) -> _File:
    try:
        return msgspec.json.decode(read_text_bytes(path), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
