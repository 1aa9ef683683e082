"""The files that sentence-transformers puts beside a checkpoint, read as that library reads them.

modules.json lists what the hidden states pass through: pooling, projections, norms. A module that is not
known here is an error, for a vector that lacks a step looks as good as a right one. No torch: weights are not
read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar, cast, get_args

import msgspec

from models.config import ConfigError
from models.media.files import has_files
from models.plain_files import lies_within, read_text_bytes

Mode = Literal["CLS", "LAST", "MEAN", "MAX", "MEAN_SQRT_LEN", "WEIGHTED_MEAN"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan", "maxsim", "meanmaxsim"]
"""The last two compare a vector for each token; the mean is over the tokens of the query."""

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
_KINDS = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout", "LogitScore")
_LIBRARIES = ("sentence_transformers.", "pylate.")
_TRANSFORMER_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_PADDING = frozenset(
    ("padding", "padding_side", "pad_to_multiple_of", "truncation", "return_tensors", "logits_to_keep")
)
"""Arguments of a processor on which no vector depends."""
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


Step = Dense | LayerNorm | Normalize


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


class ChatForm(msgspec.Struct, frozen=True, kw_only=True):
    """How each text becomes a conversation, in the form in which the model was trained."""

    add_generation_prompt: bool = False
    kwargs: dict[str, object] = {}
    """Variables for the chat template."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds its own tokens to what the template has written."""


class TextFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the server needs: how texts become tokens, and how vectors are compared."""

    max_len: int | None = None
    lower_case: bool = False
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    suffix: str = ""
    """What is written behind each text."""
    has_special: bool = False
    """Whether the special tokens are in what is written, so that the tokenizer adds none."""
    chat: ChatForm | None = None
    """Set if the chat template writes each text as what a user says, and an instruction as the system."""
    similarity: Similarity = "cosine"
    """The measure by which two texts are compared."""
    truncate_dim: int | None = None
    activation: str | None = None
    """The activation of a cross-encoder's scores, as the name of a class of torch.nn."""


class _Module(msgspec.Struct):
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


class _TransformerFile(msgspec.Struct):
    max_seq_length: int | None = None
    do_lower_case: bool = False
    modality_config: dict[str, dict[str, object]] = {}
    processing_kwargs: dict[str, dict[str, object]] = {}


class _SettingsFile(msgspec.Struct):
    prompts: dict[str, str | None] = {}
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    truncate_dim: int | None = None
    activation_fn: str | None = None


def makes_vectors(folder: Path) -> bool:
    """Whether the checkpoint was made for vectors, whatever its architecture is called."""
    return any(module.kind == "Pooling" for module in _modules(folder))


def makes_scores(folder: Path) -> bool:
    """Whether a model that generates scores by the logits of one or two tokens."""
    return any(module.kind == "LogitScore" for module in _modules(folder))


def read_modules(folder: Path) -> Modules | None:
    """Read modules.json and the files it names; None if the folder has no modules.json."""
    modules = _modules(folder)
    if not modules:
        return None
    chain = _Chain(folder)
    for module in modules:
        chain.add(module)
    return chain.result()


def read_texts(folder: Path) -> TextFacts:
    settings_path = folder / "config_sentence_transformers.json"
    settings = _read(settings_path, _SettingsFile) if settings_path.exists() else _SettingsFile()
    places = [folder / module.path for module in _modules(folder) if module.kind == "Transformer"] or [folder]
    paths = (place / name for place in places for name in _TRANSFORMER_FILES)
    transformer_path = next((path for path in paths if path.is_file()), None)
    transformer = _read(transformer_path, _TransformerFile) if transformer_path else _TransformerFile()
    embeds = any(module.kind == "Pooling" for module in _modules(folder))
    chat = None
    if embeds and transformer_path is not None:  # pairs are written by a template anyway
        chat = _chat_form(transformer_path, transformer, has_processor=has_files(folder))
    prompts = {name: prompt or "" for name, prompt in settings.prompts.items()}
    if settings.default_prompt_name is not None and settings.default_prompt_name not in prompts:
        raise ConfigError(
            f"{settings_path}: 'default_prompt_name' is {settings.default_prompt_name!r}, "
            f"but there are {', '.join(prompts) or 'no prompts'}"
        )
    return TextFacts(
        max_len=transformer.max_seq_length,
        lower_case=transformer.do_lower_case,
        prompts=prompts,
        default_prompt_name=settings.default_prompt_name,
        similarity=_similarity(settings_path, settings.similarity_fn_name),
        truncate_dim=settings.truncate_dim,
        activation=settings.activation_fn,
        chat=chat,
    )


def _chat_form(path: Path, file: _TransformerFile, *, has_processor: bool) -> ChatForm | None:
    message = file.modality_config.get("message")
    if message is None:
        return None
    for name, usual in (("method", "forward"), ("method_output_name", "last_hidden_state")):
        if message.get(name, usual) != usual:
            raise ConfigError(
                f"{path}: '{name}' of 'message' in 'modality_config' is {message[name]!r}, and only "
                f"{usual!r} is served"
            )
    for kind, given in file.processing_kwargs.items():
        if kind != "chat_template" and (unknown := sorted(given.keys() - _PADDING)):
            raise ConfigError(
                f"{path}: '{unknown[0]}' of '{kind}' in 'processing_kwargs' is not supported: vectors would "
                "differ. If it is one of a picture's settings, remove it there and say it with "
                "--mm-processor-kwargs."
            )
    kwargs = dict(file.processing_kwargs.get("chat_template", {}))
    kwargs.pop("restore_suffix", None)  # which is about texts that are cut
    generation = kwargs.pop("add_generation_prompt", False) is True
    return ChatForm(add_generation_prompt=generation, kwargs=kwargs, add_special_tokens=has_processor)


def _similarity(path: Path, name: str | None) -> Similarity:
    known = {similarity: similarity for similarity in get_args(Similarity)}
    similarity = known.get((name or "cosine").lower())  # PyLate writes MaxSim
    if similarity is None:
        raise ConfigError(f"{path}: 'similarity_fn_name' is {name!r}, but must be one of {', '.join(known)}")
    return similarity


class _Chain:
    """The modules collected in order; an order or a module that we could not follow is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modes: tuple[Mode, ...] = ()
        self.include_prompt = True
        self.token_steps: list[Step] = []
        self.steps: list[Step] = []
        self.score_tokens: tuple[int, ...] = ()

    def add(self, module: _Module) -> None:
        path = self.folder / module.path / "config.json"
        match module.kind:
            case "Transformer" | "Dropout":
                pass
            case "Pooling":
                self._add_pooling(path)
            case "Dense":
                self._add_dense(module, path)
            case "LayerNorm":
                norm = msgspec.structs.replace(_read(path, LayerNorm), folder=module.path)
                self._add_step(module, norm, _SENTENCE, None)
            case "Normalize":
                file = _read(path, _NormalizeFile) if path.is_file() else _NormalizeFile()
                self._add_step(module, Normalize(), file.module_input_name, file.module_output_name)
            case "LogitScore":
                file = _read(path, _ScoreFile)
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
        )

    def _add_pooling(self, path: Path) -> None:
        if self.modes:
            raise ConfigError(f"{self.folder / 'modules.json'} has more than one Pooling")
        fields = _read(path, dict[str, object])
        self.modes = _pooling_modes(path, fields)
        self.include_prompt = fields.get("include_prompt", True) is not False

    def _add_dense(self, module: _Module, path: Path) -> None:
        step = msgspec.structs.replace(_read(path, Dense), folder=module.path)
        default = _TOKENS if module.type.startswith("pylate.") else _SENTENCE
        self._add_step(module, step, step.module_input_name or default, step.module_output_name)

    def _add_step(self, module: _Module, step: Step, reads: str, writes: str | None) -> None:
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


def _modules(folder: Path) -> list[_Module]:
    path = folder / "modules.json"
    if not path.exists():
        return []
    modules = _read(path, list[_Module])
    if outside := [module.path for module in modules if not lies_within(module.path)]:
        raise ConfigError(f"{path}: {outside[0]!r} is outside of the model's folder")
    return sorted(modules, key=lambda module: module.idx)


_File = TypeVar("_File")


def _read(path: Path, kind: type[_File]) -> _File:
    try:
        return msgspec.json.decode(read_text_bytes(path), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
