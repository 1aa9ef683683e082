"""JinaBERT: BERT's attention with a bias that falls with distance in place of positions, and gated MLPs."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import ConfigError, check_served, family_fields
from models.families.encoders.encoder import Embeddings, Encoder, EncoderFields, EncoderLayer, LayerNames
from models.families.encoders.encoder_model import BERT_NAMES, Head, encoder_classes
from models.layers.attention import alibi_slopes
from models.layers.linear import frozen
from models.layers.mlp import GatedMLP
from models.layers.norm import LayerNorm
from models.model import ModelSetup

_NAMES = LayerNames(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    mlp="mlp",
    mlp_norm="mlp.layernorm",
)
_NORMED = LayerNames(
    qkv=_NAMES.qkv, out=_NAMES.out, attention_norm=_NAMES.attention_norm, mlp="mlp", mlp_norm="layer_norm_2"
)
_GATES = {"geglu": "gelu", "reglu": "relu"}
"""The activation of a gate by Jina's name for the kind of MLP."""


class JinaBertFields(EncoderFields, frozen=True, kw_only=True):
    position_embedding_type: str = "absolute"
    feed_forward_type: str = "original"
    auto_map: dict[str, str] = {}
    use_qk_norm: bool = False
    """Whether queries and keys are normalised; published models say so by the name of their code:"""

    @property
    def norms_heads(self) -> bool:
        return self.use_qk_norm or any("qk-post-norm" in code for code in self.auto_map.values())


def jina_bert_trunk(setup: ModelSetup) -> Encoder:
    config, fields = setup.config, family_fields(setup.config, JinaBertFields)
    check_served(config, fields, position_embedding_type=("alibi",), feed_forward_type=tuple(_GATES))
    embeddings = Embeddings(setup, config.hidden_size, types=fields.type_vocab_size)
    layers = {f"encoder.layer.{index}": _layer(setup, fields) for index in range(config.num_layers)}
    return Encoder(setup, embeddings, layers, eps=fields.layer_norm_eps, bias=FallingBias(setup))


def _layer(setup: ModelSetup, fields: JinaBertFields) -> EncoderLayer:
    if fields.norms_heads:
        return NormedLayer(setup, fields)
    return EncoderLayer(setup, _NAMES, _mlp(setup, fields), eps=fields.layer_norm_eps)


class NormedLayer(EncoderLayer):
    """A layer of jina-embeddings-v2-base-code, which normalises queries and keys and adds its input twice."""

    def __init__(self, setup: ModelSetup, fields: JinaBertFields) -> None:
        size, eps = setup.config.hidden_size, fields.layer_norm_eps
        if setup.parallel.size > 1:
            raise ConfigError("norms of queries and keys reach over all heads: serve the model with one rank")
        super().__init__(setup, _NORMED, _mlp(setup, fields), eps=eps)
        self.q_norm, self.k_norm, self.middle_norm = (LayerNorm(size, eps) for _ in range(3))

    def pull(self, weights: Weights) -> None:
        super().pull(weights)
        load(self.q_norm, weights / "attention.self.layer_norm_q")
        load(self.k_norm, weights / "attention.self.layer_norm_k")
        load(self.middle_norm, weights / "layer_norm_1")

    def forward(self, hidden: Tensor, cos_sin: Tensor | None, bias: Tensor | None) -> Tensor:
        q, k, v = self.qkv(hidden).split(self.qkv.widths, dim=-1)  # [T, heads * D] each
        q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        inner, _ = self.attention_norm.add(self.out(self.attention(q, k, v, bias=bias)), hidden)
        hidden, _ = self.middle_norm.add(inner, hidden)  # [T, H], here and below
        return self.mlp_norm.add(self.mlp(hidden), hidden)[0]


def _mlp(setup: ModelSetup, fields: JinaBertFields) -> GatedMLP:
    parts = ("up_gated_layer", "down_layer") if fields.norms_heads else ("gated_layers", "wo")
    return GatedMLP(
        setup.config.hidden_size,
        fields.intermediate_size,
        setup.parallel,
        activation=_GATES[fields.feed_forward_type],
        down_bias=True,
        names=parts,
        up_first=fields.norms_heads,
    )


class FallingBias(nn.Module):
    """Biases of attention by distance and head (alibi): nearer keys count more, on either side."""

    table: nn.Parameter  # [heads of this rank, 2 * longest - 1] float32

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__()
        self.heads, self.longest = setup.parallel.share_heads(setup.config.num_heads), setup.max_len

    def pull(self, weights: Weights) -> None:
        slopes = torch.tensor(alibi_slopes(self.heads.size)[self.heads.start : self.heads.stop])
        distance = torch.arange(1 - self.longest, self.longest).abs()
        self.table = frozen((-slopes[:, None] * distance).to(weights.device))

    def forward(self) -> Tensor:
        return self.table


JinaBertModel, JinaBertForSequenceClassification, JinaBertForTokenClassification = encoder_classes(
    "JinaBert",
    jina_bert_trunk,
    partial(Head, dense=("bert.pooler.dense", "pooler.dense")),
    prefix=("bert",),
    heads=("cls", "classifier"),
    vocabulary=BERT_NAMES,
)
