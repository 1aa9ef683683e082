"""Nemotron-4 and Minitron: layer norms of 1 + w, and MLPs without gates that square what is positive."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from models.config import Eps
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.gpt import LAYER_NORMS
from models.families.decoders.llama import LlamaFields


class NemotronFields(LlamaFields, frozen=True, kw_only=True):
    default_part: ClassVar[float] = 0.5

    rms_norm_eps: Eps = msgspec.field(name="norm_eps", default=1e-5)
    hidden_act: str = "relu2"


class NemotronForCausalLM(DecoderForCausalLM):
    fields = NemotronFields
    fixed = {**LAYER_NORMS, "norm_offset": 1.0}
