"""OPT: learned positions that begin at 2, norms before or after, embeddings narrower than the layers."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from models.config import Size
from models.families.classics.gpt2 import LAYER_NORMS
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec, LayerSpec, Norms
from models.layers.embedding import check_learned_positions
from models.layers.rotary import Rope
from models.model import ModelSetup

_FIRST_POSITION = 2  # rows 0 and 1 of the position table were meant for padding
_NORMS_BEFORE = Norms(before_attention="self_attn_layer_norm", before_mlp="final_layer_norm")
_NORMS_AFTER = Norms(after_attention="self_attn_layer_norm", after_mlp="final_layer_norm")


class OPTFields(DecoderFields, frozen=True, kw_only=True):
    intermediate_size: Size = msgspec.field(name="ffn_dim")
    hidden_act: str = msgspec.field(name="activation_function", default="relu")
    word_embed_proj_dim: int | None = None
    do_layer_norm_before: bool = True
    enable_bias: bool = True
    remove_final_layer_norm: bool = msgspec.field(name="_remove_final_layer_norm", default=False)

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        learned, before, bias = setup.config.max_len, self.do_layer_norm_before, self.enable_bias
        check_learned_positions("OPT", learned, setup.max_len)
        return replace(
            super().spec(setup, rope),
            eps=1e-5,
            norms=_NORMS_BEFORE if before else _NORMS_AFTER,
            norms_sums=not before,
            final_norm=before and not self.remove_final_layer_norm,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bias,
            learned_positions=learned + _FIRST_POSITION,
            first_position=_FIRST_POSITION,
            embedding_width=self.word_embed_proj_dim,
        )

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        return (LayerSpec(rope=None),) * setup.config.num_layers


class OPTForCausalLM(DecoderForCausalLM):
    fields = OPTFields
    fixed = LAYER_NORMS
    trunks = ("model.decoder", "decoder")
    saved_names = {
        "o_proj": "out_proj",
        "mlp": "",
        "up_proj": "fc1",
        "down_proj": "fc2",
        "norm": "final_layer_norm",
    }
