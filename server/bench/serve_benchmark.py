"""`facet bench serve`: puts load on any server with an OpenAI-compatible API and measures its answers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from itertools import count

import uvloop
from msgspec.structs import replace

from server.bench import load_generator
from server.bench.endpoints import Outcome, Sender, endless_requests
from server.bench.http_client import Client, TransportError, first_model
from server.bench.serve_options import METRICS, LoadOptions, dataset_options, parse, write_result


def run(arguments: Sequence[str], command: str) -> int:
    """Returns 1 if a request has failed."""
    options = parse(arguments, command)
    result = uvloop.run(measure(options))
    print(load_generator.table(result.points, options.percentile_metrics or METRICS))
    write_result(options.output, result)
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
