"""GTE's encoders ("NewModel", and Snowflake's "GteModel"): rotary positions and gated MLPs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
from torch import Tensor, nn

from models.checkpoint.weights import Weights
from models.config import ConfigError, Eps, ModelConfig, Size, family_fields
from models.families.encoders.encoder import Embeddings, Encoder, EncoderLayer, LayerNames
from models.families.encoders.encoder_model import Head, encoder_classes
from models.layers.linear import GatedLinear, RowLinear
from models.layers.mlp import activation_kind
from models.layers.rotary import Rotary, read_rope
from models.model import ModelSetup
from models.ops.grouped_matrix import Matrix, halves, stacked
from models.parallel.parallel import Parallel

_APART = LayerNames(
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    attention_norm="attn_ln",
    mlp="mlp",
    mlp_norm="mlp_ln",
)
_PACKED = replace(_APART, qkv=("attention.qkv_proj",))


class GteFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that ModelConfig lacks."""

    intermediate_size: Size
    max_position_embeddings: int
    type_vocab_size: int = 1
    hidden_act: str = "gelu"
    layer_norm_eps: Eps = 1e-12
    layer_norm_type: str = "layer_norm"
    position_embedding_type: str = "rope"
    pack_qkv: bool = True
    logn_attention_scale: bool = False


def gte_trunk(setup: ModelSetup) -> Encoder:
    config, fields = setup.config, _fields(setup.config)
    is_rotary = fields.position_embedding_type == "rope"
    positions = 0 if is_rotary else fields.max_position_embeddings
    embeddings = Embeddings(setup, config.hidden_size, positions=positions, types=fields.type_vocab_size)
    names = _PACKED if fields.pack_qkv else _APART
    layers = {
        f"encoder.layer.{index}": EncoderLayer(
            setup,
            names,
            GteMLP(config.hidden_size, fields, setup.parallel),
            eps=fields.layer_norm_eps,
        )
        for index in range(config.num_layers)
    }
    rope = read_rope(config.raw, config.head_dim, setup.max_len)
    return Encoder(
        setup, embeddings, layers, eps=fields.layer_norm_eps, rotary=Rotary(rope) if is_rotary else None
    )


def _fields(config: ModelConfig) -> GteFields:
    fields = family_fields(config, GteFields)
    for name, served in {
        "layer_norm_type": ("layer_norm",),
        "position_embedding_type": ("rope", "absolute"),
        "logn_attention_scale": (False,),
    }.items():
        if getattr(fields, name) not in served:
            raise ConfigError(
                f"config.json of this {config.architecture}: the field {name!r} is "
                f"{getattr(fields, name)!r}, but must be {' or '.join(map(repr, served))}"
            )
    return fields


class GteMLP(nn.Module):
    def __init__(self, size: int, fields: GteFields, parallel: Parallel) -> None:
        super().__init__()
        share = parallel.share(fields.intermediate_size, "features of the MLP")
        self.up_gate_proj = UpGate(size, share, activation=activation_kind(fields.hidden_act))
        self.down_proj = RowLinear(share, size, parallel, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.up_gate_proj(hidden))


class UpGate(GatedLinear):
    """A gated layer that is stored as up and gate, while `ops.gated_linear` reads gate and up."""

    def _matrices(self, weights: Weights) -> list[Matrix]:
        up, gate = halves(stacked(super()._matrices(weights)))
        return [gate, up]


GteModel, GteForSequenceClassification, GteForTokenClassification = encoder_classes(
    "Gte",
    gte_trunk,
    partial(Head, dense=("new.pooler.dense", "gte.pooler.dense")),
    prefix=("new", "gte"),
    heads=("lm_head", "classifier"),
)
