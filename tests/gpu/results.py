"""What `make gpu-check` has found: results, and the targets beside which some of them stand."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

MORE, LESS = "at least", "at most"
H200_BYTES = 4.3e12
"""The bytes that an H200 copies in a second, by the same measure as those of other cards."""


@dataclass(frozen=True)
class Result:
    name: str
    text: str = ""
    value: float = 0.0
    unit: str = ""
    share: float | None = None
    """The part of what the card could do at most."""
    wrong: int = 0
    """How many wrong results this stands for."""
    skipped: bool = False
    """Whether nothing was done, because something is missing here that it needs."""
    unfinished: bool = False
    """Whether it was ended because it took too long."""

    @property
    def figure(self) -> str:
        return f"{self.value:,.2f} {self.unit}" if self.unit else ""

    def said(self, speed: float = 1.0) -> str:
        """All but the figures: what it is marked with, the target (`Target.on`), and the text."""
        marks = ["WRONG"] * bool(self.wrong) + ["skipped"] * self.skipped + ["unfinished"] * self.unfinished
        target = TARGETS.get(self.name)
        told = [] if target is None or not self.unit else [target.on(speed).beside(self.value)]
        return ": ".join(
            part for part in (" ".join(marks), ", ".join([*told, self.text]).strip(", ")) if part
        )

    def line(self, speed: float = 1.0) -> str:
        share = "" if self.share is None else f"  {self.share:6.1%} of the floor's rate"
        return f"{self.name:48} {self.figure:>22}{share}  {self.said(speed)}".rstrip()


@dataclass(frozen=True)
class Target:
    """What a figure is to be on an H200."""

    value: float
    unit: str
    bound: str = MORE
    by_memory: bool = False
    """Whether reading memory takes most of the time."""

    def on(self, speed: float) -> Target:
        """Return the target on a card whose memory is read so many times as fast as that of an H200."""
        return replace(self, value=self.value * speed) if self.by_memory else self

    def is_hit(self, measured: float) -> bool:
        return measured >= self.value if self.bound == MORE else measured <= self.value

    def beside(self, measured: float) -> str:
        return f"{'hit' if self.is_hit(measured) else 'missed'}, {self}"

    def __str__(self) -> str:
        return f"{self.bound} {float(f'{self.value:.3g}'):,g} {self.unit}"


TARGETS = {
    name: Target(**fields)
    for name, fields in json.loads(Path(__file__).with_name("targets.json").read_text()).items()
}
"""The targets by the names of results."""
