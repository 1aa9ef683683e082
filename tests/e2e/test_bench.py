"""The benchmarks as a user runs them: the load generator against a server, and two that need none."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from live import LiveServer

from server.bench import offline_benchmark, serve_benchmark, startup_benchmark
from server.bench.serve_options import parse
from server.bench.startup_benchmark import Start


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


@pytest.mark.slow
def test_a_start_is_timed_from_its_first_answer_to_its_first_token() -> None:
    start = startup_benchmark.measure("demo", ["--cpu-threads", "1"])
    assert isinstance(start, Start)
    assert start.floor is not None
    assert 0 < start.live <= start.ready <= start.first


@pytest.mark.slow
def test_the_engine_is_measured_without_a_server(tmp_path: Path) -> None:
    """The offline benchmark runs in a process of its own, because it changes which kernels that process uses.

    Tokens enough that no pause of the machine outlasts their decoding.
    """
    name = offline_benchmark.__name__
    code = f"import sys; from {name} import run; sys.exit(run(sys.argv[1:], 'bench offline'))"
    sizes = ["--batch", "2", "--input-len", "8", "--output-len", "64", "--runs", "2", "--cpu-threads", "1"]
    for more, field in (([], "output_tokens_per_second"), (["--embed"], "inputs_per_second")):
        written = tmp_path / "result.json"
        command = [sys.executable, "-c", code, "demo", *sizes, *more, "--output", str(written)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        [row] = msgspec.json.decode(written.read_bytes())["rows"]
        assert row[field] > 0
