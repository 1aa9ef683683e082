"""Decoders with latent attention: DeepSeek from V2 to V3.2, and the families that have it from there."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import msgspec

from models.config import ConfigError, Eps, Size, family_fields
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec
from models.families.decoders.llama import GrowthFields, LlamaFields
from models.families.mixtures import DeepSeekExperts
from models.layers.experts import SavedExperts
from models.layers.latent_attention import IndexerSpec, LatentSpec
from models.layers.rotary import Rope, read_rope, read_sharpening
from models.model import ModelSetup
from models.ops.expert_routing_ops import Routing
from models.parallel.parallel import Parallel


class LatentFields(msgspec.Struct, frozen=True, kw_only=True):
    kv_lora_rank: Size
    q_lora_rank: Size | None = None
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size | None = None
    """The numbers of a head's value; None means an equal part of the hidden state for each head."""
    rope_interleave: bool | None = True
    """Whether rotation pairs neighbours, in families that come with both."""


class LatentForCausalLM(DecoderForCausalLM):
    """A family with latent attention, whose widths stand beside its other fields of config.json."""

    turns_neighbours: ClassVar[bool | None] = None
    """Whether rotation pairs neighbours, where the family has a rule; None means that config.json says it."""

    def spec(self, setup: ModelSetup) -> DecoderSpec:
        config = setup.config
        fields, widths = family_fields(config, self.fields), family_fields(config, LatentFields)
        width, turns_neighbours = widths.qk_rope_head_dim, self.turns_neighbours
        rope = self.rope(setup, fields, width)
        if 2 * len(rope.frequencies) != width:
            raise ConfigError(
                f"config.json of this {config.architecture} rotates {2 * len(rope.frequencies)} of {width} "
                "dimensions of a key ('partial_rotary_factor', 'qk_rope_head_dim'), and all of them must be"
            )
        latent = LatentSpec(
            query_rank=widths.q_lora_rank,
            rank=widths.kv_lora_rank,
            nope=widths.qk_nope_head_dim,
            rope=width,
            value=widths.v_head_dim or max(1, config.hidden_size // config.num_heads),
            bias=fields.attention_bias,
            turns_neighbours=bool(widths.rope_interleave) if turns_neighbours is None else turns_neighbours,
        )
        scale = config.head_dim**-0.5 * read_sharpening(config.raw)
        return replace(fields.spec(setup, rope), latent=latent, attention_scale=scale)

    def rope(self, setup: ModelSetup, fields: DecoderFields, width: int) -> Rope:
        """The rope of a key's part that is rotated, which is `width` wide."""
        return read_rope(setup.config.raw, width, setup.max_len)


class DeepseekV2Fields(DeepSeekExperts, frozen=True, kw_only=True):
    correction: ClassVar[str] = ""

    n_shared_experts: int | None = 2
    norm_topk_prob: bool | None = False
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    scoring_func: Literal["softmax"] = "softmax"

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        if self.norm_topk_prob:
            raise ConfigError(
                "config.json of this DeepSeek-V2 divides the weights of experts by their sum "
                "('norm_topk_prob'), which no published one does and implementations differ in: if it was "
                """trained without, say --hf-overrides '{"norm_topk_prob": false}'"""
            )
        return super().spec(setup, rope)

    def routing(self) -> Routing:
        grouped = self.topk_method == "group_limited_greedy"
        return Routing(
            experts=self.n_routed_experts,
            chosen=self.num_experts_per_tok,
            normalised=False,
            factor=self.routed_scaling_factor,
            groups=(self.n_group or 1) if grouped else 1,
            kept_groups=(self.topk_group or 1) if grouped else 1,
            summed_best=1,
        )


class DeepseekV2ForCausalLM(LatentForCausalLM):
    """DeepSeek-V2 and V2-Lite: experts by softmax scores, of the best groups or of all."""

    fields = DeepseekV2Fields
    turns_neighbours = True


class DeepseekV2WithHeadsForCausalLM(DecoderForCausalLM):
    """The text of DeepSeek-OCR: the same experts, and plain attention."""

    fields = DeepseekV2Fields


class DeepseekV3Fields(DeepSeekExperts, frozen=True, kw_only=True):
    n_shared_experts: int | None = 1
    n_group: Size | None = 8
    topk_group: Size | None = 4
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int | None = 3
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid"] = "sigmoid"


class Glm4MoeLiteFields(DeepSeekExperts, frozen=True, kw_only=True):
    n_shared_experts: int | None = 1
    routed_scaling_factor: float = 1.8
    rms_norm_eps: Eps = 1e-5
    first_k_dense_replace: int | None = 1
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid"] = "sigmoid"


class DeepseekV3ForCausalLM(LatentForCausalLM):
    """DeepSeek-V3, R1 and Kimi K2: experts by sigmoid scores with a correction."""

    fields = DeepseekV3Fields


class Glm4MoeLiteForCausalLM(LatentForCausalLM):
    """GLM-4.7-Flash: the same experts in one group."""

    fields = Glm4MoeLiteFields


class YoutuForCausalLM(LatentForCausalLM):
    """The same decoder without experts."""


class MiniCPM3Fields(LlamaFields, frozen=True, kw_only=True):
    rms_norm_eps: Eps = 1e-5
    scale_emb: float = 12.0
    scale_depth: float | None = 1.4
    """A factor of all that sublayers add, which is divided by the root of the number of layers."""
    dim_model_base: Size | None = 256
    """The hidden size for which the size of logits was chosen."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        config, depth, base = setup.config, self.scale_depth, self.dim_model_base
        return replace(
            super().spec(setup, rope),
            embedding_scale=self.scale_emb,
            residual_scale=1.0 if depth is None else depth / math.sqrt(config.num_layers),
            logit_scale=1.0 if base is None else base / config.hidden_size,
        )


class MiniCPM3ForCausalLM(LatentForCausalLM):
    """MiniCPM 3: no experts, and multipliers of embeddings, sublayers and logits."""

    fields = MiniCPM3Fields
    turns_neighbours = False


class Mistral4Rope(GrowthFields, frozen=True):
    """The rope parameters that families with latent attention do not share."""

    partial_rotary_factor: float | None = None
    """The part of a whole head that is rotated; None means that 'qk_rope_head_dim' says it."""


class Mistral4Fields(DeepSeekExperts, frozen=True, kw_only=True):
    correction: ClassVar[str] = ""
    saved: ClassVar[SavedExperts] = SavedExperts(in_one=True)
    scores: ClassVar[Literal["softmax", "sigmoid"]] = "softmax"

    n_shared_experts: int | None = 1
    rope_parameters: Mistral4Rope

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), query_growth=self.rope_parameters.growth(setup.max_len))


class Mistral4ForCausalLM(LatentForCausalLM):
    """Mistral 4: queries that grow with their position, and experts by softmax scores.

    Where config.json says `mscale_all_dim`, YaRN sharpens scores, as in transformers (docs/roadmap.md).
    """

    fields = Mistral4Fields

    def rope(self, setup: ModelSetup, fields: DecoderFields, width: int) -> Rope:
        in_part = isinstance(fields, Mistral4Fields) and fields.rope_parameters.partial_rotary_factor
        return super().rope(setup, fields, setup.config.head_dim if in_part else width)


class IndexerFields(msgspec.Struct, frozen=True, kw_only=True):
    q_lora_rank: Size
    qk_rope_head_dim: Size
    index_topk: Size
    index_head_dim: Size
    index_n_heads: Size


class SharedIndexerFields(IndexerFields, frozen=True, kw_only=True):
    """The fields that say which layers have an indexer, where others read what an earlier layer's chose."""

    indexer_types: tuple[Literal["full", "shared"], ...] | None = None
    index_topk_pattern: Annotated[str, msgspec.Meta(pattern="^[FS]*$")] | None = None
    """The same with one letter for each layer."""
    index_topk_freq: Size = 1
    """The distance of layers with an indexer, where nothing lists them."""
    index_skip_topk_offset: int = 2
    """The number of first layers that all have one."""

    def has_indexer(self, index: int) -> bool:
        if self.indexer_types is not None:
            return self.indexer_types[index] == "full"
        if self.index_topk_pattern is not None:
            return self.index_topk_pattern[index] == "F"
        return max(index - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    def listed(self) -> int | None:
        """The number of layers that are listed; None: none are."""
        listed = self.index_topk_pattern if self.indexer_types is None else self.indexer_types
        return None if listed is None else len(listed)


class GlmMoeDsaFields(DeepseekV3Fields, frozen=True, kw_only=True):
    n_group: Size | None = 1
    topk_group: Size | None = 1
    rms_norm_eps: Eps = 1e-5


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3.2: DeepSeek-V3 whose attention reads only tokens that an indexer chooses."""

    turns_neighbours = True
    indexer: ClassVar[type[IndexerFields]] = IndexerFields
    indexer_turns_neighbours: ClassVar[bool] = False
    """Whether the rotation of the indexer pairs neighbours."""

    def spec(self, setup: ModelSetup) -> DecoderSpec:
        config, spec = setup.config, super().spec(setup)
        fields = family_fields(config, self.indexer)
        if fields.index_head_dim < fields.qk_rope_head_dim or fields.index_head_dim % 2:
            raise ConfigError(
                f"config.json of this {config.architecture}: 'index_head_dim' is {fields.index_head_dim}, "
                f"but must be an even number of at least {fields.qk_rope_head_dim} ('qk_rope_head_dim')"
            )
        indexer = IndexerSpec(
            query_rank=fields.q_lora_rank,
            heads=fields.index_n_heads,
            width=fields.index_head_dim,
            rope=fields.qk_rope_head_dim,
            most=fields.index_topk,
            turns_neighbours=self.indexer_turns_neighbours,
        )
        latent = None if spec.latent is None else replace(spec.latent, indexer=indexer)
        return replace(spec, latent=latent)


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM-5: the same, whose layers may read what the indexer of an earlier one has chosen."""

    fields = GlmMoeDsaFields
    indexer = SharedIndexerFields
    indexer_turns_neighbours = True

    def spec(self, setup: ModelSetup) -> DecoderSpec:
        config, spec = setup.config, super().spec(setup)
        fields = family_fields(config, SharedIndexerFields)
        if (listed := fields.listed()) is not None and listed < config.num_layers:
            raise ConfigError(
                f"config.json of this {config.architecture} says for {listed} of {config.num_layers} layers "
                "whether they have an indexer ('indexer_types', 'index_topk_pattern')"
            )
        has_own = [fields.has_indexer(index) for index in range(config.num_layers)]
        _check_first_layers(has_own, setup.parallel, config.architecture)
        layers = zip(spec.layers, has_own, strict=True)
        return replace(spec, layers=tuple(replace(layer, shares_choice=not own) for layer, own in layers))


def _check_first_layers(has_indexer: list[bool], parallel: Parallel, architecture: str) -> None:
    """Refuse a model or a stage that begins with a layer which reads what an earlier one has chosen."""
    if not has_indexer[0]:
        raise ConfigError(
            f"config.json of this {architecture}: layer 0 shares the indexer of an earlier layer, and there "
            "is none: its kind must be 'full' ('indexer_types') or F ('index_topk_pattern')"
        )
    first = parallel.share_layers(len(has_indexer)).start
    if not has_indexer[first]:
        owner = max(index for index in range(first) if has_indexer[index])
        raise ValueError(
            f"--pipeline-parallel-size {parallel.stages}: layer {first} of this {architecture} reads the "
            f"tokens that the indexer of layer {owner} chose, so a stage cannot begin there; choose a size "
            "that puts both into one stage"
        )
