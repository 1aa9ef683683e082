"""RoBERTa with rotary positions: jina-embeddings-v3, as it was published and as transformers saves it.

Its matrices are read under the names of transformers' classes, which adapters that PEFT has saved have, too.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from torch import Tensor

from models.checkpoint.files import Source, Stored
from models.config import ModelConfig, family_fields
from models.families.encoders.encoder import (
    Embeddings,
    Encoder,
    EncoderFields,
    LayerNames,
    plain_layers,
)
from models.layers.rotary import Rotary, read_rope
from models.lora.task_folder import class_names
from models.model import ModelSetup
from models.weight_slices import Cut

_NAMES = LayerNames(
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    mlp="mlp",
    mlp_norm="post_mlp_layernorm",
    mlp_parts=("fc1", "fc2"),
)
_SAVED = "jina_embeddings_v3"
"""The model_type of checkpoints that transformers has saved."""
_ORIGINAL = ".parametrizations.weight.original"
_FACTORS = re.compile(r".+\.parametrizations\.weight\.0\.lora_[AB]")


class RotaryFields(EncoderFields, frozen=True, kw_only=True):
    rotary_emb_base: float | None = None


def is_rotary(config: ModelConfig) -> bool:
    """Whether a RoBERTa has rotary positions, and no table of learned ones."""
    kind, positions = config.raw.get("model_type"), config.raw.get("position_embedding_type")
    return kind == _SAVED or (kind == "xlm-roberta" and positions == "rotary")


def rotary_trunk(setup: ModelSetup) -> Encoder:
    config, fields = setup.config, family_fields(setup.config, RotaryFields)
    usual = 20000.0 if config.raw.get("model_type") == _SAVED else 10000.0
    theta = fields.rotary_emb_base or usual
    rope = read_rope(config.raw, config.head_dim, setup.max_len, default_theta=theta)
    layers = plain_layers(setup, fields, _NAMES, "layers.")
    embeddings = Embeddings(setup, config.hidden_size, types=fields.type_vocab_size)
    trunk = Encoder(setup, embeddings, layers, eps=fields.layer_norm_eps, rotary=Rotary(rope))
    trunk.default_pooling = "MEAN"
    return trunk


def renamed(source: Source) -> Source:
    """The tensors of a published checkpoint as the classes of transformers name and divide them.

    The factors of the adapters that lie in it are left out: they are adapters of their own.
    """
    found: dict[str, Stored] = {}
    for name, stored in source.tensors.items():
        if _FACTORS.fullmatch(name) is None:
            found.update(_as_named(name.replace(_ORIGINAL, ".weight"), stored))
    return Source(source.place, found)


def _as_named(name: str, stored: Stored) -> dict[str, Stored]:
    module, _, kind = name.rpartition(".")
    names = class_names(module)
    if len(names) == 1:
        return {f"{names[0]}.{kind}": stored}
    rows = stored.shape[0] // len(names)
    part = replace(stored, shape=(rows, *stored.shape[1:]))
    return {
        f"{own}.{kind}": replace(part, read=partial(_read_rows, stored, index * rows, rows))
        for index, own in enumerate(names)
    }


def _read_rows(stored: Stored, start: int, count: int, cut: Cut | None) -> Tensor:
    """Read so many rows of a matrix or of a bias from `start` on, or a piece of them."""
    rows = cut if cut is not None and cut.dim == 0 else Cut(0, 0, count)
    read = stored.read(Cut(0, start + rows.start, start + rows.stop))
    return read if cut is None or cut is rows else cut.of(read)
