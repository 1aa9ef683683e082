"""OLMo 2: norms after attention and MLP instead of before, and norms over all query or key heads at once."""

from __future__ import annotations

from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import POST_NORMS


class Olmo2ForCausalLM(DecoderForCausalLM):
    fixed = {"norms": POST_NORMS, "qk_norm": "projection"}
