"""Mamba-2, Mamba and Falcon Mamba: layers that are a selective scan alone, without attention and MLPs."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Literal

import msgspec

from models.config import Eps, Size
from models.families.decoders.decoder_spec import DecoderFields, LayerSpec
from models.families.hybrids.nemotron_h import NemotronHForCausalLM
from models.layers.mamba import ChannelScanSpec, MambaSpec
from models.layers.rotary import Rope, plain_rope
from models.model import ModelSetup


class ScanFields(DecoderFields, frozen=True, kw_only=True):
    """The fields that both generations have."""

    rms_norm_eps: Eps = msgspec.field(name="layer_norm_epsilon", default=1e-5)
    intermediate_size: Size = 0
    """The channels of a layer of the first generation; 0 means that `expand` says them."""
    conv_kernel: Size = 4
    use_bias: bool = False
    use_conv_bias: bool = True

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
        scan = MambaSpec(
            heads=self.num_heads,
            head_dim=self.head_dim,
            groups=self.n_groups,
            state_size=self.state_size,
            taps=self.conv_kernel,
            eps=self.rms_norm_eps,
            bias=self.use_bias,
            out_bias=self.use_bias,
            conv_bias=self.use_conv_bias,
            limits=self.time_step_limit,
        )
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


class MambaForCausalLM(NemotronHForCausalLM):
    fields = MambaFields


class FalconMambaForCausalLM(NemotronHForCausalLM):
    fields = FalconMambaFields
