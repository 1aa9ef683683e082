"""The features of an engine: which ones a model with its options has, and in which order they are called."""

from __future__ import annotations

from engine_core.config import EngineConfig
from engine_core.features.adapters.adapter_turns import AdapterTurns
from engine_core.features.disk.disk_prefixes import DiskPrefixes
from engine_core.features.faults.deadlines import Deadlines
from engine_core.features.faults.suspects import Suspects
from engine_core.features.grammar.answer_bounds import AnswerBounds
from engine_core.features.guesses.drafts import make_drafts
from engine_core.features.media.media_checks import TextAlone
from engine_core.features.media.media_items import MediaItems
from engine_core.features.media.source_blocks import SourceBlocks
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.scheduler import Scheduler
from worker.disk.disk import Disk
from worker.worker_facts import WorkerFacts


def make_scheduler(
    config: EngineConfig, facts: WorkerFacts, vocab_size: int, disk: Disk | None = None
) -> Scheduler:
    """Make the scheduler of a loaded model, with its features; `disk` keeps prefixes, if something does."""
    core = Scheduler(config, facts, vocab_size)
    features: list[Feature] = []
    if disk is not None:
        features.append(DiskPrefixes(core, disk))  # what is back may be in the step that is planned next
    if config.worker.lora.enable_lora:
        by_priority = config.scheduling_policy == "priority"
        features.append(AdapterTurns(config.worker.lora, by_priority=by_priority))
    takes_media, takes_sources = facts.most_embeddings > 0, bool(facts.source_kind)
    features.append(TextAlone(takes_media=takes_media, takes_sources=takes_sources))
    if takes_sources:
        features.append(SourceBlocks(config, facts, vocab_size))
    if takes_media or facts.whole_prompts:
        features.append(MediaItems(config, facts))
    features.append(AnswerBounds(core, config.depth - 1))
    if (drafts := make_drafts(config, facts, core)) is not None:
        features.append(drafts)
    features += [Suspects(core), Deadlines(core)]
    core.hooks.install(features)
    return core
