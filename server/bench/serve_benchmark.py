"""`facet bench serve`: puts load on any server with an OpenAI-compatible API and measures its answers.

Charts of latency against load are SVG in one HTML page that needs nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import count
from pathlib import Path

import uvloop
from msgspec.structs import replace

from server.bench import load_generator
from server.bench.endpoints import Outcome, Sender, endless_requests
from server.bench.http_client import Client, TransportError, first_model
from server.bench.load_generator import Figures, Spread
from server.bench.serve_options import METRICS, LoadOptions, dataset_options, parse, write_result

_WIDTH, _HEIGHT = 420, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 30, 44
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#9333ea", "#d97706", "#475569")


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: list[tuple[float, float]]
    """(x, y), in the order of x."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: str
    y: str
    lines: list[Line]


def charts(points: Sequence[Figures]) -> list[Chart]:
    """Each latency, and the throughput, against the load."""
    rated = any(point.request_rate is not None for point in points)
    x = "requests per second" if rated else "requests at once"
    made: list[Chart] = []
    for metric, title in (("ttft", "First token"), ("tpot", "Per output token"), ("e2el", "Whole answer")):
        spreads: list[tuple[float, Spread]] = [
            (_load_of(point), spread) for point in points if (spread := getattr(point, metric))
        ]
        if spreads:
            lines = [Line("mean", [(at, spread.mean) for at, spread in spreads])]
            for name in spreads[0][1].percentiles:
                lines.append(Line(name, [(at, spread.percentiles[name]) for at, spread in spreads]))
            made.append(Chart(title, x, "ms", lines))
    if any(point.output_tokens for point in points):
        unit, rates = "output tokens/s", [(_load_of(one), one.output_tokens_per_second) for one in points]
    else:
        unit, rates = "inputs/s", [(_load_of(one), one.inputs_per_second) for one in points]
    return [*made, Chart("Throughput", x, unit, [Line("all requests", rates)])]


def _load_of(point: Figures) -> float:
    return point.request_rate or point.concurrency or point.completed


def page(title: str, pictures: Sequence[Chart]) -> str:
    shown = "\n".join(svg(picture) for picture in pictures)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        "<style>body{font:14px system-ui,sans-serif;margin:24px}svg{margin:0 16px 16px 0}</style>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{shown}\n</body>\n</html>\n"
    )


def svg(chart: Chart) -> str:
    """The chart as one SVG element, for a page or a file."""
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    xs = ticks(max((x for line in chart.lines for x, _ in line.points), default=1.0))
    ys = ticks(max((y for line in chart.lines for _, y in line.points), default=1.0))

    def at(x: float, y: float) -> tuple[str, str]:
        return f"{_LEFT + width * x / xs[-1]:.1f}", f"{_TOP + height * (1 - y / ys[-1]):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="system-ui,sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_WIDTH / 2:g}" y="18" text-anchor="middle" font-size="13">{escape(chart.title)}</text>',
    ]
    for y in ys:
        left, level = at(0, y)
        parts.append(f'<path d="M{left} {level}h{width}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{level}" dy="4" text-anchor="end">{y:g}</text>')
    for x in xs:
        place, bottom = at(x, 0)
        parts.append(f'<text x="{place}" y="{bottom}" dy="14" text-anchor="middle">{x:g}</text>')
    turned = f"translate(12 {_TOP + height / 2:g}) rotate(-90)"
    parts += [
        f'<text x="{_LEFT + width / 2:g}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(chart.x)}</text>',
        f'<text transform="{turned}" text-anchor="middle">{escape(chart.y)}</text>',
    ]
    for index, line in enumerate(chart.lines):
        parts += _line(line, index, [at(x, y) for x, y in line.points])
    return "\n".join([*parts, "</svg>"])


def _line(line: Line, index: int, places: Sequence[tuple[str, str]]) -> list[str]:
    colour = _COLOURS[index % len(_COLOURS)]
    path = " ".join(f"{x},{y}" for x, y in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for (x, y), (load, value) in zip(places, line.points, strict=True):
        label = escape(f"{line.name}: {value:.1f} at {load:g}")
        parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"><title>{label}</title></circle>')
    level = _TOP + 12 + 14 * index
    parts.append(f'<path d="M{_LEFT + 8} {level - 4}h14" stroke="{colour}" stroke-width="2"/>')
    parts.append(f'<text x="{_LEFT + 26}" y="{level}">{escape(line.name)}</text>')
    return parts


def ticks(most: float) -> list[float]:
    """Numbers from 0 to at least `most`, in four to eight steps of 1, 2 or 5 times a power of ten."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= 8)
    return [round(step * i, 10) for i in range(math.ceil(most / step - 1e-9) + 1)]


def run(arguments: Sequence[str], command: str) -> int:
    """Returns 1 if a request has failed."""
    options = parse(arguments, command)
    result = uvloop.run(measure(options))
    print(load_generator.table(result.points, options.percentile_metrics or METRICS))
    write_result(options.output, result)
    if options.plot is not None:
        title = f"{result.model}, {result.endpoint}"
        Path(options.plot).write_text(page(title, charts(result.points)), "utf-8")
    return 1 if any(point.failed for point in result.points) else 0


async def measure(options: LoadOptions) -> load_generator.Result:
    """Runs every load that the options name, one after the other, against one server."""
    with closing(Client(options.url, options.api_key, options.request_timeout)) as client:
        model = options.model or (await first_model(client, options.url)).id
        sender = Sender(client, model, options)
        salts = count()
        unmeasured = endless_requests(options, next(salts))
        if options.num_warmups:
            warm_up = load_generator.Load(concurrency=options.num_warmups, requests=options.num_warmups)
            await load_generator.run_load(warm_up, sender, unmeasured, lambda outcome: None)
        points = [await _measure_one(load, options, client, sender, next(salts)) for load in loads(options)]
    return load_generator.Result(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        endpoint=options.kind,
        model=model,
        dataset=dataset_options(options),
        points=points,
    )


def loads(options: LoadOptions) -> list[load_generator.Load]:
    return [
        load_generator.Load(
            concurrency, rate, options.prompts, options.duration, options.burstiness, options.seed
        )
        for concurrency in options.max_concurrency or (None,)
        for rate in options.request_rate
    ]


async def _measure_one(
    load: load_generator.Load, options: LoadOptions, client: Client, sender: Sender, salt: int
) -> load_generator.Figures:
    """Each load sends other texts, so that no prefix cache knows them from an earlier load."""
    outcomes: list[Outcome] = []
    title = f"{load.concurrency or 'all'} at once" if load.rate == math.inf else f"{load.rate:g}/s"
    bar = load_generator.LoadBar(title, load.requests, load.seconds)

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        bar.add(outcome)

    before = await _guesses_so_far(client)
    try:
        with load_generator.without_garbage_collection():
            seconds = await load_generator.run_load(load, sender, endless_requests(options, salt), done)
    finally:
        bar.close()
    figures = load_generator.summarize(load, outcomes, seconds, options.metric_percentiles)
    return replace(figures, guesses=_between(before, await _guesses_so_far(client)))


_GUESSES = [
    re.compile(rb"^vllm:spec_decode_num_%s_total\{[^}]*\} (\S+)$" % name, re.MULTILINE)
    for name in (b"drafts", b"draft_tokens", b"accepted_tokens")
]


async def _guesses_so_far(client: Client) -> list[int]:
    """The drafts, guessed tokens and those that held of all engines, as /metrics shows them."""
    try:
        status, shown = await client.get("/metrics")
    except TransportError:
        return [0, 0, 0]
    page = shown if status == 200 else b""
    return [sum(int(float(value)) for value in name.findall(page)) for name in _GUESSES]


def _between(before: Sequence[int], after: Sequence[int]) -> load_generator.Guesses | None:
    """What was guessed meanwhile; None if nothing was, or an engine has begun to count anew."""
    drafts, guessed, held = (one - other for one, other in zip(after, before, strict=True))
    return load_generator.Guesses(drafts, guessed, held) if drafts > 0 <= held <= guessed else None
