"""A card in the host's memory with lanes of work, done in any order that their marks allow."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

from worker.disk.host_copies import Mark


class Card:
    def __init__(self, seed: int) -> None:
        self._random, self._changed = random.Random(seed), threading.Condition()
        self._hurries = False
        self._lanes: list[deque[Callable[[], object] | CardMark | CardWait]] = []

    def lane(self) -> CardLane:
        self._lanes.append(deque())
        return CardLane(self, len(self._lanes) - 1)

    def add(self, lane: int, work: Callable[[], object] | CardMark | CardWait) -> None:
        with self._changed:
            self._lanes[lane].append(work)
            for _ in range(self._random.randrange(3)):
                self._go_on()
            self._changed.notify_all()

    @contextmanager
    def hurrying(self) -> Generator[None]:
        """Let marks be reached that are waited for. Else the card goes on when it gets work alone."""
        with self._changed:
            self._hurries = True
            self._changed.notify_all()
        yield
        with self._changed:
            self._hurries = False

    def reach(self, mark: CardMark) -> None:
        """Wait until this mark is reached."""
        with self._changed:
            self._changed.wait_for(lambda: mark.is_reached or self._hurries)
            while not mark.is_reached:
                self._go_on()

    def _go_on(self) -> None:
        """Do what stands first in one of the lanes."""
        able = [
            lane
            for lane in self._lanes
            if lane and not (isinstance(head := lane[0], CardWait) and not head.mark.is_reached)
        ]
        if not able:
            return
        match self._random.choice(able).popleft():
            case CardMark() as mark:
                mark.is_reached = True
            case CardWait():
                pass
            case work:
                work()


class CardMark:
    def __init__(self, card: Card) -> None:
        self._card, self.is_reached = card, False

    def synchronize(self) -> None:
        self._card.reach(self)


class CardWait:
    def __init__(self, mark: CardMark) -> None:
        self.mark = mark


class CardLane:
    def __init__(self, card: Card, number: int) -> None:
        self._card, self._number = card, number

    def run(self, work: Callable[[], object]) -> None:
        self._card.add(self._number, work)

    def mark(self) -> CardMark:
        mark = CardMark(self._card)
        self._card.add(self._number, mark)
        return mark

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, CardMark)
        self._card.add(self._number, CardWait(mark))
