"""The files of `make gpu-check`: all results as JSON, and tables for people."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from results import TARGETS, Result, Target


@dataclass
class Report:
    facts: dict[str, str] = field(default_factory=dict)
    """The date, the commit, the card, its driver, and versions."""
    sections: dict[str, list[Result]] = field(default_factory=dict)
    speed: float = 1.0
    """How many times as fast as an H200's the card's memory is read."""

    @property
    def results(self) -> list[Result]:
        return [result for results in self.sections.values() for result in results]

    @property
    def wrong(self) -> int:
        return sum(result.wrong for result in self.results)

    def summary(self) -> str:
        count = {"wrong results": self.wrong}
        count["parts that did not finish"] = sum(result.unfinished for result in self.results)
        count["skipped"] = sum(result.skipped for result in self.results)
        return ", ".join(f"{number} {what}" for what, number in count.items())

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sections = {name: [asdict(result) for result in found] for name, found in self.sections.items()}
        (folder / "gpu-check.json").write_text(
            json.dumps({"facts": self.facts, "sections": sections}, indent=2)
        )
        (folder / "gpu-check.md").write_text(self.markdown())

    def markdown(self) -> str:
        """A page section for `docs/performance.md`."""
        title = f"### {self.facts.get('card', 'A card')}, {self.facts.get('date', '')}"
        facts = "; ".join(f"{name} {value}" for name, value in self.facts.items() if name != "date")
        parts = [title, f"By `make gpu-check`: {facts}. {self.summary()}."]
        if measured := self._targets():
            parts.append(_table(("case", "target", "measured", ""), measured))
        for name, results in self.sections.items():
            rows = [
                (
                    result.name,
                    result.figure,
                    "" if result.share is None else f"{result.share:.0%}",
                    result.said(self.speed),
                )
                for result in results
            ]
            parts.append(f"**{name}**")
            parts.append(_table(("what", "measured", "of the floor's rate", ""), rows))
        return "\n\n".join(parts) + "\n"

    def _targets(self) -> list[tuple[str, ...]]:
        """The targets of which some were measured, and what was measured."""
        figures = {result.name: result for result in self.results if result.unit}
        if not figures.keys() & TARGETS.keys():
            return []
        return [_verdict(name, target.on(self.speed), figures) for name, target in TARGETS.items()]


def _verdict(name: str, target: Target, figures: Mapping[str, Result]) -> tuple[str, ...]:
    """The cells of a target: what it is on this card, and what was measured."""
    if name not in figures:
        return name, str(target), "not measured", ""
    verdict = "hit" if target.is_hit(figures[name].value) else "missed"
    return name, str(target), figures[name].figure, verdict


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    ruler = "|---|" + "---:|" * (len(head) - 2) + "---|"
    return "\n".join([line(head), ruler, *map(line, rows)])
