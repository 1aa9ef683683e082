"""Slots and cache blocks: which sequences fit, and which of both each one holds.

Which sequence runs, and which one is preempted for another, is decided by the scheduler.
"""

from __future__ import annotations

import logging

from engine_core.protocol import CacheMiss
from engine_core.scheduling.cache.block_pool import BlockPool
from engine_core.scheduling.cache.miss_reasons import MOST_TOKENS, PrefixMemory
from engine_core.scheduling.cache.states import NO_STATES, States, StepStates
from engine_core.scheduling.sequence import Sequence
from worker.protocol import SeqStep, WorkerFacts

_log = logging.getLogger(__name__)


def blocks_needed(tokens: int, facts: WorkerFacts) -> int:
    """The number of cache blocks that so many tokens fill; 0 if the model has no cache."""
    return -(-tokens // facts.block_size) if facts.causal else 0


class CacheManager:
    """Gives slots and cache blocks to sequences, and finds the cached prefixes of prompts."""

    def __init__(self, facts: WorkerFacts, *, caches: bool) -> None:
        """`caches`: full blocks are published, so that later sequences with the same prefix share them."""
        self.pool = BlockPool(facts.num_blocks)
        self.states: States | None = None
        """The states that are remembered, if layers of the model have some; blocks are of no use without."""
        if facts.remembered_states and caches:
            self.states = States(facts.remembered_states, facts.block_size)
        self.free_slots = list(reversed(range(facts.max_num_seqs)))
        self._facts = facts
        self._caches = caches
        self.memory = PrefixMemory(facts.block_size, max(MOST_TOKENS, 2 * facts.max_model_len))

    def begin_step(self) -> None:
        if self.states is not None:
            self.states.begin_step()

    def plan_states(self, seq: Sequence, count: int) -> StepStates:
        """What the row that computes the next `count` tokens of a sequence does with states."""
        return NO_STATES if self.states is None else self.states.plan(seq, count)

    def land_states(self, seq: Sequence, row: SeqStep, *, wanted: bool) -> None:
        if self.states is not None:
            self.states.land(seq, row, wanted=wanted)

    def match(self, seq: Sequence) -> list[int] | None:
        """The cached blocks with which a waiting sequence could start now, or None if it does not fit.

        All its known tokens must fit, not only the first chunk: otherwise it would be admitted into a full
        cache again and again, only to be preempted.
        """
        if not self.free_slots:
            return None
        prefix = self._cached_prefix(seq)
        unused = sum(not self.pool.users(block) for block in prefix)
        new = blocks_needed(len(seq.tokens), self._facts) - len(prefix)
        return prefix if new + unused <= self.pool.free else None

    def fits(self, seq: Sequence) -> bool:
        return self.match(seq) is not None

    def cached_tokens(self, seq: Sequence) -> int:
        """The number of tokens that a waiting sequence would find in the cache now."""
        return len(self._cached_prefix(seq)) * self._facts.block_size

    def admit(self, seq: Sequence, prefix: list[int]) -> int:
        """Give a sequence a slot and the cached blocks that `match` found for it; returns the slot."""
        self.pool.share(prefix)
        seq.blocks = prefix
        seq.published = len(prefix)
        seq.computed = len(prefix) * self._facts.block_size
        seq.slot = self.free_slots.pop()
        if self.states is not None:
            self.states.begin(seq, len(self._cached_blocks(seq)))
        if not seq.preemptions:
            self._diagnose(seq)
        if self._caches:
            self.memory.begin(seq)
        return seq.slot

    def grow(self, seq: Sequence, positions: int) -> bool:
        """Give a sequence blocks for so many positions; False if there are too few free ones."""
        need = blocks_needed(positions, self._facts) - len(seq.blocks)
        if need > self.pool.free:
            return False
        if need > 0:
            seq.blocks += self.pool.take(need, after=seq.blocks[-1] if seq.blocks else None)
        return True

    def publish(self, seq: Sequence, positions: int) -> None:
        """Let others share the full blocks of the first positions, which landed steps have computed."""
        size = self._facts.block_size
        while self._caches and seq.published < positions // size:
            index = seq.published
            self.pool.publish(seq.blocks[index], seq.block_hash(index, size))
            seq.published += 1

    def release(self, seq: Sequence) -> None:
        if seq.slot is None:
            raise RuntimeError(f"sequence {seq.key} has no slot to release")
        self.memory.end(seq)
        self.free_slots.append(seq.slot)
        self.pool.release(seq.blocks)
        seq.slot, seq.blocks, seq.published = None, [], 0

    def _diagnose(self, seq: Sequence) -> None:
        """Find out why no longer prefix was cached, if the request or the log asks for it."""
        logs = _log.isEnabledFor(logging.DEBUG) and seq.prompt_len - seq.computed > self._facts.block_size
        if not (logs or seq.request.diagnoses):
            return
        if self._caches:
            miss = self.memory.explain(seq, self.pool)
        else:
            miss = CacheMiss("disabled" if self._facts.causal else "no_cache", 0)
        if seq.request.diagnoses:
            seq.miss = miss
        if logs:
            client, id = seq.key
            _log.debug(
                "request %d of client %d: %d of %d prompt tokens were cached, %d match: %s",
                *(id, client, seq.computed, seq.prompt_len, miss.matched, miss.reason),
            )

    def reset_prefixes(self) -> None:
        """Forget all cached prefixes."""
        self.pool.withdraw_all()
        if self.states is not None:
            self.states.forget_all()

    def _cached_prefix(self, seq: Sequence) -> list[int]:
        """The cached blocks with which a sequence can begin. At least one token is left to compute."""
        blocks = self._cached_blocks(seq)
        return blocks if self.states is None else self.states.shorten(seq, blocks)

    def _cached_blocks(self, seq: Sequence) -> list[int]:
        blocks: list[int] = []
        if not self._caches or seq.owes_prompt_logprobs:
            return blocks
        size = self._facts.block_size
        for index in range((len(seq.tokens) - 1) // size):
            block = self.pool.find(seq.block_hash(index, size))
            if block is None:
                break
            blocks.append(block)
        return blocks
