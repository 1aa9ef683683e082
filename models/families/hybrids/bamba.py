"""Bamba: Llama in which most layers have Mamba-2 in place of attention."""

from __future__ import annotations

from models.config import Eps
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import LayerSpec, Norms
from models.families.decoders.llama import LlamaFields
from models.families.hybrids.layer_kinds import FULL, LINEAR
from models.families.hybrids.mamba_fields import mixed_layers
from models.layers.rotary import Rope, read_rope
from models.model import ModelSetup

NORMS = Norms(before_attention="input_layernorm", before_mlp="pre_ff_layernorm")
NAMES = {"state": "mamba", "mlp": "feed_forward", "norm": "final_layernorm"}


class BambaFields(LlamaFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = 1e-5
    attn_layer_indices: tuple[int, ...] | None = None
    """The layers with attention."""

    def rope(self, setup: ModelSetup) -> Rope:
        raw = {**setup.config.raw, "partial_rotary_factor": 0.5}
        return read_rope(raw, setup.config.head_dim, setup.max_len)

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        attending = self.attn_layer_indices or ()
        kinds = [FULL if index in attending else LINEAR for index in range(setup.config.num_layers)]
        return mixed_layers(self, setup.config, kinds, rope)


class BambaForCausalLM(DecoderForCausalLM):
    fields = BambaFields
    fixed = {"norms": NORMS}
    saved_names = NAMES
