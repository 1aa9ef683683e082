"""The description of a decoder: which norms, biases, windows and multipliers it has, and what its layers are.

A family makes its `DecoderSpec` of its own fields of config.json, which are a `DecoderFields`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec

from models.config import Eps, Size
from models.layers.attention import QueryGrowth
from models.layers.latent_attention import LatentSpec
from models.layers.moe import ExpertSpec
from models.layers.rotary import Rope, read_rope
from models.layers.state import StateSpec
from models.model import ModelSetup


@dataclass(frozen=True)
class Norms:
    """The names of a layer's norms in the checkpoint; "" means that there is none."""

    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""


PRE_NORMS = Norms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
POST_NORMS = Norms(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm")
SANDWICH_NORMS = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The facts that may differ from layer to layer."""

    rope: Rope | None
    """The rotation; None means that this layer does not see positions."""
    window: int | None = None
    attention_scale: float | None = None
    """The factor of this layer's scores; None means that of all layers."""
    shares_choice: bool = False
    """Whether attention reads the tokens that an earlier layer's indexer chose, and this layer has none."""
    experts: ExpertSpec | None = None
    """The mixture of experts; None means that this layer has an MLP."""
    state: StateSpec | None = None
    """What keeps a state of fixed size in place of attention; None means that there is attention."""


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """The description of a family: which norms, biases, windows and multipliers its decoder has."""

    layers: tuple[LayerSpec, ...]
    intermediate_size: int
    """The inner features of the MLP of layers that have no experts."""
    activation: str
    eps: float
    attention_scale: float
    norm: Literal["rms", "layer", "layer without weight"] = "rms"
    norm_bias: bool = False
    """Whether layer norms have a bias."""
    norms: Norms = PRE_NORMS
    norm_offset: float = 0.0
    """The number 1 if the checkpoint stores norm weights w and means 1 + w."""
    norms_sums: bool = False
    """Whether norms after a sublayer normalise the stream with what it added, not what it adds."""
    final_norm: bool = True
    is_parallel: bool = False
    """Whether attention and MLP read the same stream, and the same norm of it if the MLP has none."""
    qk_norm: Literal["head", "rotated head", "projection", "layer norm"] | None = None
    """How queries and keys are normalised: head by head, also after their rotation, all heads at once, or by
    layer norms of heads with weights for each; None: they are not."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    """Whether the LM head has a bias."""
    qkv: Literal["apart", "in one", "by head"] = "apart"
    """How the checkpoint holds q, k, v: as three matrices, as one, or as one in which each key head has all
    its rows together."""
    qkv_limit: float | None = None
    """The largest number that queries, keys and values may be; larger ones are cut down to it."""
    is_gated: bool = True
    """Whether the MLP has a gate."""
    gate_up_in_one: bool = False
    """Whether the checkpoint may hold gate and up as one matrix; GGUF files have them apart."""
    transposed: bool = False
    """Whether the checkpoint stores matrices as [inputs, outputs]."""
    output_gate: bool = False
    """Whether queries come with gates, one for each number of the heads' outputs."""
    head_gates: bool = False
    """Whether the input is projected to a gate for each query head, too, which the head's output passes."""
    sinks: bool = False
    """Whether each query head has a score for nothing, which takes its part of the attention."""
    slopes: Sequence[float] | None = None
    """What the scores of each query head lose with each position of distance (alibi); None: nothing."""
    biased: bool = False
    """Whether each layer's attention is given biases by distance when it is read."""
    turns_neighbours: bool = False
    """Whether rotation pairs dimensions 2i and 2i + 1: rows of q and k are brought into another order."""
    query_growth: QueryGrowth | None = None
    latent: LatentSpec | None = None
    """Latent attention in place of keys and values for heads; None means that there is none."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    learned_positions: int = 0
    """The rows of a table of learned positions, which are added to embeddings; 0 means that there is none."""
    first_position: int = 0
    """The row of that table for the first token of a text."""
    embedding_width: int | None = None
    """The width of embeddings that are projected to the layers' and back; None means that of the layers."""
    embedding_norm: bool = False
    """Whether embeddings are normalised, with their positions."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """A factor of everything that a sublayer adds to the stream."""
    logit_scale: float = 1.0


WITHOUT_BIASES = {"qkv_bias": False, "o_bias": False}
"""A part of what is `fixed` in families whose attention has no biases, even if config.json says so."""


class DecoderFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that all families of this decoder have, and the decoder that they describe.

    A family adds its own fields, and overrides the methods whose answers differ in it.
    """

    default_theta: ClassVar[float] = 10000.0
    """The base of the rotation where config.json says none."""
    default_part: ClassVar[float] = 1.0
    """The part of each head that is rotated where config.json says none."""

    intermediate_size: Size
    rms_norm_eps: Eps = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    sliding_window: Size | None = None
    layer_types: tuple[str, ...] | None = None

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        """The decoder; a family replaces in it what it does otherwise."""
        return DecoderSpec(
            layers=self.layers(setup, rope),
            intermediate_size=self.intermediate_size,
            activation=self.hidden_act,
            eps=self.rms_norm_eps,
            attention_scale=setup.config.head_dim**-0.5,
            qkv_bias=self.attention_bias,
            o_bias=self.attention_bias,
        )

    def rope(self, setup: ModelSetup) -> Rope:
        raw, head_dim = setup.config.raw, setup.config.head_dim
        raw = {"partial_rotary_factor": self.default_part, **raw}
        return read_rope(raw, head_dim, setup.max_len, default_theta=self.default_theta)

    def layers(self, setup: ModelSetup, rope: Rope) -> tuple[LayerSpec, ...]:
        return tuple(
            LayerSpec(
                rope=rope if self.sees_positions(index) else None,
                window=self.window(index),
                experts=self.experts(index),
            )
            for index in range(setup.config.num_layers)
        )

    def sees_positions(self, index: int) -> bool:
        """Whether a layer rotates queries and keys by their positions."""
        return True

    def window(self, index: int) -> int | None:
        """The window of a layer; None means that it has none."""
        return None

    def slides(self, index: int, otherwise: bool) -> bool:
        """Whether a layer has a window, as `layer_types` says; without them, `otherwise`."""
        return otherwise if self.layer_types is None else self.layer_types[index] == "sliding_attention"

    def experts(self, index: int) -> ExpertSpec | None:
        """The mixture of experts of a layer; None means that it has an MLP."""
        return None
