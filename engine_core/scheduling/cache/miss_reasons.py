"""The last prompts of each salt, by which it is explained why no longer prefix of a prompt was cached.

It uses no I/O and no clock. Remembering copies nothing: it keeps the lists of token ids that sequences have
anyway, about 40 bytes for each token. Comparing with them costs time only when somebody asks. Prompts of
other salts are never looked at.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import shake_256
from typing import Literal

from engine_core.protocol import CacheMiss
from engine_core.reason_codes import MissReason
from engine_core.scheduling.cache.block_pool import BlockPool
from engine_core.scheduling.sequence import Key, Sequence

MOST_TOKENS = 1 << 18
"""The most tokens that are remembered, or two prompts of the greatest length if these are more."""
OVERHEAD = 64
"""The tokens that each prompt counts beyond its own, for the objects around them: about 256 bytes."""
_WIDTH = array("i").itemsize  # bytes of a token


class RememberedPrompt:
    """The prompt of a sequence, and the outputs that it has computed."""

    __slots__ = ("_bytes", "_media", "_prompt_len", "_tokens", "cost", "key", "salt", "state")

    def __init__(self, seq: Sequence) -> None:
        self.key = seq.key
        self.salt = seq.salt
        self.state: Literal["computing", "preempted", "not_computed"] = "computing"
        """The reason why its tokens are not cached, should they never have been published."""
        self._prompt_len = seq.prompt_len
        self.cost = self._prompt_len + OVERHEAD
        self._media = [(media.at, media.length, media.hash) for media in seq.request.media]
        self._tokens = seq.tokens  # the sequence's own list, which grows while it runs
        self._bytes = b""

    def __len__(self) -> int:
        """The number of its tokens, without the last output: no step has computed the cache entry of that."""
        return max(self._prompt_len, len(self._tokens) - 1)

    def as_bytes(self) -> bytes:
        """The tokens as int32 [number of tokens], which are compared at once; converted when first asked."""
        if not self._bytes:
            self._bytes = _as_bytes(self._tokens[: len(self)], self._media)
        elif len(self._bytes) != len(self) * _WIDTH:
            self._bytes += array("i", self._tokens[len(self._bytes) // _WIDTH : len(self)]).tobytes()
        return self._bytes


class PrefixMemory:
    """Remembers the prompts that were admitted last, so many tokens of all salts together."""

    def __init__(self, block_size: int, most_tokens: int = MOST_TOKENS) -> None:
        self.size = 0
        """The tokens that are remembered, each prompt's overhead included."""
        self._block_size = block_size
        self._most = most_tokens
        self._prompts: dict[RememberedPrompt, None] = {}
        """All prompts, the oldest first."""
        self._by_salt: dict[tuple[str, str], dict[RememberedPrompt, None]] = {}
        self._open: dict[Key, RememberedPrompt] = {}
        """The prompts of sequences that run, or were preempted."""

    def __len__(self) -> int:
        return len(self._prompts)

    def begin(self, seq: Sequence) -> None:
        """Remember the prompt of a sequence that is admitted, also after it was preempted."""
        if seq.preemptions and seq.key in self._open:
            self._open[seq.key].state = "computing"
            return
        prompt = self._open[seq.key] = RememberedPrompt(seq)
        self._prompts[prompt] = None
        self._by_salt.setdefault(prompt.salt, {})[prompt] = None
        self._grow(prompt.cost)

    def end(self, seq: Sequence) -> None:
        """Note that a sequence has ended, or that it is preempted; only an ended one's outputs are final."""
        prompt = self._open.get(seq.key)
        if prompt is None:
            return  # it was forgotten meanwhile, or never remembered
        if not seq.done:
            prompt.state = "preempted"
            return
        del self._open[seq.key]
        prompt.state = "not_computed"
        prompt.cost = len(prompt) + OVERHEAD
        self._grow(prompt.cost - seq.prompt_len - OVERHEAD)

    def explain(self, seq: Sequence, pool: BlockPool, *, has_states: bool = False) -> CacheMiss:
        """Why no longer prefix of a sequence is cached than it has been admitted with.

        Where the first group of layers has the next block, a state is missing, or a block in a window.
        """
        size, index = self._block_size, seq.computed // self._block_size
        while index < seq.prompt_len // size and pool.known(seq.block_hash(index, size)):
            index += 1
        media = [(media.at, media.length, media.hash) for media in seq.request.media]
        tokens = _as_bytes(seq.tokens, media)
        prompts = list(reversed(self._by_salt.get(seq.salt, ())))  # the newest first
        common, nearest = _nearest(tokens, prompts)
        matched = max(common, index * size)
        if seq.owes_prompt_logprobs:
            return CacheMiss("prompt_logprobs", matched)
        missing = seq.computed // size
        if missing >= (seq.prompt_len - 1) // size:
            return CacheMiss(self._rest(seq, matched), matched)
        if pool.find(seq.block_hash(missing, size)) is not None:
            return CacheMiss("state_not_kept" if has_states else "evicted", matched)
        reason = self._lost(seq, pool, missing) or self._never_published(tokens, prompts, missing)
        return CacheMiss(reason or _new(seq, common, nearest), matched)

    def _rest(self, seq: Sequence, matched: int) -> MissReason:
        """The reason if all was found that can be: only tokens that fill no block, or the last, are left."""
        if matched < seq.prompt_len:
            return "none" if seq.computed else "short_prompt"
        return "rest_of_block" if seq.prompt_len % self._block_size else "last_token"

    def _lost(self, seq: Sequence, pool: BlockPool, missing: int) -> MissReason | None:
        """The reason if the first missing block was published once."""
        hash = seq.block_hash(missing, self._block_size)
        if hash in pool.evicted:
            return "evicted"
        return "reset" if hash in pool.reset else None

    def _never_published(
        self, tokens: bytes, prompts: Iterable[RememberedPrompt], missing: int
    ) -> MissReason | None:
        """The reason if the first missing block is in remembered prompts, none of which has computed it."""
        missed = tokens[: (missing + 1) * self._block_size * _WIDTH]
        states: list[MissReason] = [one.state for one in prompts if one.as_bytes().startswith(missed)]
        return "computing" if "computing" in states else next(iter(states), None)

    def _grow(self, tokens: int) -> None:
        """Count so many more tokens, and forget the oldest prompts if these are too many."""
        self.size += tokens
        while self.size > self._most:
            self._forget(next(iter(self._prompts)))

    def _forget(self, prompt: RememberedPrompt) -> None:
        self.size -= prompt.cost
        del self._prompts[prompt]
        if self._open.get(prompt.key) is prompt:
            del self._open[prompt.key]
        of_salt = self._by_salt[prompt.salt]
        del of_salt[prompt]
        if not of_salt:
            del self._by_salt[prompt.salt]


def _as_bytes(tokens: list[int], media: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Tokens as int32 [number of tokens]; those of media items are numbers made of the item's hash instead.

    `media` has the position of each item, the number of its tokens and its hash.
    """
    found = bytearray(array("i", tokens).tobytes())
    for at, length, hash in media:
        found[at * _WIDTH : (at + length) * _WIDTH] = shake_256(hash).digest(length * _WIDTH)
    return bytes(found)


def _new(seq: Sequence, common: int, nearest: list[RememberedPrompt]) -> MissReason:
    """The reason if the first missing block was never part of a remembered prompt."""
    if common < seq.computed:
        return "new_tokens"  # the prompt that has computed them is forgotten
    if not nearest:
        return "first_time"
    if not common:
        return "other_beginning"
    if not any(len(prompt) == common for prompt in nearest):
        return "different_token"
    return "rest_of_block" if common > seq.computed else "new_tokens"


def _nearest(tokens: bytes, prompts: Iterable[RememberedPrompt]) -> tuple[int, list[RememberedPrompt]]:
    """The greatest number of leading tokens in common with a prompt, and the prompts that have so many."""
    common, head = 0, b""
    nearest: list[RememberedPrompt] = []
    for prompt in prompts:
        if not prompt.as_bytes().startswith(head):
            continue
        length = _common(tokens, prompt.as_bytes(), common)
        if length > common:
            common, head, nearest = length, tokens[: length * _WIDTH], []
        nearest.append(prompt)
    return common, nearest


def _common(one: bytes, other: bytes, low: int) -> int:
    """The number of leading tokens that are equal, of which the first `low` are known to be."""
    following = slice(low * _WIDTH, (low + 1) * _WIDTH)
    if one[following] != other[following]:
        return low  # true of most prompts that have no more in common than the nearest one so far
    high = min(len(one), len(other)) // _WIDTH
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * _WIDTH, middle * _WIDTH)
        low, high = (middle, high) if one[part] == other[part] else (low, middle - 1)
    return low
