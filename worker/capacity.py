"""The capacity of a worker: the sizes of its steps, and the memory that its caches may take."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 1 << 30

_MOST_EMBEDDINGS = 1 << 14
LEAST_ROWS = 64
"""The least that a step has room for of rows that sample."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kills: int = 0
    """How many workers in this one's place were killed because memory ran out: it takes less for each."""

    @property
    def max_pooled_tokens(self) -> int:
        """The most hidden states that are pooled in one step, those of earlier steps among them."""
        return max(self.max_num_batched_tokens, self.max_model_len)

    @property
    def most_rows(self) -> int:
        """The most rows that sample in a step, guesses among them."""
        return min(max(self.max_num_seqs, LEAST_ROWS), self.max_num_batched_tokens)

    @property
    def most_embeddings(self) -> int:
        """The most embeddings that an item may have, if the model has a tower; a step may need as many."""
        return max(self.max_num_batched_tokens, min(self.max_model_len, _MOST_EMBEDDINGS))

    @property
    def staged_words(self) -> int:
        """The words that most steps stage; a step with more, for long prompts, makes a larger buffer."""
        return 4 * (self.max_num_batched_tokens + 8 * self.most_rows)


@dataclass(frozen=True, slots=True)
class CacheBudget:
    nbytes: int
    flag: str
    """The option that an operator changes to get another budget."""
    most: int
    """The bytes that the device has beside the weights, whatever is asked for."""

    def less(self, nbytes: int) -> CacheBudget:
        """What is left of it when so many bytes are taken."""
        return replace(self, nbytes=max(0, self.nbytes - nbytes), most=max(0, self.most - nbytes))
