"""Nomic's BERT: rotary positions, no biases, gated MLPs, and in version 2 experts in every second layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights
from models.config import ConfigError, Eps, Size, family_fields
from models.context import context
from models.families.encoders.encoder import Embeddings, Encoder, EncoderLayer, LayerNames
from models.families.encoders.encoder_model import BERT_NAMES, NAMED_GATES, Head, encoder_classes
from models.layers.linear import Linear, frozen
from models.layers.mlp import MLP, GatedMLP, activation_kind
from models.layers.rotary import Rope, Rotary, plain_rope, read_rope
from models.model import ModelSetup
from models.parallel.parallel import Parallel
from models.weight_slices import Cut

_NAMES = LayerNames(
    qkv=("attn.Wqkv",), out="attn.out_proj", attention_norm="norm1", mlp="mlp", mlp_norm="norm2"
)


class NomicFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that ModelConfig lacks, by Nomic's names and by those of transformers."""

    n_inner: Size | None = None
    intermediate_size: Size | None = None
    activation_function: str | None = None
    hidden_act: str = "silu"
    """The activation of gates, which an MLP has if there is no `activation_function`."""
    layer_norm_epsilon: Eps | None = None
    layer_norm_eps: Eps = 1e-12
    type_vocab_size: int = 2
    qkv_proj_bias: bool = False
    mlp_fc1_bias: bool = False
    mlp_fc2_bias: bool = False

    rotary_emb_base: float = 1000.0
    rotary_emb_fraction: float = 1.0
    rotary_scaling_factor: float | None = None
    max_trained_positions: int = 2048

    num_experts: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 8
    moe_top_k: int = 1
    moe_every_n_layers: int = 0

    @property
    def eps(self) -> float:
        return self.layer_norm_eps if self.layer_norm_epsilon is None else self.layer_norm_epsilon

    def has_experts(self, index: int) -> bool:
        return self.moe_every_n_layers > 0 and index % self.moe_every_n_layers == 1


_UNSERVED = (
    "prenorm",
    "parallel_block",
    "use_rms_norm",
    "rotary_emb_interleaved",
    "rotary_emb_scale_base",
    "moe_normalize_expert_weights",
    "expert_choice_router",
    "num_shared_experts",
)
"""Variants in the code beside the checkpoints that no published checkpoint uses."""


def nomic_trunk(setup: ModelSetup) -> Encoder:
    config, fields = setup.config, family_fields(setup.config, NomicFields)
    for name in _UNSERVED:
        if config.raw.get(name):
            raise ConfigError(
                f"config.json of this {config.architecture}: {name!r} is set, which is not served"
            )
    embeddings = Embeddings(setup, config.hidden_size, types=fields.type_vocab_size)
    layers = {
        f"encoder.layers.{index}": EncoderLayer(
            setup,
            _NAMES,
            _mlp(setup, fields, index),
            eps=fields.eps,
            qkv_bias=fields.qkv_proj_bias,
            out_bias=fields.qkv_proj_bias,
        )
        for index in range(config.num_layers)
    }
    rotary = _rotary(setup, fields)
    return Encoder(setup, embeddings, layers, eps=fields.eps, norm="emb_ln", rotary=rotary)


def _mlp(setup: ModelSetup, fields: NomicFields, index: int) -> nn.Module:
    size, parallel, named = setup.config.hidden_size, setup.parallel, fields.activation_function
    inner = fields.intermediate_size or fields.n_inner or 4 * size
    if fields.has_experts(index):
        return NomicExperts(size, inner, fields, parallel)
    if named is not None and named not in NAMED_GATES:
        return MLP(size, inner, parallel, activation=named, names=("fc1", "fc2"), bias=fields.mlp_fc1_bias)
    return GatedMLP(
        size,
        inner,
        parallel,
        activation=NAMED_GATES.get(named or "", fields.hidden_act),
        bias=fields.mlp_fc1_bias,
        down_bias=fields.mlp_fc2_bias,
        sources=("fc12", "fc11"),
        names=("fc1", "fc2"),
    )


class NomicExperts(nn.Module):
    """Experts: each token passes a few of many MLPs, weighted by a router, and one bias is added."""

    bias: nn.Parameter

    def __init__(self, size: int, inner: int, fields: NomicFields, parallel: Parallel) -> None:
        super().__init__()
        self.size = size
        self.count = fields.num_experts
        self.used = fields.moe_top_k
        self.kind = activation_kind(fields.activation_function or fields.hidden_act)
        self.parallel = parallel
        self.share = parallel.share(inner, "features of the MLP")
        self.router = Linear(size, fields.num_experts)
        self.inner, self.outer = nn.ParameterList(), nn.ParameterList()

    def pull(self, weights: Weights) -> None:
        self.router.pull(weights / "router.layer")
        experts = weights / "experts"
        self.inner.extend(frozen(ops.pack(matrix)) for matrix in self._matrices(experts / "mlp", "w1"))
        sections = self.parallel.sections(self.share)
        outer = (matrix.t() for matrix in self._matrices(experts / "mlp", "w2"))
        self.outer.extend(frozen(ops.pack(matrix, sections=sections)) for matrix in outer)
        self.bias = frozen(experts.take("bias", [self.size]))

    def _matrices(self, weights: Weights, name: str) -> Tensor:
        """Read this rank's piece of the experts' matrices: [experts, features, size]."""
        shape, share = [self.count * self.share.size, self.size], self.share
        if share.is_whole:
            return weights.take(name, shape).unflatten(0, (self.count, -1))
        starts = range(0, shape[0], share.size)
        cuts = [Cut(0, start + share.start, start + share.stop) for start in starts]
        return torch.stack([weights.take(name, shape, cut) for cut in cuts])

    def forward(self, hidden: Tensor) -> Tensor:
        odds = self.router(hidden).float().softmax(-1)  # [T, experts]
        odds, chosen = odds.topk(self.used, dim=-1)  # [T, used] each
        products = torch.empty(*chosen.shape, self.size, dtype=torch.float32, device=hidden.device)
        for expert, (inner, outer) in enumerate(zip(self.inner, self.outer, strict=True)):
            rows, places = torch.where(chosen == expert)  # [R] each
            grown = ops.activation(ops.linear(hidden[rows], inner), self.kind)  # [R, features]
            products[rows, places] = ops.linear(grown, outer, wide=True)
        products = self.parallel.all_reduce(products)  # [T, used, size]
        return (products * odds.unsqueeze(-1)).sum(1).to(hidden.dtype) + self.bias


def _rotary(setup: ModelSetup, fields: NomicFields) -> nn.Module:
    config = setup.config
    dim = int(config.head_dim * fields.rotary_emb_fraction)
    rope = read_rope(config.raw, dim, setup.max_len, default_theta=fields.rotary_emb_base)
    if fields.rotary_scaling_factor and setup.max_len > fields.max_trained_positions:
        return StretchedRotary(rope, fields)
    return Rotary(rope)


class StretchedRotary(nn.Module):
    """A rotation that is slower for texts longer than those of the training, by each text's own length."""

    def __init__(self, rope: Rope, fields: NomicFields) -> None:
        super().__init__()
        self.usual = Rotary(rope)
        self.theta = fields.rotary_emb_base
        self.factor = fields.rotary_scaling_factor or 1.0
        self.trained = fields.max_trained_positions

    def forward(self, positions: Tensor) -> Tensor:
        lengths = context().query_lens_host
        usual = self.usual(positions)  # [T, 2 * pairs]
        if max(lengths) <= self.trained:
            return usual
        rows = zip(usual.split(lengths), positions.split(lengths), lengths, strict=True)
        return torch.cat([self._stretched(places) if n > self.trained else row for row, places, n in rows])

    def _stretched(self, positions: Tensor) -> Tensor:
        dim = 2 * len(self.usual.rope.frequencies)
        stretch = self.factor * len(positions) / self.trained - (self.factor - 1)
        rope = plain_rope(self.theta * stretch ** (dim / (dim - 2)), dim)
        frequencies = torch.tensor(rope.frequencies).to(positions.device, non_blocking=True)
        return ops.angles(positions, frequencies, rope.scale)


NomicBertModel, NomicBertForSequenceClassification, NomicBertForTokenClassification = encoder_classes(
    "NomicBert",
    nomic_trunk,
    partial(Head, dense=("nomic_bert.pooler.dense", "bert.pooler.dense")),
    prefix=("nomic_bert", "bert"),
    heads=("cls", "classifier"),
    vocabulary=replace(BERT_NAMES, dense_bias=None, has_bias=False),
)
