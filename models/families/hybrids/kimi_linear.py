"""Kimi Linear: Kimi delta attention in most layers, latent attention that sees no positions, and experts."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from models.checkpoint.weights import Weights, load
from models.config import Eps, Size
from models.families.decoders.decoder import DecoderLayer
from models.families.decoders.decoder_spec import LayerSpec
from models.families.hybrids.layer_kinds import FULL, LINEAR, check_kinds
from models.families.latent import LatentForCausalLM
from models.families.mixtures import DeepSeekExperts
from models.layers.delta import ChannelDeltaSpec
from models.layers.experts import SavedExperts
from models.layers.rotary import Rope
from models.model import ModelSetup

_NAMES, _MIXTURE = {"state": "self_attn"}, "block_sparse_moe"


class LinearFields(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of linear attention in published files."""

    head_dim: Size
    num_heads: Size
    short_conv_kernel_size: Size
    full_attn_layers: tuple[int, ...]
    """The layers that have latent attention instead, counted from 1."""


class KimiLinearFields(DeepSeekExperts, frozen=True, kw_only=True):
    saved: ClassVar[SavedExperts] = SavedExperts(gate="w1", up="w3", down="w2")

    rms_norm_eps: Eps = 1e-5
    n_routed_experts: Size = msgspec.field(name="num_experts", default=256)
    num_experts_per_tok: Size = msgspec.field(name="num_experts_per_token", default=8)
    moe_intermediate_size: Size = 1024
    n_shared_experts: int | None = msgspec.field(name="num_shared_experts", default=1)
    n_group: Size | None = msgspec.field(name="num_expert_group", default=1)
    norm_topk_prob: bool | None = msgspec.field(name="moe_renormalize", default=True)
    routed_scaling_factor: float = 2.446
    first_k_dense_replace: int | None = 1
    moe_router_activation_func: Literal["sigmoid"] = "sigmoid"
    linear_attn_config: LinearFields | None = None
    linear_head_dim: Size = 128
    """This and the next ones are what transformers writes in place of `linear_attn_config`."""
    linear_num_heads: Size = 32
    linear_conv_kernel_dim: Size = 4

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        delta, count = self.delta(), setup.config.num_layers
        return tuple(
            LayerSpec(rope=None, state=delta if kind == LINEAR else None, experts=self.experts(index))
            for index, kind in enumerate(check_kinds(self.kinds(count), count, (LINEAR, FULL), "layer_types"))
        )

    def kinds(self, count: int) -> tuple[str, ...]:
        """The kinds of so many layers."""
        if self.layer_types is not None:
            return self.layer_types
        attending = range(5, count + 1, 4)
        if self.linear_attn_config is not None:
            attending = self.linear_attn_config.full_attn_layers
        return tuple(FULL if number in attending else LINEAR for number in range(1, count + 1))

    def delta(self) -> ChannelDeltaSpec:
        sizes = self.linear_head_dim, self.linear_num_heads, self.linear_conv_kernel_dim
        if (published := self.linear_attn_config) is not None:
            sizes = published.head_dim, published.num_heads, published.short_conv_kernel_size
        head_dim, heads, taps = sizes
        return ChannelDeltaSpec(heads=heads, head_dim=head_dim, taps=taps, eps=self.rms_norm_eps)


class KimiLinearLayer(DecoderLayer):
    """A layer whose experts are called otherwise than its MLP, which transformers calls so, too."""

    def pull(self, weights: Weights) -> None:
        if any(f"{_MIXTURE}.{name}.weight" in weights for name in ("gate", "gate_proj")):
            weights = weights.renamed({**_NAMES, "mlp": _MIXTURE})
        for name, module in self.named_children():
            load(module, weights / name)


class KimiLinearForCausalLM(LatentForCausalLM):
    fields = KimiLinearFields
    layer_class = KimiLinearLayer
    turns_neighbours = False
    saved_names = _NAMES
