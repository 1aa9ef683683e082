"""Layers of one part each: those of Nemotron-H, and of Mamba-2, Mamba and Falcon Mamba, which are scans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import msgspec
from torch import Tensor, nn

from models.checkpoint.weights import Weights, load
from models.config import Eps, ModelConfig, Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_attention import DecoderAttention
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec, LayerSpec
from models.families.hybrids.layer_kinds import FULL, LINEAR, Silu, check_kinds
from models.families.mixtures import DeepSeekExperts
from models.layers.mamba import ChannelScanSpec, MambaSpec
from models.layers.mlp import MLP
from models.layers.moe import ExpertSpec, MoeMLP, NarrowExperts, SharedExpert
from models.layers.norm import RMSNorm, enter
from models.layers.rotary import Rope, plain_rope
from models.model import ModelSetup
from models.parallel.parallel import Parallel

_MLP, _EXPERTS = "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _EXPERTS}
"""The kinds of layers in `hybrid_override_pattern`."""
_UP_AND_DOWN = ("up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class MlpLayerSpec(LayerSpec):
    """A layer that is an MLP."""


class NemotronHFields(DeepSeekExperts, frozen=True, kw_only=True):
    rms_norm_eps: Eps = msgspec.field(name="layer_norm_epsilon", default=1e-5)
    hidden_act: str = msgspec.field(name="mlp_hidden_act", default="relu2")
    mamba_hidden_act: Silu = "silu"
    intermediate_size: Size = 21504
    mlp_bias: bool = False
    layers_block_type: tuple[str, ...] | None = None
    hybrid_override_pattern: str | None = None
    """The kinds of layers in files that have no `layers_block_type`, a letter for each."""
    mamba_num_heads: Size = 128
    mamba_head_dim: Size = 64
    ssm_state_size: Size = 128
    n_groups: Size = 8
    conv_kernel: Size = 4
    use_conv_bias: bool = True
    use_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, inf)
    n_routed_experts: Size = 8
    num_experts_per_tok: Size = 2
    moe_intermediate_size: Size = 7688
    moe_shared_expert_intermediate_size: Size = 7688
    moe_latent_size: Size | None = None

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), mlp_bias=self.mlp_bias, o_bias=False, qkv_bias=False)

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        kinds = self.kinds(setup.config.num_layers)
        made = {
            LINEAR: LayerSpec(
                rope=None, state=_scan(self, self.mamba_num_heads, self.mamba_head_dim, self.ssm_state_size)
            ),
            FULL: LayerSpec(rope=None),
            _MLP: MlpLayerSpec(rope=None),
        }
        if _EXPERTS in kinds:
            made[_EXPERTS] = LayerSpec(rope=None, experts=self.experts(0))
        return tuple(made[kind] for kind in kinds)

    def kinds(self, count: int) -> tuple[str, ...]:
        """The kinds of so many layers."""
        known = tuple(_LETTERS.values())
        if self.layers_block_type is not None:
            return check_kinds(self.layers_block_type, count, known, "layers_block_type")
        letters = self.hybrid_override_pattern or ""
        kinds = [_LETTERS.get(letter, letter) for letter in letters]
        return check_kinds(kinds, count, known, "hybrid_override_pattern")

    def experts(self, index: int) -> ExpertSpec:
        narrow = None
        if (size := self.moe_latent_size) is not None:
            narrow = NarrowExperts(size, "fc1_latent_proj", "fc2_latent_proj", bias=self.mlp_bias)
        return ExpertSpec(
            routing=self.routing(),
            width=self.moe_intermediate_size,
            activation=self.hidden_act,
            scope="mixer",
            correction=self.correction,
            shared=SharedExpert(
                "shared_experts", self.moe_shared_expert_intermediate_size, bias=self.mlp_bias
            ),
            narrow=narrow,
        )


class NemotronHLayer(nn.Module):
    """One layer. The stream comes in two pieces, as for `DecoderLayer`."""

    def __init__(self, config: ModelConfig, spec: DecoderSpec, layer: LayerSpec, parallel: Parallel) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm = RMSNorm(size, spec.eps)
        self.attends = False
        if layer.state is not None:
            self.mixer = layer.state.build(size, parallel)
        elif layer.experts is not None:
            self.mixer = MoeMLP(size, layer.experts, parallel)
        elif isinstance(layer, MlpLayerSpec):
            self.mixer = MLP(
                size,
                spec.intermediate_size,
                parallel,
                activation=spec.activation,
                names=_UP_AND_DOWN,
                bias=spec.mlp_bias,
            )
        else:
            self.attends = True
            self.mixer = DecoderAttention(config, spec, layer, parallel)

    def pull(self, weights: Weights) -> None:
        for name, module in self.named_children():
            load(module, weights.at(weights.join(name)))  # the norm behind all layers has another name

    def forward(
        self, delta: Tensor | None, stream: Tensor, rotations: Mapping[Rope, Tensor]
    ) -> tuple[Tensor, Tensor]:
        x, stream = enter(self.norm, delta, stream)
        return (self.mixer(x, None) if self.attends else self.mixer(x)), stream


class NemotronHForCausalLM(DecoderForCausalLM):
    """Nemotron-H: each layer is Mamba-2, attention without positions, an MLP, or a mixture of experts."""

    fields = NemotronHFields
    layer_class = NemotronHLayer
    ties_head = False
    trunks = ("model", "backbone", "")
    saved_names = {"embed_tokens": "embeddings", "norm": "norm_f"}


class ScanFields(DecoderFields, frozen=True, kw_only=True):
    """The fields that both generations have."""

    rms_norm_eps: Eps = msgspec.field(name="layer_norm_epsilon", default=1e-5)
    intermediate_size: Size = 0
    """The channels of a layer of the first generation; 0 means that `expand` says them."""
    conv_kernel: Size = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    hidden_act: Silu = "silu"

    def rope(self, setup: ModelSetup) -> Rope:
        """Any rotation: no layer takes it."""
        return plain_rope(self.default_theta, 2)


class Mamba2Fields(ScanFields, frozen=True, kw_only=True):
    state_size: Size = 128
    num_heads: Size = 128
    head_dim: Size = 64
    n_groups: Size = 8
    time_step_limit: tuple[float, float] = (0.0, inf)

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        scan = _scan(self, self.num_heads, self.head_dim, self.state_size)
        return (LayerSpec(rope=None, state=scan),) * setup.config.num_layers


class MambaFields(ScanFields, frozen=True, kw_only=True):
    state_size: Size = 16
    expand: Size = 2
    """The channels of a layer by the hidden size."""
    time_step_rank: Size | Literal["auto"] = "auto"

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        scan = self.scan(setup.config.hidden_size)
        return (LayerSpec(rope=None, state=scan),) * setup.config.num_layers

    def scan(self, hidden_size: int) -> ChannelScanSpec:
        """The scan of a layer."""
        return ChannelScanSpec(
            channels=self.intermediate_size or self.expand * hidden_size,
            state_size=self.state_size,
            rank=-(-hidden_size // 16) if self.time_step_rank == "auto" else self.time_step_rank,
            taps=self.conv_kernel,
            bias=self.use_bias,
            conv_bias=self.use_conv_bias,
        )


class FalconMambaFields(MambaFields, frozen=True, kw_only=True):
    mixer_rms_eps: Eps = 1e-6

    def scan(self, hidden_size: int) -> ChannelScanSpec:
        return replace(super().scan(hidden_size), norm="plain", eps=self.mixer_rms_eps)


class Mamba2ForCausalLM(NemotronHForCausalLM):
    fields = Mamba2Fields
    ties_head = True


class MambaForCausalLM(NemotronHForCausalLM):
    fields = MambaFields
    ties_head = True


class FalconMambaForCausalLM(NemotronHForCausalLM):
    fields = FalconMambaFields
    ties_head = True


def _scan(fields: NemotronHFields | Mamba2Fields, heads: int, head_dim: int, state_size: int) -> MambaSpec:
    """A layer of Mamba-2 of these sizes."""
    return MambaSpec(
        heads=heads,
        head_dim=head_dim,
        groups=fields.n_groups,
        state_size=state_size,
        taps=fields.conv_kernel,
        eps=fields.rms_norm_eps,
        bias=fields.use_bias,
        out_bias=fields.use_bias,
        conv_bias=fields.use_conv_bias,
        limits=fields.time_step_limit,
    )
