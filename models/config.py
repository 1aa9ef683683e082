"""The facts about a checkpoint that every floor needs, read from its config.json, never from its code.

Facts that concern one family only stay in `raw` and are read in that family's file. No torch and no
transformers: the server and the engine read this too, and must answer in milliseconds.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar, cast

import msgspec

from models.composites import text_part, unnested
from models.config_limits import MOST_FEATURES, MOST_HEADS, MOST_LAYERS, check_fields, check_projection
from models.plain_files import ConfigError, read_object, stored_dtype, typed
from models.weight_coding import SavedQuantization, find_quantization

DTYPES = ("float32", "bfloat16", "float16")

LARGEST_SIZE = 1 << 31

Size = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_SIZE)]
"""The type of a family's own fields that count features."""
Eps = Annotated[float, msgspec.Meta(ge=0, lt=1)]
"""The type of a family's own fields that norms add to a variance."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model, in the same words for every family."""

    architecture: str
    """The name under which the registry finds the model's class, e.g. LlamaForCausalLM."""
    architectures: tuple[str, ...]
    """All names that config.json gives, of which `architecture` is the first until one is chosen."""
    dtype: str
    """The number type in which the checkpoint was saved: float32, bfloat16 or float16."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    """The number of positions that the model was made for; the default of --max-model-len."""
    any_length: bool = False
    """Whether longer texts can be served, too: layers see no positions, or distances up to one alone."""
    tie_word_embeddings: bool | None
    """Whether the LM head is the embedding's matrix; None if config.json does not say."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """All ids that end a text, also those of generation_config.json; the primary one comes first."""
    raw: dict[str, object]
    """config.json, after --hf-overrides; for composite checkpoints, its text part."""
    whole: dict[str, object] = {}
    """config.json, after --hf-overrides, if `raw` is a part of it."""
    quantization: SavedQuantization | None = None
    """The description of how the weights were quantized; None if they were not."""
    problems: dict[str, str] = {}
    """Fields above that config.json leaves out, or that do not fit each other, and what is wrong with them.

    Their values here are guesses. Not every architecture has all fields, so this is no error by itself."""
    warnings: tuple[str, ...] = ()
    """Mistakes in the files with which the model can be served all the same."""

    def require(self, *names: str) -> None:
        """Raise if there is a problem with one of the fields `names`, or, without names, with any field."""
        for name, problem in self.problems.items():
            if not names or name in names:
                raise ConfigError(problem)

    @property
    def brings_code(self) -> bool:
        """Whether the checkpoint holds Python code for a causal language model."""
        auto_map = self.raw.get("auto_map")
        return isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map

    @property
    def output_size(self) -> int:
        """The width of the trunk's hidden states. OPT may narrow them to the width of its embeddings, and
        those of models that compare pictures with texts are projected to vectors."""
        width = self.raw.get("word_embed_proj_dim", self.raw.get("projection_size"))
        return width if isinstance(width, int) else self.hidden_size


def read_config(folder: Path, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    """Read the config of the checkpoint in `folder`, with `overrides` (--hf-overrides) merged into it."""
    path = folder / "config.json"
    whole = unnested(_merged(_read_object(path), overrides or {}))
    check_fields(path, whole)
    text = text_part(whole)
    raw = whole if text is None else dict(text)
    fields = _Fields(path, raw, whole)

    widths = ("hidden_size", "n_embd", "n_embed", "d_model", "dim")
    hidden_size = fields.size("hidden_size", widths, most=MOST_FEATURES)
    attends = fields.get("model_type") not in _WITHOUT_ATTENTION
    names = "decoder_attention_heads", "num_attention_heads", "n_head", "n_heads", "num_heads"
    if attends:
        num_heads = fields.size("num_heads", names, most=MOST_HEADS)
    else:
        num_heads = fields.positive(*names, default=hidden_size)
    head_dim = _head_dim(fields, hidden_size, num_heads)
    check_projection(path, num_heads if attends else 1, head_dim)
    architectures = _architectures(path, whole)
    vocab_size = fields.size("vocab_size", ("vocab_size",))
    eos_token_ids = _eos_token_ids(folder, fields, vocab_size)
    return ModelConfig(
        architecture=architectures[0],
        architectures=architectures,
        dtype=_dtype(folder, fields),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=_num_layers(fields),
        num_heads=num_heads,
        num_kv_heads=1 if has_latent_cache(raw) else _num_kv_heads(fields, num_heads),
        head_dim=head_dim,
        max_len=_max_len(fields),
        any_length=not attends or fields.get("model_type") in _BY_DISTANCE,
        tie_word_embeddings=_tied(fields),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=eos_token_ids,
        raw=raw,
        whole={} if text is None else whole,
        quantization=find_quantization(folder, whole, text or {}),
        problems=fields.problems,
        warnings=tuple(fields.warnings),
    )


FamilyFields = TypeVar("FamilyFields", bound=msgspec.Struct)


def family_fields(config: ModelConfig, kind: type[FamilyFields]) -> FamilyFields:
    """Read the fields of config.json that concern one family only into the struct that it declares."""
    return typed(config.raw, kind, f"config.json of this {config.architecture}")


def check_served(config: ModelConfig, fields: msgspec.Struct, **served: tuple[object, ...]) -> None:
    """Refuse values of a family's fields that its class does not compute. `served`: those that it does."""
    for name, values in served.items():
        if (value := getattr(fields, name)) not in values:
            raise ConfigError(
                f"config.json of this {config.architecture}: the field {name!r} is {value!r}, but must be "
                f"{' or '.join(map(repr, values))}"
            )


Default = TypeVar("Default", bool, None)


class _Fields:
    """Typed look-ups in a config: first in its text part, then at its top level."""

    def __init__(self, path: Path, raw: Mapping[str, object], whole: Mapping[str, object]) -> None:
        self.path = path
        self.raw = raw
        self.whole = whole
        self.problems: dict[str, str] = {}
        self.warnings: list[str] = []

    def find(self, *names: str) -> tuple[str, object]:
        """The first of `names` that has a value, and the value: families name the same thing differently."""
        for scope in (self.raw, self.whole):
            for name in names:
                if scope.get(name) is not None:
                    return name, scope[name]
        return names[0], None

    def get(self, *names: str) -> object:
        return self.find(*names)[1]

    def size(self, fact: str, names: tuple[str, ...], guess: int = 1, most: int = LARGEST_SIZE) -> int:
        """A positive number that not every architecture has: if it is missing, a problem is noted."""
        if self.get(*names) is None:
            self.problems[fact] = f"{self.path}: the field {_alternatives(names)} is missing"
        return self.positive(*names, default=guess, most=most)

    def positive(self, *names: str, default: int = 1, most: int = LARGEST_SIZE) -> int:
        name, value = self.find(*names)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.wrong(name, value, f"a positive integer of at most {most}")
        return value

    def boolean(self, name: str, default: Default) -> bool | Default:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """The ids of a field that holds an id, a list of ids, or nothing."""
        value = self.get(name)
        if value is None:
            return ()
        ids = cast("list[object]", value) if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise self.wrong(name, cast("object", value), "a token id or a list of token ids")
        return tuple(cast("list[int]", ids))

    def wrong(self, name: str, value: object, wanted: str) -> ConfigError:
        shown = reprlib.repr(value)  # of a file that anybody may have written
        return ConfigError(f"{self.path}: the field '{name}' is {shown}, but must be {wanted}")


def _alternatives(names: tuple[str, ...]) -> str:
    """Write names for an error: 'a' (or 'b', 'c')."""
    first, *others = (f"'{name}'" for name in names)
    return f"{first} (or {', '.join(others)})" if others else first


def _read_object(path: Path) -> dict[str, object]:
    try:
        if not path.exists():
            raise ConfigError(
                f"{path} does not exist; a model's folder holds config.json, its *.safetensors and "
                "tokenizer.json"
            )
    except OSError as error:
        raise ConfigError(str(error)) from None
    return read_object(path, _special_float)


def _special_float(value: dict[str, object]) -> object:
    """transformers writes infinity, which JSON has no word for, as {"__float__": "Infinity"}."""
    name = value.get("__float__")
    return float(name) if len(value) == 1 and isinstance(name, str) else value


def _merged(base: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Write `changes` over a copy of `base`: objects are merged field by field, all else is replaced."""
    result = dict(base)
    for name, change in changes.items():
        old = result.get(name)
        if isinstance(change, Mapping) and isinstance(old, Mapping):
            change = _merged(cast("Mapping[str, object]", old), cast("Mapping[str, object]", change))
        result[name] = change
    return result


def _architectures(path: Path, whole: Mapping[str, object]) -> tuple[str, ...]:
    value = whole.get("architectures")
    names = cast("list[object]", value) if isinstance(value, list) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{path}: the field 'architectures' must be a list that names the model's class; "
            """say which with --hf-overrides '{"architectures": ["LlamaForCausalLM"]}'"""
        )
    return tuple(cast("list[str]", names))


def _num_layers(fields: _Fields) -> int:
    names = "decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers"
    kinds = fields.get("layers_block_type")
    if isinstance(kinds, list) and kinds and fields.get(*names) is None:  # Nemotron-H counts them so
        return min(len(cast("list[object]", kinds)), MOST_LAYERS)
    return fields.size("num_layers", names, most=MOST_LAYERS)


def has_latent_cache(raw: Mapping[str, object]) -> bool:
    """Whether attention caches one latent for all heads: numbers of key/value heads then mean nothing."""
    return raw.get("kv_lora_rank") is not None and raw.get("qk_rope_head_dim") is not None


def _num_kv_heads(fields: _Fields, num_heads: int) -> int:
    # GPT-BigCode and Falcon wrote multi_query for one shared K/V head before the number had a name.
    shared = fields.boolean("multi_query", default=False)
    names = ("num_key_value_heads", "num_kv_heads")
    if shared and not fields.boolean("new_decoder_architecture", default=False):
        names = names[:1]  # Falcon's first models have the other one beside, which means nothing there
    num_kv_heads = fields.positive(*names, default=1 if shared else num_heads)
    if num_heads % num_kv_heads:
        fields.problems["num_kv_heads"] = (
            f"{fields.path}: {num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly "
            "('num_attention_heads' must be a multiple of 'num_key_value_heads')"
        )
    return num_kv_heads


def _head_dim(fields: _Fields, hidden_size: int, num_heads: int) -> int:
    if has_latent_cache(fields.raw):  # the field 'head_dim' is the width of the rotated part, or missing
        nope = fields.positive("qk_nope_head_dim", most=MOST_FEATURES)
        return nope + fields.positive("qk_rope_head_dim", most=MOST_FEATURES)
    names = "head_dim", "attention_head_dim", "d_kv"
    if fields.get(*names) is None and hidden_size % num_heads:
        fields.problems["head_dim"] = (
            f"{fields.path}: the hidden size {hidden_size} cannot be divided by {num_heads} attention heads, "
            "and the field 'head_dim' is missing"
        )
    return fields.positive(*names, default=max(1, hidden_size // num_heads), most=MOST_FEATURES)


def _max_len(fields: _Fields) -> int:
    """The positions of the config, stretched as its scaled rotary embedding stretches them.

    llama3 and longrope configs already state the stretched length, and so do all of Gemma 3. linear and
    dynamic ones state the length before; yarn may state either, with the original one beside it.
    """
    length = _positions(fields)
    rope = fields.get("rope_scaling", "rope_parameters")
    if not isinstance(rope, dict) or str(fields.get("model_type")).startswith("gemma3"):
        return length
    scaling = _Fields(fields.path, cast("dict[str, object]", rope), {})
    kind = scaling.get("rope_type", "type")
    factor = scaling.get("factor")
    if kind not in ("linear", "dynamic", "yarn") or factor is None:
        return length
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor < 1:
        raise scaling.wrong("factor", factor, f"a number of at least 1 (rope type {kind})")
    if kind == "yarn":
        length = scaling.positive("original_max_position_embeddings", default=length)
    return int(length * factor)


def _positions(fields: _Fields) -> int:
    if fields.get("max_trained_positions") is not None and fields.get("rotary_scaling_factor") is None:
        # Nomic's models reach n_positions only if their rotation is slowed for long texts.
        return fields.positive("max_trained_positions")
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
    names = (*names, "model_max_length", "max_target_positions")  # as Kimi Linear and Whisper say it
    if fields.get("model_type") in _WITHOUT_ATTENTION:
        return fields.positive(*names, default=_LENGTH_OF_STATES)
    if fields.get(*names) is None and (unsaid := _UNSAID.get(str(fields.get("model_type")))):
        return unsaid
    length = fields.size("max_len", names, guess=_ANY_LENGTH)
    if fields.get("model_type") in _AFTER_PADDING:
        length -= max(fields.token_ids("pad_token_id"), default=1) + 1
    return length


_ANY_LENGTH = 1 << 30
_LENGTH_OF_STATES = 8192

_WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba")
"""Model types whose config.json says neither heads of attention nor how long texts may be."""
_BY_DISTANCE = ("t5", "mt5", "umt5")
"""Model types that know positions by distances alone, of which all beyond one count alike."""
_UNSAID = {"bloom": 2048, "falcon": 2048, **dict.fromkeys(_BY_DISTANCE, 512)}
"""Model types of which some published files do not say how long texts were in training, and that length."""

_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert", "mpnet")
"""Model types whose texts begin in the table of learned positions after the row of the padding token."""


def _eos_token_ids(folder: Path, fields: _Fields, vocab_size: int) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    generation = _read_object(path) if path.exists() else {}
    own = fields.token_ids("eos_token_id")
    ids = dict.fromkeys(own + _Fields(path, generation, {}).token_ids("eos_token_id"))
    known = tuple(token for token in ids if 0 <= token < vocab_size or "vocab_size" in fields.problems)
    if strange := [token for token in ids if token not in known]:
        where = fields.path if strange[0] in own else path
        ends = "" if known else ": nothing but max_tokens and stop strings ends a text"
        fields.warnings.append(
            f"{where}: 'eos_token_id' {strange[0]} is none of the model's {vocab_size} tokens, and is left "
            f"out{ends}"
        )
    return known


def _tied(fields: _Fields) -> bool | None:
    """What config.json says; None where its text part and its top level differ.

    Releases of transformers obeyed one or the other, so only the checkpoint can tell.
    """
    top = fields.whole.get("tie_word_embeddings")
    tied = fields.boolean("tie_word_embeddings", default=None)
    return tied if top is None or top == tied else None


def _dtype(folder: Path, fields: _Fields) -> str:
    value = fields.get("dtype", "torch_dtype")
    if value is None or value == "auto":
        return stored_dtype(folder)
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in DTYPES:
        raise fields.wrong("dtype", value, f"one of {', '.join(DTYPES)}")
    return cast("str", name)
