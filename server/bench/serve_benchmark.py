"""`facet bench serve`: puts load on any server with an OpenAI-compatible API and measures its answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from itertools import count

import uvloop

from server.bench import load_generator
from server.bench.endpoints import Outcome, Sender, endless_requests
from server.bench.http_client import Client, first_model
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
        points = [await _measure_one(load, options, sender, next(salts)) for load in loads(options)]
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
    load: load_generator.Load, options: LoadOptions, sender: Sender, salt: int
) -> load_generator.Figures:
    """Each load sends other texts, so that no prefix cache knows them from an earlier load."""
    outcomes: list[Outcome] = []
    title = f"{load.concurrency or 'all'} at once" if load.rate == math.inf else f"{load.rate:g}/s"
    bar = load_generator.LoadBar(title, load.requests, load.seconds)

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        bar.add(outcome)

    try:
        with load_generator.without_garbage_collection():
            seconds = await load_generator.run_load(load, sender, endless_requests(options, salt), done)
    finally:
        bar.close()
    return load_generator.summarize(load, outcomes, seconds, options.metric_percentiles)
