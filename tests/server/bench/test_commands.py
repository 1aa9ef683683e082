"""The commands as they are typed: what they accept, what they refuse, and a whole run."""

import asyncio
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from scripted_server import MODELS, Request, completes, says, scripted, whole

from server.bench import serve_benchmark
from server.bench.load_generator import Load, Result
from server.bench.serve_options import BenchError, LoadOptions, parse
from server.options.option_parsing import OptionError
from server.run.commands import BAD_USAGE, FAILED, run


def options(*arguments: str) -> LoadOptions:
    return parse(arguments, "bench serve")


def test_a_command_line_of_the_peer_is_understood() -> None:
    found = options(
        *("--backend", "openai-chat", "--base-url", "http://h:1", "--model", "m", "--num-prompts", "7"),
        *("--dataset-name", "random", "--random-input-len", "9", "--random-output-len", "3"),
        *("--random-range-ratio", "0.5", "--max-concurrency", "4", "--request-rate", "2.5"),
        *("--burstiness", "2", "--ignore-eos", "--seed", "3", "--num-warmups", "2", "--save-result"),
        *("--percentile-metrics", "ttft,e2el", "--metric-percentiles", "25,99.9"),
        *("--tokenizer", "some/where", "--disable-tqdm", "--result-filename", "r.json"),
    )
    assert (found.url, found.model, found.kind, found.prompts) == ("http://h:1", "m", "chat", 7)
    assert (found.max_concurrency, found.request_rate, found.burstiness) == ((4,), (2.5,), 2.0)
    assert (found.percentile_metrics, found.metric_percentiles) == (("ttft", "e2el"), (25.0, 99.9))
    assert (found.ignore_eos, found.output) == (True, "r.json")


@pytest.mark.parametrize("written", ["/v1/chat/completions", "chat", "v1/chat/completions"])
def test_an_endpoint_may_be_its_path(written: str) -> None:
    assert options("--endpoint", written).kind == "chat"


def test_each_load_of_a_sweep_is_one() -> None:
    assert [load.concurrency for load in serve_benchmark.loads(options("--concurrency", "1,8,32"))] == [
        1,
        8,
        32,
    ]
    rated = serve_benchmark.loads(options("--request-rate", "1,inf", "--concurrency", "4"))
    assert [(load.rate, load.concurrency) for load in rated] == [(1.0, 4), (math.inf, 4)]
    assert serve_benchmark.loads(options()) == [Load(requests=100)]
    assert serve_benchmark.loads(options("--duration", "3", "--concurrency", "2"))[0].requests is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--concurency", "3"], "did you mean --concurrency"),
        (["--concurrency", "0"], "must be greater than 0"),
        (["--concurrency", "1,2", "--request-rate", "1,2"], "not both"),
        (["--concurrency", "few"], "--max-concurrency: 'few' is not made of whole numbers, such as 1,8,32"),
        (["--concurrency", "1,,2"], "'1,,2' is not made of whole numbers"),
        (["--request-rate", "nan"], "--request-rate: 'nan' is not made of numbers, such as 0.5,2"),
        (["--num-prompts", "many"], "--num-prompts: 'many' is not a whole number"),
        (["--output", "/no such/r.json"], "--output /no such/r.json: there is no folder /no such; make it"),
        (["--dataset-name", "custom"], "go together"),
        (["--dataset-path", "x"], "go together"),
        (["--dataset-name", "sharegpt"], "is not one of random"),
        (["--endpoint", "rerank"], "is not one of completions"),
        (["--duration", "3"], "also needs"),
        (["--percentile-metrics", "ttft,oops"], "'oops' is not one of"),
        (["--metric-percentiles", "101"], "must lie from 0 to 100"),
        (["--goodput", "ttft:100"], "--goodput is not supported yet"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(arguments: list[str], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        options(*arguments)


@pytest.mark.slow
async def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "r.json"
    flags = ["--concurrency", "1,3", "--num-prompts", "6", "--num-warmups", "2", "--input-len", "5"]
    async with scripted(completes) as server:
        code = await asyncio.to_thread(
            run,
            "bench",
            ["serve", "--base-url", server.url, *flags, "--output", str(written)],
        )
    assert code == 0
    paths = [request.path for request in server.requests]
    assert paths == ["/v1/models"] + ["/v1/completions"] * (2 + 2 * 6)
    sent = [request for request in server.requests if request.path == "/v1/completions"]
    assert {request.json["model"] for request in sent} == {"first"}
    prompts = [str(request.json["prompt"]) for request in sent]
    assert len(set(prompts)) == len(prompts), "a text came twice: a prefix cache would have known it"
    result = msgspec.json.decode(written.read_bytes(), type=Result)
    assert [(p.concurrency, p.completed, p.output_tokens) for p in result.points] == [
        (1, 6, 768),
        (3, 6, 768),
    ]
    assert result.dataset["random_input_len"] == 5
    assert "TPOT" in capsys.readouterr().out


async def test_failed_requests_are_told_and_leave_a_code(capsys: pytest.CaptureFixture[str]) -> None:
    async with scripted(says(whole({"error": {"message": "full"}}, 503))) as server:
        flags = ["--base-url", server.url, "--model", "m", "--num-prompts", "2"]
        assert await asyncio.to_thread(serve_benchmark.run, flags, "bench serve") == FAILED
    assert "2 x HTTP 503: full" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (whole({}, 503), "answers 503 .*; wait, or name one with --model"),
        (whole({}, 401), "answers 401 .*; give its key as --api-key"),
        (whole({}, 404), "answers 404 .*; give the address of its API as --base-url"),
        (MODELS.replace(b"data", b"list"), "does not list its models; name one with --model"),
    ],
)
async def test_a_server_that_names_no_model_is_not_guessed_at(answer: bytes, told: str) -> None:
    async with scripted(says(answer)) as server:
        with pytest.raises(BenchError, match=told):
            await asyncio.to_thread(serve_benchmark.run, ["--base-url", server.url], "bench serve")


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        (["serve", "--zz"], "there is no option --zz"),
        (["serve", "--port", "1", "--num-prompts", "1"], "connection refused; start the server"),
        (["serve", "--base-url", "ftp://h"], "'ftp://h' is not the address of a server"),
        (["serve", "--base-url", "http://h:port"], "'http://h:port' is not the address of a server; write"),
    ):
        assert run("facet", ["bench", *arguments]) == BAD_USAGE
        said = capsys.readouterr().err
        assert said.startswith("error: ") and told in said and said.count("\n") == 1


def test_usage_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("facet", ["bench", "--help"]) == 0
    told = capsys.readouterr().out
    assert "facet bench serve " in told
    assert run("bench", []) == BAD_USAGE
    assert capsys.readouterr().err == told.replace("facet bench", "bench")


def test_the_generator_needs_neither_torch_nor_the_server() -> None:
    heavy = "{'torch', 'fastapi', 'numpy'}"
    code = f"import sys, server.bench.serve_benchmark; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_authorization_is_sent_with_every_request() -> None:
    async def guarded(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.headers.get("authorization") == "Bearer k":
            await completes(request, writer)
        else:
            writer.write(whole({"error": {"message": "who are you?"}}, 401))

    async with scripted(guarded) as server:
        flags = ["--base-url", server.url, "--num-prompts", "2"]
        assert await asyncio.to_thread(serve_benchmark.run, [*flags, "--api-key", "k"], "bench serve") == 0
