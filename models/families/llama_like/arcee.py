"""Arcee (AFM): Llama whose MLP has no gate and squares what is positive."""

from __future__ import annotations

from models.config import Eps
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.llama import LlamaFields


class ArceeFields(LlamaFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = 1e-5
    hidden_act: str = "relu2"


class ArceeForCausalLM(DecoderForCausalLM):
    fields = ArceeFields
    fixed = {"is_gated": False}
