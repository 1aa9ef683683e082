"""The state of one request in the engine, which only the scheduler and what it calls may change.

Cache blocks are found under hashes: of a block's tokens, and of all tokens before them (`chain_hash`).
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from msgspec.structs import replace

from engine_core.engine_stats import Timing
from engine_core.protocol import AddRequest
from engine_core.scheduling.queue.shares import Owner, WorkClass, class_of
from worker.protocol import Pooling, Sampling, SeqStep, TokenLogprobs

Key = tuple[int, int]
"""The number of a client, and the id of one of its requests."""

Order = tuple[int, float, int]
"""Priority, the turn among texts to be pooled, and arrival. No two sequences have the same."""


class Place(Enum):
    """Says where a sequence is that has not ended."""

    WAITING = auto()
    """In the queue for a slot, unless it is paused."""
    DIVERTED = auto()
    """It waits for something outside of the queue, and not for a slot."""
    RUNNING = auto()
    """It has a slot, and blocks."""


@dataclass(slots=True, eq=False)
class Record:
    """Keeps what clients are told of a sequence with its first answer, and when it has ended."""

    arrived: float
    started: float | None = None
    first_token: float | None = None
    expected: float | None = None
    """The seconds from arrival to the first answer, as expected at arrival."""
    cached: int = 0
    """The tokens of its prompt that were found in the cache when it got a slot."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    preemptions: int = 0
    steps: int = 0
    compute: float = 0.0
    """The seconds of its parts of steps."""

    def timing(self, now: float) -> Timing:
        started = now if self.started is None else self.started
        first = now if self.first_token is None else self.first_token
        return Timing(
            queued=started - self.arrived,
            prefill=first - started,
            decode=now - first,
            preemptions=self.preemptions,
            steps=self.steps,
            compute=self.compute,
        )


@dataclass(slots=True, eq=False)
class Sequence:
    key: Key
    request: AddRequest
    order: Order
    """The lowest runs first when not all can run."""
    limit: int
    """The number of tokens, the prompt's included, at which the sequence ends."""
    owner: Owner
    record: Record

    work_class: WorkClass = field(init=False)
    tokens: list[int] = field(init=False)
    """All known tokens: the prompt, and those that landed steps have sampled."""
    marks: list[tuple[int, bytes]] = field(default_factory=list)
    """What decides, from a position on, what is computed of it, beside its tokens and salt; in order."""
    is_followed: bool = False
    """Whether a feature takes each token of the answer, and may end it."""
    free_from: int = 0
    """The first position from which on no feature says how far it can be computed in a step."""
    keeps_place: bool = False
    """A feature computes something before it, in the order of arrival: it overtakes none, nor does any it."""
    computed: int = 0
    """Positions whose cache entries are written by the steps planned so far."""
    pending: int = 0
    """Sampled tokens of planned steps that have not landed."""
    in_flight: int = 0
    void_before: int = 0
    """Steps in flight with lower numbers bring nothing for it: it was preempted after they were planned."""
    paused: bool = False
    """It is in no step and waits for no slot, because its reader does not keep up."""
    place: Place = Place.WAITING
    expected_cached: int = 0
    """The tokens that it will find in the cache, as far as was known when it began to wait."""
    done: bool = False
    """The terminal answer is given; what steps in flight still bring is dropped."""

    slot: int = -1
    """The row in the worker's tables while the sequence runs."""
    tables: list[list[int]] = field(default_factory=list)
    """Its cache blocks, a table for each group of layers; the scratch block is where it has none any more."""
    published: int = 0
    """The number of leading blocks of each table that need not be published (again)."""
    hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.work_class = class_of(self.request)
        self.tokens = list(self.request.tokens)
        if self.resumed:
            self.record.started = self.record.arrived
            self.record.first_token = self.request.began or self.record.arrived

    @property
    def id(self) -> int:
        return self.key[1]

    @property
    def prompt_len(self) -> int:
        return self.request.prompt_len or len(self.request.tokens)

    @property
    def resumed(self) -> bool:
        """Whether tokens of its answer came before it. What is told with the first token has been told."""
        return self.request.prompt_len > 0

    @property
    def pools(self) -> bool:
        """Whether the sequence ends when its prompt is computed, and samples nothing."""
        return isinstance(self.request.params, Pooling)

    @property
    def aligns(self) -> bool:
        """Whether each of its tokens is compared with the source, for which all of them are computed."""
        params = self.request.params
        return isinstance(params, Pooling) and params.task == "align"

    @property
    def left(self) -> int:
        return self.limit - len(self.tokens)

    @property
    def may_stop(self) -> bool:
        """Whether an answer may end before the limit of its request."""
        params = self.request.params
        if isinstance(params, Pooling):
            return False
        return bool(params.stop_token_ids) or self.request.times_each or self.is_followed

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether logprobs of the prompt are asked for and not sent yet."""
        return self.record.first_token is None and self.wants_prompt_logprobs

    @property
    def wants_prompt_logprobs(self) -> bool:
        params = self.request.params
        return isinstance(params, Sampling) and params.prompt_logprobs is not None

    @property
    def gap(self) -> int:
        """The tokens that are known but not computed, which scheduling has to close."""
        known = len(self.tokens) + self.pending
        return known - self.computed if known < self.limit else 0

    @property
    def unread(self) -> int:
        """The tokens to compute before its next answer, if it finds as many cached as was expected."""
        return self.gap if self.place is Place.RUNNING else self.gap - self.expected_cached

    @property
    def is_held(self) -> bool:
        """Whether a feature says when its next tokens are computed."""
        return self.keeps_place or self.computed < self.free_from

    def land(self, number: int, row: SeqStep) -> bool:
        """Note that its row of step `number` has landed; returns whether its outcome is wanted."""
        self.in_flight -= 1
        if number < self.void_before:
            return False
        self.pending -= row.samples
        return not self.done

    def wants(self, number: int) -> bool:
        """Whether the outcome of its row in step `number`, which is in flight, is wanted."""
        return not (self.done or number < self.void_before)

    def mark(self, position: int, mark: bytes) -> None:
        """Let blocks from this position on be shared only by sequences with the same mark there."""
        insort(self.marks, (position, mark))

    def block_hash(self, index: int, block_size: int) -> bytes:
        while len(self.hashes) <= index:
            at = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else root_hash(self.request.salt)
            stop = at + block_size
            self.hashes.append(chain_hash(parent, self.tokens[at:stop], self._marks(at, stop)))
        return self.hashes[index]

    def end_hash(self, length: int, block_size: int) -> bytes:
        """The hash of what a beginning of so many tokens leaves of its last block."""
        at = length - length % block_size
        parent = self.block_hash(at // block_size - 1, block_size) if at else root_hash(self.request.salt)
        marks = [*self._marks(at, length), (b"end", length - at)]  # so it is that of no full block
        return chain_hash(parent, self.tokens[at:length], marks)

    def seclude(self) -> None:
        """Let nobody find what is published of it from now on."""
        self.request = replace(self.request, salt=f"{self.request.salt} {secrets.token_hex()}")
        self.hashes = []

    def _marks(self, at: int, stop: int) -> list[tuple[bytes, int]]:
        """The marks within these positions, counted from the first one."""
        if not self.marks:
            return []
        first, behind = bisect_left(self.marks, (at,)), bisect_left(self.marks, (stop,))
        return [(mark, position - at) for position, mark in self.marks[first:behind]]


def as_request(seq: Sequence) -> AddRequest:
    """Make a request that goes on where a sequence stands, whose answers so far have been given."""
    request, params = seq.request, seq.request.params
    if len(seq.tokens) == seq.prompt_len or isinstance(params, Pooling):
        return request
    began = (seq.record.first_token or 0.0) if request.sent else 0.0
    params = replace(params, prompt_logprobs=None)
    return replace(request, tokens=seq.tokens, prompt_len=seq.prompt_len, began=began, params=params)


_HASH_BYTES = 16


def root_hash(salt: str) -> bytes:
    """The hash with which a chain of block hashes begins. Sequences of different salts share no block."""
    return hashlib.blake2b(salt.encode(), digest_size=_HASH_BYTES).digest()


def own_salt(salt: str, prompt: list[int], marks: Iterable[tuple[bytes, int]]) -> str:
    """Make a salt for a prompt whose blocks only prompts with the same tokens and marks may share."""
    return f"{salt} {chain_hash(root_hash(salt), prompt, marks).hex()}"


def chain_hash(parent: bytes, tokens: list[int], marks: Iterable[tuple[bytes, int]] = ()) -> bytes:
    """The hash of a block's tokens and, through `parent`, of all tokens before them.

    `marks` say what else decides its content, each with its place counted from the block's first token. The
    hash is cryptographic: with a weaker one, a prompt could be made to find somebody else's block.
    """
    data = parent + array("i", tokens).tobytes()
    for mark, place in marks:
        data += array("q", (len(mark), place)).tobytes() + mark
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
