"""MiniMax-M2: sigmoid scores with a correction, queries and keys normalised across heads."""

from __future__ import annotations

from typing import ClassVar, Literal

from models.config import Size
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import WITHOUT_BIASES
from models.families.mixtures.mixtral import MixtralFields
from models.layers.rotary import Rope, read_rope
from models.model import ModelSetup


class MiniMaxM2Fields(MixtralFields, frozen=True, kw_only=True):
    default_theta: ClassVar[float] = 5000000.0
    scores: ClassVar[Literal["softmax", "sigmoid"]] = "sigmoid"
    correction: ClassVar[str] = "e_score_correction_bias"

    rotary_dim: Size | None = None
    """The dimensions of a head that are rotated, in the first checkpoints."""

    def rope(self, setup: ModelSetup) -> Rope:
        raw, head_dim = setup.config.raw, setup.config.head_dim
        if self.rotary_dim is not None:
            raw = raw | {"partial_rotary_factor": self.rotary_dim / head_dim}
        return read_rope(raw, head_dim, setup.max_len, default_theta=self.default_theta)

    def window(self, index: int) -> int | None:
        return None


class MiniMaxM2ForCausalLM(DecoderForCausalLM):
    fields = MiniMaxM2Fields
    fixed = {"qk_norm": "projection", **WITHOUT_BIASES}
