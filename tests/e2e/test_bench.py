"""The load generator against a server, as a user runs it."""

import pytest
from live import LiveServer

from server.bench import serve_benchmark
from server.bench.serve_options import parse


@pytest.mark.turns
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_a_generating_server_gives_all_that_was_asked_for(demo: LiveServer, endpoint: str) -> None:
    flags = ["--base-url", demo.url, "--endpoint", endpoint, "--concurrency", "1,4", "--num-prompts", "6"]
    lengths = ["--input-len", "20", "--output-len", "9", "--ignore-eos"]
    result = await serve_benchmark.measure(parse([*flags, *lengths], "bench serve"))
    for point in result.points:
        assert (point.completed, point.failed, point.output_tokens) == (6, 0, 54)
        assert point.input_tokens >= 6 * 20
        assert point.ttft is not None and point.tpot is not None and point.e2el is not None
        assert 0 < point.ttft.median < point.e2el.median
        assert 0 < point.tpot.median < point.e2el.median
    if endpoint == "completions":
        assert result.points[0].input_tokens == 6 * 20


async def test_embeddings_are_counted_by_inputs(demo: LiveServer) -> None:
    flags = ["--base-url", demo.url, "--endpoint", "embeddings", "--concurrency", "2", "--num-prompts", "4"]
    lengths = ["--input-len", "12", "--random-batch-size", "3"]
    [point] = (await serve_benchmark.measure(parse([*flags, *lengths], "bench serve"))).points
    assert (point.completed, point.inputs, point.input_tokens, point.output_tokens) == (4, 12, 144, 0)
