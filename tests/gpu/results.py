"""What `make gpu-check` has found: results, and the targets beside which some of them stand."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def _rates(rates: dict[str, float]) -> dict[str, Target]:
    return {name: Target(rate, "tok/s", by_memory="decoding" in name) for name, rate in rates.items()}


def _times(times: dict[str, float], unit: str) -> dict[str, Target]:
    return {name: Target(time, unit, LESS) for name, time in times.items()}


TARGETS: dict[str, Target] = {
    **_rates(
        {
            "8B decoding, 1 x 512": 228,
            "8B decoding, 32 x 512": 6_400,
            "8B decoding, 256 x 512": 27_000,
        }
    ),
    **{f"8B drawing, {rows} x 512": Target(0.97, "of decoding") for rows in (1, 32, 256)},
    **_rates(
        {
            "8B decoding, 256 x 2048": 10_500,
            "8B with fp8 cache decoding, 256 x 2048": 17_000,
            "8B prompt of 2048": 35_000,
            "8B prompt of 8192": 32_000,
            "8B in fp8 decoding, 1 x 512": 400,
            "8B in fp8 decoding, 256 x 512": 34_000,
            "8B in W4A16 decoding, 1 x 512": 550,
            "0.6B decoding, 1 x 512": 1_500,
            "0.6B decoding, 256 x 512": 50_000,
            "0.6B embeddings, 64 x 512": 350_000,
            "MiniLM embeddings, 64 x 128": 2_000_000,
        }
    ),
    **_times(
        {
            "8B prompt of 512, to its token": 20,
            "0.6B prompt of 128, to its token": 5,
            "0.6B one text of 32": 1.5,
            "MiniLM one text of 32": 0.5,
        },
        "ms",
    ),
    **_times(
        {
            "8B ready, kernels compiled": 12,
            "8B ready, kernels not compiled": 25,
            "0.6B ready, kernels compiled": 5,
            "0.6B ready, kernels not compiled": 15,
        },
        "s",
    ),
    **_times({"8B idle share of a step, 1 x 512": 3, "0.6B idle share of a step, 1 x 512": 10}, "%"),
    **{
        f"{shape}, {clients} clients, beside the peer": Target(least, "times its tokens")
        for shape, least in (("8B", 1.0), ("0.6B", 1.2))
        for clients in (1, 32, 256)
    },
    **{
        f"{shape}, {clients} clients, first token beside the peer": Target(1, "times its time", LESS)
        for shape in ("8B", "0.6B")
        for clients in (1, 32, 256)
    },
    **{f"{shape}, ready beside the peer": Target(1 / 3, "times its time", LESS) for shape in ("8B", "0.6B")},
}
"""The targets by the names of results."""
