"""The fields of config.json that several families have for their layers of Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Literal

import msgspec

from models.config import ConfigError, ModelConfig, Size, family_fields
from models.families.decoders.decoder_spec import DecoderFields, LayerSpec
from models.families.hybrids.layer_kinds import LINEAR
from models.layers.mamba import MambaSpec
from models.layers.rotary import Rope


class MambaFields(msgspec.Struct, frozen=True, kw_only=True):
    """The names that Bamba has for the sizes of layers, with the defaults of transformers."""

    mamba_n_heads: Size = 128
    mamba_d_head: Size | Literal["auto"] = "auto"
    mamba_n_groups: Size = 1
    mamba_d_state: Size = 256
    mamba_d_conv: Size = 4
    mamba_expand: Size = 2
    """The features of a layer's heads by the hidden size."""
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, float] | None = None

    def mamba(self, features: int, eps: float) -> MambaSpec:
        """A layer whose heads have so many features together."""
        heads = self.mamba_n_heads
        head_dim = features // heads if self.mamba_d_head == "auto" else self.mamba_d_head
        if heads * head_dim != features:
            raise ConfigError(
                f"config.json: {heads} Mamba heads ('mamba_n_heads') of {head_dim} ('mamba_d_head') do not "
                f"make the {features} features of a layer"
            )
        return MambaSpec(
            heads=heads,
            head_dim=head_dim,
            groups=self.mamba_n_groups,
            state_size=self.mamba_d_state,
            taps=self.mamba_d_conv,
            eps=eps,
            bias=self.mamba_proj_bias,
            out_bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
            limits=self.time_step_limit or (0.0, inf),
        )


def mixed_layers(
    fields: DecoderFields, config: ModelConfig, kinds: Sequence[str], rope: Rope | None
) -> tuple[LayerSpec, ...]:
    """Make layers of these kinds, of which those without attention have Mamba-2 in its place."""
    mamba = None
    if LINEAR in kinds:  # files of models that have attention alone may hold other models' sizes
        sizes = family_fields(config, MambaFields)
        mamba = sizes.mamba(sizes.mamba_expand * config.hidden_size, fields.rms_norm_eps)
    return tuple(
        LayerSpec(rope=None, state=mamba, experts=fields.experts(index))
        if kind == LINEAR
        else LayerSpec(rope=rope, experts=fields.experts(index))
        for index, kind in enumerate(kinds)
    )
