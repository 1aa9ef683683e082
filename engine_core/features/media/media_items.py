"""The media of live sequences, and which of their embeddings the worker holds.

Equal items, by their hashes, are one entry. A step encodes the items that its rows read and whose embeddings
the worker does not hold. These stay until others need the room; those that were read longest ago are dropped
first, but none that the step reads, and steps in flight have read what a later one drops. As long as a
sequence lives, its items can be encoded again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from engine_core.config import EngineConfig
from engine_core.engine_stats import Stats
from engine_core.features.media.media_checks import bad_media, cuts_no_item
from engine_core.prompt_media import Media, overlapping
from engine_core.protocol import AddRequest
from engine_core.scheduling.feature import Feature
from engine_core.scheduling.planned_step import PlannedStep, StepBuilder
from engine_core.scheduling.sequence import Sequence, own_salt
from models.media.item import CLIENT_MADE
from worker.protocol import Encode, MediaPlace, NewSeq
from worker.worker_facts import WorkerFacts

_LEAST_BYTES = 1 << 30
"""What the media of live requests may take at least, though nothing be kept for later ones."""


@dataclass(slots=True, eq=False)
class MediaItem:
    """A media item of live sequences, or one whose embeddings are held."""

    number: int
    media: Media | None
    """As the first of these sequences brought it. None: no live sequence has it."""
    embeddings: int
    work: int
    """The embeddings that a tower computes: none of those that a client brings."""
    users: int = 0
    """How often it occurs in live sequences."""


class MediaItems(Feature):
    """Decides which media items a step encodes and forgets, and how far rows can be computed with them."""

    def __init__(self, config: EngineConfig, facts: WorkerFacts) -> None:
        self._config, self._facts = config, facts
        self._whole = cuts_no_item(config, facts)
        self.bytes = 0
        """The bytes of the media of all live sequences."""
        self.embeddings = 0
        """The embeddings that the worker holds."""
        self.encoded = self.reused = 0
        """How many items were encoded, and how often a sequence found one that was, in total."""
        self.encode: list[Encode] = []
        self.partly: dict[int, int] = {}
        self.forget: list[int] = []
        """What the step that is being planned encodes, whole or partly, and forgets."""
        self._most_bytes = max(_LEAST_BYTES, int(config.mm_processor_cache_gb * (1 << 30)))
        self._most = facts.held_embeddings
        self._per_step = config.max_num_encoder_input_tokens or facts.max_num_batched_tokens
        self._splits = config.enable_chunked_prefill and facts.cuts_prompts
        self._whole_prompts = facts.whole_prompts
        self._layers = facts.tower_layers if self._splits else 0
        self._begun: bytes | None = None
        """The item, counted among those that are held, of whose layers the steps so far have computed:"""
        self._done = 0
        self._gave_way = self._gives_way = False
        """Whether layers were put off because prompts had filled a step: the last one, and this one."""
        self._items: dict[bytes, MediaItem] = {}
        self._held: OrderedDict[bytes, MediaItem] = OrderedDict()
        """The items whose embeddings the worker holds when the steps planned so far are done. Those that were
        read longest ago come first, and those that this step reads last."""
        self._read: set[MediaItem] = set()
        """The items that rows of the step that is being planned read."""
        self._left, self._room = self._per_step, self._most
        """The embeddings that can still be encoded in the step, and those that no row of it has read."""
        self._last_number = 0

    # Requests come and go.

    def refuse(self, add: AddRequest) -> str | None:
        """Say why the media of a request cannot be what they are said to be, or cannot be computed."""
        if reason := bad_media(add, self._config, self._facts):
            return reason
        known: dict[bytes, Media] = {}
        for media in add.media:
            item = self._items.get(media.hash)
            first = known.setdefault(media.hash, media if item is None else item.media or media)
            if _facts(first) != _facts(media) or (item is not None and item.embeddings != media.embeddings):
                return "two media items that differ have the same hash"
        return None

    def lacks_room(self, add: AddRequest) -> str | None:
        """Say whether the media of live requests would take too many bytes with those of this one."""
        here = {hash for hash, item in self._items.items() if item.media is not None}
        new = {media.hash: len(media.pixels) for media in add.media if media.hash not in here}
        too_many = self.bytes and self.bytes + sum(new.values()) > self._most_bytes
        return "other requests have too many media" if too_many else None

    def enter(self, seq: Sequence) -> None:
        """Take in the items of a request, which shares the bytes of those that are here already.

        Where tokens of a prompt see later ones, what is cached of it is wrong for those that go on otherwise.
        """
        add = seq.request
        if self._whole_prompts:
            places = [(each.hash, each.at) for each in add.media]
            seq.request = add = replace(add, salt=own_salt(add.salt, add.tokens[: seq.prompt_len], places))
        if add.media:
            seq.request = replace(add, media=tuple([self._enter(media) for media in add.media]))
            seq.free_from = max(seq.free_from, add.media[-1].end)
            for media in add.media:
                seq.mark(media.at, media.hash)

    def _enter(self, media: Media) -> Media:
        item = self._items.get(media.hash)
        if item is None:
            self._last_number += 1
            work = 0 if media.kind in CLIENT_MADE else media.embeddings
            item = self._items[media.hash] = MediaItem(self._last_number, None, media.embeddings, work)
        if item.media is None:
            item.media = media
            self.bytes += len(media.pixels)
        item.users += 1
        return replace(media, pixels=item.media.pixels)

    def leave(self, seq: Sequence) -> None:
        """Note that a sequence has ended: bytes that no other one needs are dropped."""
        for media in seq.request.media:
            item = self._items[media.hash]
            item.users -= 1
            if not item.users:
                self.bytes -= len(media.pixels)
                item.media = None
                if media.hash not in self._held:
                    del self._items[media.hash]

    def admit(self, seq: Sequence, new: NewSeq, step: StepBuilder) -> NewSeq:
        """Tell the places of the items of a sequence, under the numbers by which the worker knows them."""
        if not seq.request.media:
            return new
        return replace(new, media=tuple([self._place(one) for one in seq.request.media]))

    def _place(self, media: Media) -> MediaPlace:
        at, length, runs, grid = media.at, media.length, media.runs, media.grid
        number = self._items[media.hash].number
        return MediaPlace(number, media.kind, at, length, runs, grid, media.interval)

    # A step is planned.

    def begin_step(self) -> None:
        self.encode, self.partly = [], {}
        self._gave_way, self._gives_way = self._gives_way, False
        self._read.clear()
        self._left, self._room = self._per_step, self._most

    def least(self, seq: Sequence, start: int) -> int:
        """Tell the fewest positions from `start` on that can be computed: one, or an item that is not cut."""
        if self._whole:
            for media in overlapping(seq.request.media, start, start + 1):
                return media.end - start
        return 1

    def reach(self, seq: Sequence, start: int, count: int, step: StepBuilder) -> int:
        """As many of the next positions as can be computed; if there is none, layers of a tower are."""
        if not seq.request.media or start >= seq.request.media[-1].end:
            return count
        reached = self._reach(seq, start, count, step.fitting)
        if not reached and step.fitting < inf:
            step.encode(self._encode_partly(seq, start, step))
        return reached

    def _reach(self, seq: Sequence, start: int, count: int, fitting: float) -> int:
        """As many of the next `count` positions as can be computed in this step; changes nothing. The items
        there must be encoded, or fit into the step: within its budget, within the room, and within the
        embeddings that are `fitting` into its time. The first one that a step encodes need not fit into the
        budget; nor into the time, where the layers of one cannot be divided among steps."""
        left, room = self._left, self._room
        new: set[MediaItem] = set()
        stop = start + count
        for media in overlapping(seq.request.media, start, stop):
            item = self._items[media.hash]
            work = self._work(media.hash)
            if item in new or (item in self._read and not work):
                continue
            first = not (self.encode or self.partly) and (left == self._left or not self._splits)
            fits = (first or work <= left) and (work <= fitting or (first and not self._layers))
            waits = self._begun not in (None, media.hash) and fitting < inf
            if item.embeddings > room or (work and (waits or not fits or item.number in self.partly)):
                stop = media.at
                break
            new.add(item)
            room -= item.embeddings
            left -= work
            fitting -= work
        if self._whole:
            for media in overlapping(seq.request.media, stop - 1, stop):
                stop = media.at if media.end > stop else stop
        return max(0, stop - start)

    def _encode_partly(self, seq: Sequence, start: int, step: StepBuilder) -> float:
        """Have layers of the tower computed for the item at a position that `_reach` does not reach, as many
        as fit, or for the one that is begun, for which others wait. Returns the embeddings that they are
        worth. One is computed though it does not fit, but gives way once to prompts that have filled the
        step. The step must have rows, or it might not be run."""
        media = overlapping(seq.request.media, start, start + 1)
        if not self._layers or self.partly or not media or not self._work(media[0].hash):
            return 0.0
        if self._begun is not None and not self._items[self._begun].users:
            self._drop(self._begun)
        item = self._items[self._begun or media[0].hash]
        least = int(not self.encode and (self._gave_way or not step.has_prefill))
        layers = int(step.fitting * self._layers / item.work)
        layers = min(max(least, layers), self._layers - (self._done if self._begun else 0))
        self._gives_way = not layers
        if not layers or item.embeddings > self._room:
            return 0.0
        if self._begun is None:
            self._bring(media[0])
            self._begun, self._done = media[0].hash, 0
        self._pin(self._begun)
        self._advance(item, layers)
        return item.work * layers / self._layers

    def _advance(self, item: MediaItem, layers: int) -> None:
        self.partly[item.number] = layers
        self._done += layers
        if self._done == self._layers:
            self._begun = None

    def _work(self, hash: bytes) -> float:
        """The embeddings of an item that are still to be computed."""
        work = self._items[hash].work
        if hash == self._begun:
            return work * (self._layers - self._done) / self._layers
        return 0 if hash in self._held else work

    def add_row(self, seq: Sequence, count: int, step: StepBuilder) -> float:
        """Note that a row reads the next positions, as `reach` allows; returns the seconds of encoding."""
        before, start = self._left, seq.computed
        media = overlapping(seq.request.media, start, start + count)
        for each in media:
            if each.hash in self._held:
                self._pin(each.hash)
                self.reused += each.at >= start and each.hash != self._begun
        for each in media:
            self._left -= self._work(each.hash)
            if each.hash == self._begun:
                self._advance(self._items[each.hash], self._layers - self._done)
            elif each.hash not in self._held:
                self._bring(each)
                self._pin(each.hash)
        return step.encode_for_row(before - self._left)

    def _pin(self, hash: bytes) -> None:
        """Keep the embeddings of an item for this step, in which they are read."""
        self._held.move_to_end(hash)
        item = self._held[hash]
        if item not in self._read:
            self._read.add(item)
            self._room -= item.embeddings

    def _bring(self, media: Media) -> None:
        """Have an item encoded from this step on, after others are forgotten for which there is no room."""
        item = self._items[media.hash]
        self._make_room(item.embeddings)
        self._held[media.hash] = item
        self.embeddings += item.embeddings
        self.encoded += item.work > 0
        shape, grid, pixels = media.shape, media.grid, media.pixels
        self.encode.append(Encode(item.number, media.kind, shape, grid, item.embeddings, pixels))

    def _make_room(self, embeddings: int) -> None:
        while self.embeddings + embeddings > self._most:
            self._drop(next(iter(self._held)))

    def _drop(self, hash: bytes) -> None:
        item = self._held.pop(hash)
        self._begun = None if hash == self._begun else self._begun
        self.forget.append(item.number)
        self._let_go(hash, item)

    def _let_go(self, hash: bytes, item: MediaItem) -> None:
        self.embeddings -= item.embeddings
        if not item.users:
            del self._items[hash]

    def fail_step(self, planned: PlannedStep, again: list[Sequence], behind: bool) -> None:
        """Note that a step has failed: the next one begins without any embeddings (`StepInput.fresh`)."""
        self.forget = []
        for hash, item in self._held.items():
            self._let_go(hash, item)
        self._held.clear()
        self._begun = None

    def forget_prefixes(self) -> None:
        for hash in list(self._held):
            self._drop(hash)

    def finish(self, step: StepBuilder) -> None:
        """Tell the worker what the step encodes, and what it forgets, which is told once."""
        if self.encode or self.partly or self.forget:
            step.told |= {"encode": self.encode, "partly": self.partly, "forget": self.forget}
            self.forget = []

    def add_stats(self, stats: Stats) -> Stats:
        return replace(
            stats,
            media_encoded=stats.media_encoded + self.encoded,
            media_reused=stats.media_reused + self.reused,
            media_embeddings=self.embeddings,
            media_bytes=stats.media_bytes + self.bytes,
        )


def _facts(media: Media) -> tuple[object, ...]:
    """What is the same for media with the same hash."""
    return media.kind, media.shape, media.grid, media.interval, media.embeddings, len(media.pixels)
