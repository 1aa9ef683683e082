"""The features of a worker: which ones a loaded model with its options has, and in which order."""

from __future__ import annotations

from collections.abc import Callable

from models.layers.cross_attention import find_source_model
from models.layers.state import state_layers
from models.towers.model import find_tower
from worker.features.adapters.adapted import hold_adapters
from worker.features.cache_tiers.cache_records import CacheRecords
from worker.features.experts.shared_experts import SharedExperts
from worker.features.grammar.step_bounds import Bounds
from worker.features.media.media import Media
from worker.features.media.sources import Sources
from worker.features.pooling.pooled_texts import EncodedTexts, PooledTexts, StoredTexts
from worker.features.processors.custom_processors import Processors
from worker.features.speculation.draft_rows import Speculation
from worker.features.speculation.drafts import load_drafter
from worker.features.states.state_steps import States
from worker.model_loading import Loaded
from worker.steps.feature import Feature, Hooks
from worker.tasks import pools, samples, whole_tasks


def install_features(loaded: Loaded, report: Callable[[str, float], None]) -> Hooks:
    """Choose the features of a loaded model, and load what they compute with."""
    model, config, device = loaded.model, loaded.config, loaded.device
    asked, dtype, target, minimum = config.options, loaded.dtype, device.target, loaded.groups.minimum
    features: list[Feature] = []
    media = states = None
    tower = find_tower(model)
    if tower is not None or asked.enable_prompt_embeds:
        media = Media(tower, model, config, dtype, target, minimum)
    layers = state_layers(model.modules())
    if minimum(-len(layers)) < 0:  # on some rank
        states = States(layers, config, device, dtype, loaded.stage, minimum)
    if asked.kv_cache_dir is not None or asked.kv_offloading_size is not None:
        # The first that takes memory; its files hold what the others keep.
        features.append(CacheRecords(config, device, lambda: states and states.memory))
    features += [each for each in (media, states) if each is not None]
    if (source := find_source_model(model.modules())) is not None:
        dtypes = dtype, loaded.cache_dtype
        features.append(Sources(source, model, config, loaded.block_size, dtypes, device))
    if config.place.expert_size > 1:
        features.append(SharedExperts(model, config, dtype, target))
    if asked.lora.enable_lora:
        keeps = bool(whole_tasks(loaded.tasks, model.pooler))
        features.append(hold_adapters(config, loaded.options, device, model, keeps_states=keeps))
    if pools(loaded.tasks):
        features.append(_pool(loaded))
    if model.causal:
        takes_some, most = (
            states is None or states.keeps_guesses,
            config.drafter.most if config.drafter else 0,
        )
        features.append(Speculation(takes_some=takes_some, drafts=most, samples=samples(loaded.tasks)))
    if (drafts := load_drafter(config, loaded.options, device, model, report)) is not None:
        features.append(drafts)  # behind states and guesses, for it reads what holds
    if samples(loaded.tasks):
        features.append(Bounds(device.forbid))
    if asked.logits_processors:
        features.append(Processors(config, target))
    return Hooks(features)


def _pool(loaded: Loaded) -> PooledTexts:
    config, device = loaded.config, loaded.device
    kind = EncodedTexts
    if loaded.model.causal:
        kind = StoredTexts if whole_tasks(loaded.tasks, loaded.model.pooler) else PooledTexts
    return kind(
        loaded.model.pooler,
        loaded.tasks,
        config,
        loaded.block_size,
        loaded.dtype,
        device.allocate,
    )
