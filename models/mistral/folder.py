"""Makes a folder in which a checkpoint of Mistral's own format looks like any other. No torch.

params.json becomes config.json, tekken.json becomes tokenizer.json, and the weights are links to the files,
whose names `tensors.py` translates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from models.made_folder import link, made_once, write_json
from models.mistral.tokenizer import tokenizer_config, tokenizer_json
from models.plain_files import FileError, read_object

PARAMS = "params.json"
_WEIGHTS = "consolidated*.safetensors"
_MARK = "made_of_mistral.txt"
"""A file that says that a folder was made here, and of which one."""
_OTHERS = ("generation_config.json", "chat_template.jinja")
"""Files beside the weights that are used as they are."""
_LENGTH = 128_000
"""The length of texts where params.json says none."""
_TELLS_NOTHING = {"model_type", "max_batch_size", "vocab_size_padded", "ffn_dim_multiplier", "causal"}

_Size = Annotated[int, msgspec.Meta(ge=1)]


class _Mixture(msgspec.Struct, frozen=True):
    num_experts: _Size
    num_experts_per_tok: _Size


class _Params(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of params.json that are known."""

    dim: _Size
    n_layers: _Size
    n_heads: _Size
    hidden_dim: _Size
    vocab_size: _Size
    head_dim: _Size | None = None
    n_kv_heads: _Size | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    sliding_window: _Size | None = None
    tied_embeddings: bool = False
    max_seq_len: _Size | None = None
    max_position_embeddings: _Size | None = None
    moe: _Mixture | None = None


def is_mistral(folder: Path, load_format: str) -> bool:
    """Whether a checkpoint is read in Mistral's own format: it has no other one, or the operator asks for it.

    Raises FileError if it is asked for and not there.
    """
    there = (folder / PARAMS).is_file()
    if load_format == "mistral" and not there:
        flags = "--load-format, --tokenizer-mode and --config-format mistral"
        raise FileError(f"{flags} need {folder / PARAMS}, and there is none: leave them out")
    return there and (load_format == "mistral" or not (folder / "config.json").is_file())


def was_made(folder: Path) -> bool:
    """Whether `make_folder` has made this folder."""
    return (folder / _MARK).is_file()


def make_folder(folder: Path, cache: Path) -> Path:
    """Make the folder for a checkpoint within `cache`, or find the one made before. Raises FileError."""
    weights, tokens = sorted(folder.glob(_WEIGHTS)), folder / "tekken.json"
    if not weights:
        raise FileError(f"{folder} holds {PARAMS}, but no {_WEIGHTS} beside it")
    if not tokens.is_file():
        raise FileError(f"{folder} has no tekken.json, and Mistral's older tokenizers are not read")
    others = [folder / name for name in _OTHERS if (folder / name).is_file()]

    def fill(made: Path) -> None:
        write_json(made / "config.json", raw_config(read_object(folder / PARAMS), folder / PARAMS))
        write_json(made / "tokenizer.json", tokenizer_json(tokens))
        write_json(made / "tokenizer_config.json", tokenizer_config(tokens))
        link(made, [*weights, *others])
        (made / _MARK).write_text(str(folder))

    return made_once(cache, [folder / PARAMS, tokens, *weights, *others], Path(__file__).parent, fill)


def raw_config(params: Mapping[str, object], path: Path) -> dict[str, object]:
    """The config.json that params.json means. Raises FileError for models of which it says more."""
    known = {*_Params.__struct_fields__, *_TELLS_NOTHING}
    if unknown := [name for name, value in params.items() if name not in known and value is not None]:
        raise FileError(
            f"{path}: {unknown[0]!r} is not read in this format: use the model's files for transformers"
        )
    try:
        read = msgspec.convert(dict(params), _Params)
    except msgspec.ValidationError as error:
        raise FileError(f"{path}: {error}") from None
    mixture = {} if read.moe is None else {
        "num_local_experts": read.moe.num_experts,
        "num_experts_per_tok": read.moe.num_experts_per_tok,
    }  # fmt: skip
    return {
        "architectures": ["MixtralForCausalLM" if mixture else "MistralForCausalLM"],
        "model_type": "mixtral" if mixture else "mistral",
        "hidden_size": read.dim,
        "num_hidden_layers": read.n_layers,
        "num_attention_heads": read.n_heads,
        "num_key_value_heads": read.n_kv_heads or read.n_heads,
        "head_dim": read.head_dim or read.dim // read.n_heads,
        "intermediate_size": read.hidden_dim,
        "vocab_size": read.vocab_size,
        "rms_norm_eps": read.norm_eps,
        "rope_theta": read.rope_theta,
        "sliding_window": read.sliding_window,
        "tie_word_embeddings": read.tied_embeddings,
        "max_position_embeddings": read.max_position_embeddings or read.max_seq_len or _LENGTH,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **mixture,
    }
