"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 whose attention reads only tokens that an indexer chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import msgspec

from models.config import ConfigError, Eps, Size, family_fields
from models.families.decoders.decoder_spec import DecoderSpec
from models.families.latent.deepseek_v3 import DeepseekV3Fields, DeepseekV3ForCausalLM
from models.layers.latent_attention import IndexerSpec
from models.model import ModelSetup
from models.parallel.parallel import Parallel


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
