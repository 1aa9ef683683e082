"""Writes the figures into docs/performance.md, between two marks, and the charts beside it."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import work
from svg_charts import Chart, Line, svg

BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"
OURS = "facet"
_EIGHT_BITS = ("facet int8", "llama.cpp Q8_0")
"""Sides that read half of the weights' bytes, which are compared with each other."""
_CACHE = work.Model.cache_mib
_PICTURED = "256 in, 64 out"

Record = dict[str, Any]

_COLUMNS = {
    "generation": (
        ("output_tokens_per_second", "output tokens/s"),
        ("ttft_ms", "TTFT ms"),
        ("tpot_ms", "TPOT ms"),
    ),
    "embeddings": (("inputs_per_second", "inputs/s"),),
    "overhead": (
        ("requests_per_second", "requests/s"),
        ("output_tokens_per_second", "output tokens/s"),
        ("ttft_ms", "TTFT ms"),
        ("api_us_per_token", "API process, µs of CPU per token"),
    ),
    "startup": (("ready_s", "ready s"), ("first_s", "first token s")),
    "memory": (
        ("api_mib", "API process MiB"),
        ("all_mib", "all processes MiB"),
        ("beyond_mib", "beyond weights and KV, MiB"),
        ("processes", "processes"),
        ("idle_percent", "idle, % of a core"),
    ),
}
_TITLES = {
    "generation": "Generation",
    "embeddings": "Embeddings",
    "overhead": "HTTP and IPC, with a model too small to matter",
    "startup": "From start to the first token",
    "memory": "At rest",
}
_NOTES = {
    "embeddings": "Texts, not token ids, are sent to all: Infinity takes no others.",
    "startup": "Files are in the page cache. From its second start on vLLM finds what it has compiled.",
    "memory": "PSS of all processes: pages that several share count once. Beyond weights and KV is what is "
    f"left without the checkpoint's bytes, and without a cache: extrapolated from one of {_CACHE} MiB and "
    "one of half of that, for some fill theirs at the start and others as it is used.",
}


def write(path: Path, known: Record) -> None:
    """Writes the page; what stands outside of the marks stays as it is."""
    before, after = "", ""
    if path.exists():
        before, _, rest = path.read_text("utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
    pictures = {name: svg(chart) for name, chart in _charts(known["records"])}
    for name, picture in pictures.items():
        (path.parent / name).parent.mkdir(exist_ok=True)
        (path.parent / name).write_text(picture + "\n", "utf-8")
    text = "\n\n".join([BEGIN, *_sections(known, list(pictures)), END])
    path.write_text(f"{before}{text}{after or chr(10)}", "utf-8")


def _sections(known: Record, pictures: Sequence[str]) -> Iterator[str]:
    yield _about(known)
    for part in work.PARTS:
        records = [record for record in known["records"] if record["part"] == part]
        if not records:
            continue
        yield f"### {_TITLES[part]}"
        if part in _NOTES:
            yield _NOTES[part]
        if part == "generation":
            yield "\n".join(f"![{Path(name).stem}]({name})" for name in pictures)
        for model in _unique(record["model"] for record in records):
            yield f"**{model}**"
            mine = [record for record in records if record["model"] == model]
            yield from _tables(mine, _COLUMNS[part])
            yield from _failures(mine)


def _about(known: Record) -> str:
    machine, records = known["machine"], known["records"]
    rounds = 1 + max((record["round"] for record in records), default=0)
    about = (
        f"{machine['cores']} cores ({machine['processor']}; {', '.join(machine['instructions'])}), "
        f"{machine['memory_gib']} GiB, {known['date']}. Medians of up to {rounds} rounds. Behind each figure "
        "of another server stands what Facet has as a multiple of it, and with int8 weights as one of Q8_0: "
        "the median of the ratios within a round. At its best this machine has read "
        f"{machine['read_gb_s']:.1f} GB/s, and multiplied {machine['bf16_tflop_s']:.2f} TFLOP/s in bfloat16 "
        f"and {machine['fp32_tflop_s']:.2f} in float32."
    )
    present = _unique([OURS, *(record["side"] for record in records)])
    return "\n".join([about, "", *(f"- {side}: {known['sides'].get(side, '')}" for side in present)])


def _tables(records: Sequence[Record], columns: Sequence[tuple[str, str]]) -> Iterator[str]:
    """One table with a row for each side; of several cases a table for each metric, a row for each case."""
    good = [record for record in records if "failure" not in record]
    cases = _unique(record["case"] for record in good)
    sides = _unique([OURS, *(record["side"] for record in good)])
    if len(cases) <= 1:
        rows = [[side, *(_cell(good, side, metric) for metric, _ in columns)] for side in sides]
        yield _table(["", *(title for _, title in columns)], rows)
        return
    for metric, title in columns:
        named = [side for side in sides if _median(good, side, metric) is not None]
        by_case = {case: [record for record in good if record["case"] == case] for case in cases}
        rows = [[case, *(_cell(mine, side, metric) for side in named)] for case, mine in by_case.items()]
        yield _table([title, *named], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(records: Sequence[Record], side: str, metric: str) -> str:
    value = _median(records, side, metric)
    if value is None:
        return ""
    shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    ratios = _ratios(records, side, metric)
    if not ratios:
        return shown
    return f"{shown} (**{statistics.median(ratios):.2f}**)"


def _ratios(records: Sequence[Record], side: str, metric: str) -> list[float]:
    """Facet's figure over the other side's, round by round; none for a side of Facet's own."""
    base = _EIGHT_BITS[0] if side in _EIGHT_BITS else OURS
    if side == base:
        return []
    ours, theirs = (
        {r["round"]: r[metric] for r in records if r["side"] == name and r.get(metric) is not None}
        for name in (base, side)
    )
    return [ours[round] / theirs[round] for round in ours if theirs.get(round)]


def _median(records: Sequence[Record], side: str, metric: str) -> float | None:
    values = [r[metric] for r in records if r["side"] == side and r.get(metric) is not None]
    return statistics.median(values) if values else None


def _failures(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        if record.get("failed"):
            where = f"{record['side']}, {record['case']}, round {record['round'] + 1}"
            yield f"{where}: {record['failed']} requests failed."
        if "failure" in record:
            yield f"{record['side']} did not start: {record['failure'].replace(chr(10), chr(10) + '    ')}"


def _charts(records: Sequence[Record]) -> Iterator[tuple[str, Chart]]:
    for name in work.GENERATIVE:
        mine = [r for r in records if r["model"].startswith(name) and r["case"].startswith(_PICTURED)]
        for metric, title, y in (
            ("output_tokens_per_second", "throughput", "output tokens/s"),
            ("ttft_ms", "time to first token", "ms"),
        ):
            lines = [Line(side, _places(mine, side, metric)) for side in _unique(r["side"] for r in mine)]
            if lines:
                kind = metric.partition("_")[0]
                yield (
                    f"performance/{name}-{kind}.svg",
                    Chart(f"{name}: {title}", "requests at once", y, lines),
                )


def _places(records: Sequence[Record], side: str, metric: str) -> list[tuple[float, float]]:
    loads = sorted({record["concurrency"] for record in records})
    found = ((at, _median([r for r in records if r["concurrency"] == at], side, metric)) for at in loads)
    return [(at, value) for at, value in found if value is not None]


def _unique(values: Any) -> list[str]:
    return list(dict.fromkeys(values))
