"""Whole runs of streams beside other work, against a server that answers as it was told."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import beside
import pytest
from beside import Samples, parse, result_of, run
from scripted_server import (
    DONE,
    LAST,
    STREAM,
    FakeServer,
    Request,
    completes,
    event,
    part,
    scripted,
    text,
    usage,
    whole,
)

from server.bench.endpoints import Outcome
from server.bench.serve_options import BenchError
from server.options.option_parsing import OptionError

TOKENS = 12
ONCE = ("--output-len", str(TOKENS), "--rounds", "1")


async def streams(request: Request, writer: asyncio.StreamWriter) -> None:
    """A reply with every token in a packet of its own; other requests are answered as by `completes`."""
    if request.path == "/v1/models":
        writer.write(whole({"data": [{"id": "m", "max_model_len": 1000}]}))
        return
    if request.path == "/v1/embeddings":
        await asyncio.sleep(0.005)
        await completes(request, writer)
        return
    asked = request.json
    writer.write(STREAM)
    for _ in range(asked["max_tokens"]):
        writer.write(part(text("a")))
        await asyncio.sleep(0.002)
    writer.write(part(usage(len(asked["prompt"]), asked["max_tokens"]) + DONE) + LAST)


async def bench(server: FakeServer, *arguments: str) -> int:
    return await asyncio.to_thread(run, ["--base-url", server.url, *arguments], "beside.py")


def lengths(server: FakeServer) -> Counter[tuple[int, int]]:
    """How many prompts of which length asked for how many tokens."""
    asked = [one.json for one in server.requests if one.path == "/v1/completions"]
    return Counter((len(one["prompt"]), one["max_tokens"]) for one in asked)


async def test_streams_beside_embeddings_and_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "r.json"
    async with scripted(streams) as server:
        flags = ("--beside", "embeddings", "prompt", "--streams", "2", "--embed-batch-size", "3", *ONCE[:2])
        flags += ("--rounds", "2")
        assert await bench(server, *flags, "--output", str(written)) == 0
    result = json.loads(written.read_bytes())
    assert result["model"] == "m" and len(result["rounds"]) == 2
    # Both sides of both rounds, and before them a warm-up, of two streams each.
    assert lengths(server) == {(32, TOKENS): 2 * (2 * 2 + 1), (1000 - 64, 1): 2 * 2 + 1}
    assert all(one.json["ignore_eos"] for one in server.requests if one.path == "/v1/completions")
    inputs = [one.json["input"] for one in server.requests if one.path == "/v1/embeddings"]
    assert {len(texts) for texts in inputs} == {3}
    assert {len(ids) for texts in inputs for ids in texts} == {200}
    every = [str(ids) for texts in inputs for ids in texts]
    assert len(set(every)) == len(every), "a text came twice: a prefix cache would have known it"
    figures = {"gaps p99", "ttft p50", "prompt_ttft p50", "lateness max", "texts/s"}
    assert figures < result["alone"].keys() == result["beside"].keys()
    assert figures - {"lateness max"} < result["ratios"].keys()
    assert "beside / alone" in capsys.readouterr().out


async def test_the_long_prompt_comes_in_the_middle_of_the_stream(tmp_path: Path) -> None:
    written: list[int] = []
    before: list[int] = []

    async def counted(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path != "/v1/completions":
            return await streams(request, writer)
        asked = request.json
        if asked["max_tokens"] == 1:
            before.append(written[-1] if written else 0)
            return await streams(request, writer)
        writer.write(STREAM)
        for number in range(TOKENS):
            written.append(number + 1)
            writer.write(part(text("a")))
            while number + 1 == TOKENS // 2 and len(written) > 2 * TOKENS and len(before) < 2:
                await asyncio.sleep(0.001)  # the stream beside the prompt: it goes on when that has come
        writer.write(part(usage(1, TOKENS) + DONE) + LAST)

    async with scripted(counted) as server:
        flags = ("--beside", "prompt", "--rounds", "1", "--output-len", str(TOKENS))
        assert await bench(server, *flags) == 0
    assert before == [TOKENS, TOKENS // 2, TOKENS]  # the warm-up's, the one beside the stream, the one alone


async def test_single_texts_beside_very_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_PAUSE", 0.001)
    written = tmp_path / "r.json"
    single = asyncio.Event()
    sizes: list[int] = []

    async def embeds(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == "/v1/embeddings":
            sizes.append(len(request.json["input"]))
            if sizes[-1] == 1:
                single.set()
            elif sizes.count(70) == 1:  # the first one, beside which single texts are read
                single.clear()
                await single.wait()
                await asyncio.sleep(0.05)
        await completes(request, writer)

    async with scripted(embeds) as server:
        flags = ("--beside", "bulk", "--bulk-batch-size", "70", "--rounds", "1", "--output", str(written))
        assert await bench(server, *flags) == 0
    assert sizes.count(70) == 2
    result = json.loads(written.read_bytes())
    for side in (result["alone"], result["beside"]):
        assert {"latency p50", "texts/s"} < side.keys() and "gaps p50" not in side


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/embeddings", "a request for embeddings failed: HTTP 400: no"),
        ("/v1/completions", "a stream failed: error in the stream: no"),
    ],
)
async def test_a_failure_ends_the_run_and_is_told(path: str, told: str) -> None:
    async def fails(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path != path:
            await streams(request, writer)
        elif path == "/v1/embeddings":
            writer.write(whole({"error": {"message": "no"}}, 400))
        else:
            writer.write(STREAM + part(event({"error": {"message": "no"}})) + LAST)

    async with scripted(fails) as server:
        with pytest.raises(BenchError, match=told):
            await bench(server, "--beside", "embeddings", *ONCE)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--streams", "2"], "--beside says what runs"),
        (["--beside", "chats"], "'chats' is not one of embeddings, prompt, bulk"),
        (["--beside", "bulk", "prompt"], "--beside says what runs"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        parse(arguments, "beside.py")


def test_a_request_counts_by_its_share_of_the_window() -> None:
    samples = Samples()
    half_before = Outcome(due=9.0, ended=11.0, inputs=4)
    within = Outcome(due=11.0, ended=12.0, inputs=4)
    longer_than_all = Outcome(due=5.0, ended=25.0, inputs=10)
    outside = Outcome(due=21.0, ended=22.0, inputs=4)
    samples.add_texts([half_before, within, longer_than_all, outside], 10.0, 20.0)
    assert samples.texts == pytest.approx(2 + 4 + 5)
    assert samples.text_seconds == 10.0


def test_ratios_are_taken_within_rounds() -> None:
    def side(gap: float, texts: float) -> Samples:
        return Samples(gaps=[gap], texts=texts, text_seconds=1.0)

    rounds = [(side(1, 10), side(2, 5)), (side(10, 10), side(40, 6)), (side(1, 100), side(3, 10))]
    found = result_of(rounds, (50, 99))["ratios"]
    assert found["gaps p99"] == (3.0, 2.0, 4.0)
    assert found["texts/s"] == (0.5, 0.1, 0.6)
