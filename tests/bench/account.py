"""Whether what a server says of its own time is true, over many mixed requests: a table.

    facet serve MODEL --enable-timing &
    python tests/bench/account.py --requests 500 --rate 4

Some answers are streamed, some are not, some are vectors. Three things are compared: the first token with the
moment in which it was expected, the parts of each answer's time with the wall time here, and the requests'
shares of computing with the time for which the engine computed. The server must have nothing else to do.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

EXPECTED = "x-facet-expected-first-token-ms"
WITHIN = 0.2


@dataclass(frozen=True)
class Told:
    """One answer: what was measured here, and what the server said, in milliseconds."""

    kind: str
    wall: float
    first: float | None
    expected: float | None
    timing: dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second, as a Poisson process")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, told, threads = random.Random(args.seed), list[Told](), list[threading.Thread]()
    one_request(args.port, *a_request(rng), [])  # opens what is opened once
    busy = busy_seconds(args.port)
    for _ in range(args.requests):
        thread = threading.Thread(target=one_request, args=(args.port, *a_request(rng), told))
        thread.start()
        threads.append(thread)
        time.sleep(rng.expovariate(args.rate))
    for thread in threads:
        thread.join()
    time.sleep(1)  # statistics come a few times a second
    report(told, busy_seconds(args.port) - busy)


def a_request(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    """The kind of a random request, its path and its body."""
    length, output = rng.choice([4, 30, 100, 400, 1000]), rng.randint(4, 60)
    ids = [rng.randint(100, 1000) for _ in range(length)]
    kind = rng.choice(["stream", "stream", "whole", "vector", "vector"])
    if kind == "vector":
        return kind, "/v1/embeddings", {"input": [ids]}
    body = {"prompt": ids, "max_tokens": output, "ignore_eos": True, "temperature": 0}
    if kind == "stream":
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return kind, "/v1/completions", body


def one_request(port: int, kind: str, path: str, body: dict[str, Any], told: list[Told]) -> None:
    """Sends a request and reads its answer to the end."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.connect()
    began = time.perf_counter()
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:300]!r}")
    first, usage = None, {}
    if kind == "stream":
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
                usage = json.loads(line[6:]).get("usage") or usage
    else:
        usage = json.loads(answer.read())["usage"]
    wall = time.perf_counter() - began
    expected = answer.headers.get(EXPECTED)
    told.append(
        Told(
            kind,
            1000 * wall,
            None if first is None else 1000 * (first - began),
            None if expected is None else float(expected),
            usage.get("timing", {}),
        )
    )
    connection.close()


def busy_seconds(port: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    return sum(map(float, re.findall(r"^facet:engine_busy_seconds_total\{.*?\} (\S+)", page, re.MULTILINE)))


def report(told: list[Told], busy: float) -> None:
    for kind in ("stream", "whole", "vector", ""):
        some = [one for one in told if kind in ("", one.kind)]
        errors = sorted(map(first_error, some))
        within = sum(error <= WITHIN for error in errors) / len(errors)
        middle = statistics.median(errors)
        print(
            f"{kind or 'all':8} {len(some):4} expected within 20 %: {within:.1%}; median error {middle:.1%}"
        )
    good = 0
    for one in told:
        parts = sum(one.timing[f"{name}_ms"] for name in ("tokenize", "queue", "prefill", "decode", "answer"))
        good += abs(parts - one.wall) <= max(1.0, 0.02 * one.wall)
    print(f"parts add up to the wall time within 2 % or 1 ms: {good / len(told):.1%}")
    compute = sum(one.timing["compute_ms"] for one in told) / 1000
    print(f"shares of computing {compute:.3f} s of {busy:.3f} s: {compute / busy:.2%}")


def first_error(one: Told) -> float:
    """The error of the expected first token, as a part of the time until it came (or until the vector)."""
    timing = one.timing
    first = one.first or timing["tokenize_ms"] + timing["queue_ms"] + timing["prefill_ms"]
    expected = timing["expected_first_token_ms"] if one.expected is None else one.expected
    return abs(expected - first) / first


if __name__ == "__main__":
    main()
