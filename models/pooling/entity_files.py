"""The files of GLiNER, which finds entities of any labels in texts: gliner_config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

import msgspec

from models.config import ConfigError, ModelConfig
from models.plain_files import read_object, typed

GLINER_FILE = "gliner_config.json"
ARCHITECTURE = "GLiNERModel"
_ADDED = "gliner"
"""The field of config.json with those of gliner_config.json."""
_TOKENS_OF_A_WORD = 4
"""Tokens, on average, that a text and its labels may have for each word that the model was trained for."""
_SAY_MORE = (
    "loaded by the library gliner and saved by save_pretrained(FOLDER, safe_serialization=True) it has all "
    "that is needed"
)

_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class EntityFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of gliner_config.json: how words and labels are read, and what their states pass through."""

    hidden_size: _Size = 512
    max_width: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 12
    """The most words of an entity, where each piece of the text has a score."""
    max_len: _Size = 384
    """The most words of a text."""
    span_mode: Literal["markerV0", "marker", "token_level"] = "markerV0"
    """What has scores: pieces of the text, or the beginning, the end and the inside of entities."""
    subtoken_pooling: Literal["first", "last", "mean", "max"] = "first"
    """How the states of a word's tokens become one."""
    num_rnn_layers: Annotated[int, msgspec.Meta(ge=0, le=64)] = 1
    ent_token: str = "<<ENT>>"
    """The token that is written before each label."""
    sep_token: str = "<<SEP>>"
    """The token between the labels and the text."""
    embed_ent_token: bool = True
    """Whether the state of that token is the label's, and not the one behind it."""


_SERVED: Mapping[str, tuple[object, ...]] = {
    "labels_encoder": (None,),
    "labels_decoder": (None,),
    "relations_layer": (None,),
    "span_encoder_config": (None,),
    "precomputed_prompts_mode": (None, False),
    "represent_spans": (None, False),
    "fuse_layers": (None, False),
    "post_fusion_schema": (None, ""),
    "words_splitter_type": (None, "whitespace"),
}
"""The fields by which models of other kinds are told, and what they are in one that is served."""


def make_config(folder: Path) -> dict[str, object]:
    """The config.json that a folder of GLiNER would have: the encoder's, and the fields of its own."""
    path = folder / GLINER_FILE
    said = read_object(path)
    if wrong := [name for name, allowed in _SERVED.items() if said.get(name) not in allowed]:
        raise ConfigError(
            f"{path}: {wrong[0]!r} is {said[wrong[0]]!r}, which is not served: only models with one "
            "encoder for labels and texts are, whose words are divided by spaces"
        )
    encoder = said.get("encoder_config")
    if not isinstance(encoder, dict):
        raise ConfigError(f"{path}: 'encoder_config' is missing; {_SAY_MORE}")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"{folder / 'tokenizer.json'} is missing; {_SAY_MORE}")
    config = {"model_type": "deberta-v2", **cast("dict[str, object]", encoder)}
    own = {name: said[name] for name in EntityFacts.__struct_fields__ if name in said}
    facts = typed(own, EntityFacts, f"{path} of this GLiNER")
    if said.get("vocab_size") not in (None, -1):
        config["vocab_size"] = said["vocab_size"]
    longest = config.get("max_position_embeddings")
    if config["model_type"] == "deberta-v2" and isinstance(longest, int) and not _counts_positions(config):
        reach = config.get("max_relative_positions")  # beyond it all distances are alike
        config["max_relative_positions"] = reach if isinstance(reach, int) and reach > 0 else longest
        config["max_position_embeddings"] = max(longest, _TOKENS_OF_A_WORD * facts.max_len)
    return {**config, "architectures": [ARCHITECTURE], _ADDED: own}


def _counts_positions(config: Mapping[str, object]) -> bool:
    """Whether DeBERTa has a vector for each position, of which there are only so many."""
    return config.get("position_biased_input", True) is not False


def read_entities(config: ModelConfig) -> EntityFacts | None:
    """The fields of a model that finds entities; None if it is none."""
    if config.architecture != ARCHITECTURE:
        return None
    return typed(config.raw.get(_ADDED, {}), EntityFacts, "config.json of this GLiNER")
