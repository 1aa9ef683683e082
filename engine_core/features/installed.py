"""The features of an engine: which ones a model with its options has, and in which order they are called."""

from __future__ import annotations

from engine_core.config import EngineConfig
from engine_core.features.adapters.adapter_turns import AdapterTurns
from engine_core.features.cache_tiers.stored_prefixes import StoredPrefixes
from engine_core.features.faults.deadlines import Deadlines
from engine_core.features.faults.suspects import Suspects
from engine_core.features.grammar.answer_bounds import AnswerBounds
from engine_core.features.media.media_checks import TextAlone
from engine_core.features.media.media_items import MediaItems
from engine_core.features.media.source_blocks import SourceBlocks
from engine_core.features.speculation.drafts import make_drafts
from engine_core.features.states.prefix_states import PrefixStates
from engine_core.scheduling.cache.state_pool import StatePool
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.scheduler import Scheduler
from worker.cache_tiers.tier import CacheTier
from worker.worker_facts import WorkerFacts


def make_scheduler(
    config: EngineConfig, facts: WorkerFacts, vocab_size: int, disk: CacheTier | None = None
) -> Scheduler:
    """Make the scheduler of a loaded model, with its features; `disk` keeps prefixes, if something does."""
    core = Scheduler(config, facts, vocab_size)
    features: list[Feature] = []
    states = StatePool(facts.remembered_states) if facts.remembered_states and core.caches else None
    if disk is not None:
        features.append(StoredPrefixes(core, disk, states))  # what is back may be in the next step
    if config.worker.lora.enable_lora:
        by_priority = config.scheduling_policy == "priority"
        features.append(AdapterTurns(config.worker.lora, by_priority=by_priority))
    takes_media, takes_sources = facts.most_embeddings > 0, bool(facts.source_kind)
    text_alone = TextAlone(takes_media=takes_media, takes_sources=takes_sources)
    features.append(text_alone)
    if takes_sources:
        features.append(SourceBlocks(config, facts, vocab_size))
    if takes_media or facts.whole_prompts:
        features.append(MediaItems(config, facts))
    if states is not None:
        features.append(PrefixStates(core.cache, states))  # before who preempts what has landed
    bounds, suspects, deadlines = (
        AnswerBounds(core, vocab_size, config.depth - 1),
        Suspects(core),
        Deadlines(core),
    )
    features.append(bounds)
    if (drafts := make_drafts(config, facts, core)) is not None:
        features.append(drafts)
    features += [suspects, deadlines]
    core.hooks.install(features)
    for each in (text_alone, bounds, suspects, deadlines):
        core.hooks.rest(each)  # until a request needs it
    return core
