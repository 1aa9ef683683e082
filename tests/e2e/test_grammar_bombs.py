"""Grammars that would take minutes to follow, beside a stream and plain requests of another key."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import quantiles

import httpx
import pytest
from grammar_bombs import grammar_bombs
from holdups import unexplained
from live import LiveServer, keys, serving

pytestmark = pytest.mark.slow(40)

MOST_TIMES, MOST_SECONDS = 4.0, 3.0
"""How many times as long others may take, and the seconds until a bomb has its answer."""
PAUSE = 0.1
"""The least that is taken for the time of others alone: a step or two of a busy machine."""
ENOUGH = 60
"""Plain requests that are timed alone."""
HARMLESS = ("tools, schema", "tools, patterns")
"""The names of requests that may be answered, because a window of 2,048 tokens keeps them small."""


@dataclass
class Others:
    """A stream and plain requests of one key, one after the other, and how long each took."""

    client: httpx.Client
    plain: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    ended: bool = False

    def ask(self) -> None:
        while not self.ended:
            began = time.perf_counter()
            asked = {"prompt": "hello", "max_tokens": 4}
            self.client.post("/v1/completions", json=asked).raise_for_status()
            self.plain.append(time.perf_counter() - began)

    def stream(self) -> None:
        body = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True, "stream": True}
        while not self.ended:
            with self.client.stream("POST", "/v1/completions", json=body) as got:
                last = None
                for line in got.iter_lines():
                    now = time.perf_counter()
                    if line.startswith("data: {"):
                        assert "error" not in json.loads(line[6:])
                        if last is not None:
                            self.gaps.append(now - last)
                        last = now

    def took(self) -> tuple[float, float]:
        """The time in which 99 of 100 plain requests, and parts of the stream, came. It begins anew."""
        plain, self.plain = self.plain, []
        gaps, self.gaps = self.gaps, []
        return quantiles(plain, n=100)[-1], quantiles(gaps, n=100)[-1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, str, str]]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    bad, good = keys(file, "add", "bad"), keys(file, "add", "good")
    with serving("demo", "--dtype", "float32", "--api-key-file", str(file)) as live:
        yield live, bad, good
        # A worker's step may be late here: it shares the cores with the threads that follow the bombs.
        assert [entry for entry in unexplained(live.output()) if not entry.startswith("worker")] == []


def client(live: LiveServer, key: str) -> httpx.Client:
    return httpx.Client(base_url=live.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def timed(ask: Callable[[], httpx.Response]) -> tuple[int, float]:
    began = time.perf_counter()
    return ask().status_code, time.perf_counter() - began


def test_bombs_are_refused_soon_and_others_go_on(server: tuple[LiveServer, str, str]) -> None:
    live, bad, good = server
    engine = live.engine_pids()
    with client(live, bad) as attacker, client(live, good) as others_client:
        form = {"prompt": "a", "structured_outputs": {"regex": "a"}}
        assert attacker.post("/v1/completions", json=form).status_code == 200
        long = {**form, "structured_outputs": {"regex": "(" + "a" * 50_000 + ")"}}
        assert attacker.post("/v1/completions", json=long).status_code == 400  # starts what reads long bodies
        others = Others(others_client)
        threads = [threading.Thread(target=work) for work in (others.ask, others.stream)]
        for thread in threads:
            thread.start()
        try:
            while len(others.plain) < ENOUGH or len(others.gaps) < ENOUGH:
                time.sleep(0.1)
            alone = others.took()
            for name, (path, body) in grammar_bombs().items():
                status, seconds = timed(lambda path=path, body=body: attacker.post(path, json=body))
                assert 400 <= status < 500 or (name in HARMLESS and status == 200), name
                assert seconds < MOST_SECONDS, name
            while len(others.plain) < ENOUGH or len(others.gaps) < ENOUGH:
                time.sleep(0.1)
            beside = others.took()
        finally:
            others.ended = True
            for thread in threads:
                thread.join(60)
    for before, now in zip(alone, beside, strict=True):
        assert now <= MOST_TIMES * max(before, PAUSE), (alone, beside)
    assert live.engine_pids() == engine


def test_bombs_that_come_at_once_leave_turns_to_others(server: tuple[LiveServer, str, str]) -> None:
    live, bad, good = server
    with client(live, bad) as attacker, client(live, good) as other, ThreadPoolExecutor(20) as pool:
        bombs = [
            (path, json.loads(json.dumps(body).replace("s s", "s  s").replace("10", "11")))
            for path, body in grammar_bombs().values()
        ]
        asked = [
            pool.submit(timed, lambda path=path, body=body: attacker.post(path, json=body))
            for path, body in bombs
        ]
        for number in range(5):
            schema = {"type": "object", "properties": {f"new{number}": {"type": "null"}}}
            form = {"prompt": "a", "max_tokens": 4, "structured_outputs": {"json": schema}}
            status, seconds = timed(lambda form=form: other.post("/v1/completions", json=form))
            assert status == 200 and seconds < MOST_SECONDS
        found = [each.result() for each in asked]
    assert all(status < 500 and seconds < MOST_SECONDS for status, seconds in found), found
