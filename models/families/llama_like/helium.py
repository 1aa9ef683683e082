"""Helium: Llama with rotation of neighbouring dimensions."""

from __future__ import annotations

from typing import ClassVar

from models.config import Eps
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.llama import LlamaFields


class HeliumFields(LlamaFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 100000.0

    rms_norm_eps: Eps = 1e-8


class HeliumForCausalLM(DecoderForCausalLM):
    fields = HeliumFields
    fixed = {"turns_neighbours": True, "o_bias": False}
