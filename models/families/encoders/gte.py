"""GTE's encoders ("NewModel", and Snowflake's "GteModel"): rotary positions and gated MLPs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from models.config import check_served, family_fields
from models.families.encoders.encoder import (
    Embeddings,
    Encoder,
    EncoderFields,
    EncoderLayer,
    LayerNames,
)
from models.families.encoders.encoder_model import ROBERTA_NAMES, Head, encoder_classes
from models.layers.mlp import GatedMLP
from models.layers.rotary import Rotary, read_rope
from models.model import ModelSetup

_APART = LayerNames(
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    attention_norm="attn_ln",
    mlp="mlp",
    mlp_norm="mlp_ln",
)
_PACKED = replace(_APART, qkv=("attention.qkv_proj",))


class GteFields(EncoderFields, frozen=True, kw_only=True):
    type_vocab_size: int = 1
    layer_norm_type: str = "layer_norm"
    position_embedding_type: str = "rope"
    pack_qkv: bool = True
    logn_attention_scale: bool = False


def gte_trunk(setup: ModelSetup) -> Encoder:
    config, fields = setup.config, family_fields(setup.config, GteFields)
    check_served(
        *(config, fields),
        layer_norm_type=("layer_norm",),
        position_embedding_type=("rope", "absolute"),
        logn_attention_scale=(False,),
    )
    is_rotary = fields.position_embedding_type == "rope"
    positions = 0 if is_rotary else fields.max_position_embeddings
    embeddings = Embeddings(setup, config.hidden_size, positions=positions, types=fields.type_vocab_size)
    names = _PACKED if fields.pack_qkv else _APART
    layers = {
        f"encoder.layer.{index}": EncoderLayer(setup, names, _mlp(setup, fields), eps=fields.layer_norm_eps)
        for index in range(config.num_layers)
    }
    rope = read_rope(config.raw, config.head_dim, setup.max_len)
    return Encoder(
        setup, embeddings, layers, eps=fields.layer_norm_eps, rotary=Rotary(rope) if is_rotary else None
    )


def _mlp(setup: ModelSetup, fields: GteFields) -> GatedMLP:
    return GatedMLP(
        setup.config.hidden_size,
        fields.intermediate_size,
        setup.parallel,
        activation=fields.hidden_act,
        down_bias=True,
        names=("up_gate_proj", "down_proj"),
        up_first=True,
    )


GteModel, GteForSequenceClassification, GteForTokenClassification = encoder_classes(
    "Gte",
    gte_trunk,
    partial(Head, dense=("new.pooler.dense", "gte.pooler.dense")),
    prefix=("new", "gte"),
    heads=("lm_head", "classifier"),
    vocabulary=ROBERTA_NAMES,
)
