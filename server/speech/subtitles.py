"""Subtitles: SubRip (srt) and WebVTT (vtt)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Titled(Protocol):
    """A text with its times in seconds."""

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...

    @property
    def text(self) -> str: ...


def srt(segments: Iterable[Titled]) -> str:
    return "".join(
        f"{number}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{_line(each.text)}\n\n"
        for number, each in enumerate(segments, 1)
    )


def vtt(segments: Iterable[Titled]) -> str:
    titles = (
        f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{_escaped(_line(each.text))}\n\n"
        for each in segments
    )
    return "WEBVTT\n\n" + "".join(titles)


def _escaped(text: str) -> str:
    """The text without what begins markup in WebVTT."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _time(seconds: float, point: str) -> str:
    whole, thousandths = divmod(round(max(0.0, seconds) * 1000), 1000)
    minutes, whole = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{whole:02d}{point}{thousandths:03d}"


def _line(text: str) -> str:
    """The text in one line, without what divides times."""
    return " ".join(text.split()).replace("-->", "->")
