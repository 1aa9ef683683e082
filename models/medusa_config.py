"""The config of Medusa heads. Their files say little: all else is as in the model that they guess for."""

from __future__ import annotations

from pathlib import Path

import msgspec

from models.config import ConfigError, ModelConfig, Size, family_fields
from models.plain_files import read_object

_NAMES = {"medusa_num_heads": "num_heads", "medusa_num_layers": "num_hidden_layers"}
"""The names of fields as the authors write them, and in files that were converted for vLLM."""
_ARCHITECTURE = "MedusaModel"


class MedusaFields(msgspec.Struct, frozen=True, kw_only=True):
    num_heads: Size = 5
    """The heads, of which each guesses one token."""
    num_hidden_layers: Size = 1
    """The layers of each head."""
    hidden_size: Size | None = None
    vocab_size: Size | None = None
    truncated_vocab_size: Size | None = None
    """The number of tokens that the heads can guess; None means all."""
    original_lm_head: bool = False
    """Whether all heads have the same last matrix."""


def is_medusa(config: ModelConfig) -> bool:
    return config.architecture == _ARCHITECTURE


def read_medusa(folder: Path, target: ModelConfig) -> ModelConfig | None:
    """Read the config of the heads in a folder, for a model; None if there are none."""
    found = read_object(folder / "config.json")
    if found.get("model_type") != "medusa" and not found.keys() & _NAMES.keys():
        return None
    raw = {_NAMES.get(name, name): value for name, value in found.items() if value is not None}
    config = msgspec.structs.replace(
        target, architecture=_ARCHITECTURE, raw=raw, whole={}, quantization=None, problems={}, warnings=()
    )
    fields = family_fields(config, MedusaFields)
    if fields.hidden_size not in (None, target.hidden_size):
        raise ConfigError(
            f"these heads were made for hidden states of {fields.hidden_size} numbers, and those of the "
            f"model that they would guess for have {target.hidden_size}"
        )
    vocab_size = fields.vocab_size or target.vocab_size
    return msgspec.structs.replace(config, vocab_size=vocab_size, num_layers=fields.num_hidden_layers)
