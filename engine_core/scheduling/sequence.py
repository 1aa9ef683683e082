"""All that this floor knows of one request. Changed by the scheduler alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_core.protocol import Add, Timing
from engine_core.scheduling.blocks import chain_hash, root_hash
from worker.protocol import Pooling, Sampling, TokenLogprobs

Key = tuple[int, int]
"""Which server, and which of its requests."""


@dataclass(slots=True, eq=False)
class Sequence:
    key: Key
    request: Add
    rank: tuple[int, int]
    """Who comes first when not all can run: priority, then arrival. No two are equal."""
    limit: int
    """Tokens at which it ends, those of the prompt included."""
    arrived: float

    tokens: list[int] = field(init=False)
    """All that are known: the prompt, and what was sampled and has landed."""
    computed: int = 0
    """Positions whose cache entries are written by steps planned so far."""
    pending: int = 0
    """Samples planned that have not landed."""
    inflight: int = 0
    """Steps planned that have not landed."""
    done: bool = False
    """Its terminal answer is given; what still lands is dropped."""

    slot: int | None = None
    """Its row in the worker while it runs."""
    blocks: list[int] = field(default_factory=list)
    published: int = 0
    """Blocks, from the first, that need not be published (again)."""
    hashes: list[bytes] = field(default_factory=list)

    cached: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    preemptions: int = 0
    started: float | None = None
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)

    @property
    def prompt_len(self) -> int:
        return len(self.request.tokens)

    @property
    def pools(self) -> bool:
        """It ends when its prompt is read: no token follows."""
        return isinstance(self.request.params, Pooling)

    @property
    def tells_prompt(self) -> bool:
        """The logprobs of its prompt are asked for, and still to be told."""
        params = self.request.params
        if self.first_token is not None or not isinstance(params, Sampling):
            return False
        return params.prompt_logprobs is not None

    @property
    def want(self) -> int:
        """Tokens to compute: the gap between known and computed, which scheduling has to close."""
        known = len(self.tokens) + self.pending
        return known - self.computed if known < self.limit else 0

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Hash of a full block of known tokens."""
        while len(self.hashes) <= index:
            at = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else root_hash(self.request.salt)
            self.hashes.append(chain_hash(parent, self.tokens[at : at + block_size]))
        return self.hashes[index]

    def timing(self, now: float) -> Timing:
        started = now if self.started is None else self.started
        first = now if self.first_token is None else self.first_token
        return Timing(
            queued=started - self.arrived,
            prefill=first - started,
            decode=now - first,
            preemptions=self.preemptions,
        )
