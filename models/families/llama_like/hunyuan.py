"""HunYuan without experts: Llama whose query and key heads are normalised after their rotation."""

from __future__ import annotations

from models.config import Eps
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields


class HunYuanFields(DecoderFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = 1e-5


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    fields = HunYuanFields
    fixed = {"qk_norm": "rotated head"}
    saved_names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
