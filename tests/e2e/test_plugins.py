"""Plug-ins of a server with two workers, named as on vLLM's command line, over HTTP and real processes."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live import SMALL, LiveServer, refusal, serving, wait_until

pytestmark = pytest.mark.turns(5)

SUPPORT = Path(__file__).parents[1] / "support"
FLAGS = (
    *("--logits-processors", "operator_plugins:OneToken"),
    *("--worker-extension-cls", "operator_plugins.Extension"),
    *("--middleware", "operator_plugins.NamingMiddleware"),
    *("--stat-loggers", "operator_plugins.TellingLogger"),
)
BODY = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "ignore_eos": True} | {
    "return_token_ids": True
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(traces: Path) -> Iterator[LiveServer]:
    variables = {
        "PYTHONPATH": f"{SUPPORT}:{Path(__file__).parents[2]}",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_TORCH_PROFILER_DIR": str(traces),
        "VLLM_USE_V1": "1",
    }
    with serving("demo", *SMALL, "-tp", "2", *FLAGS, "--swap-space", "4", env=variables) as server:
        yield server


def complete(server: LiveServer, **arguments: Any) -> Any:
    return server.post("/v1/completions", {**BODY, "vllm_xargs": arguments})


@pytest.mark.slow
def test_arguments_of_requests_reach_all_workers(server: LiveServer) -> None:
    free = complete(server)
    assert free.headers["x-operator"] == "class"
    [first, *_] = free.json()["choices"][0]["token_ids"]
    assert complete(server, target_token=9).json()["choices"][0]["token_ids"] == [first, 9, 9, 9]


def test_a_stat_logger_is_told_of_the_engine(server: LiveServer) -> None:
    wait_until(lambda: "the operator's logger knows engine 0 of demo" in server.output(), 10, server.output)


def test_a_processor_that_breaks_or_refuses_harms_its_own_request(server: LiveServer) -> None:
    expected = complete(server).json()["choices"][0]["token_ids"]
    broken = complete(server, crash=1)
    assert (broken.status_code, "the operator's bug" in broken.json()["error"]["message"]) == (500, True)
    refused = complete(server, target_token="x")
    assert refused.status_code == 400
    assert "target_token should be a token id, got 'x'" in refused.json()["error"]["message"]
    assert complete(server).json()["choices"][0]["token_ids"] == expected


def test_a_method_runs_in_every_worker(server: LiveServer) -> None:
    answer = server.post("/collective_rpc", {"method": "describe", "args": ["hi"]}).json()
    assert [(each["rank"], each["said"]) for each in answer["results"]] == [(0, "hi"), (1, "hi")]
    failed = server.post("/collective_rpc", {"method": "fail"})
    assert (failed.status_code, failed.json()["error"]["message"]) == (400, "fail failed: no such thing")


@pytest.mark.slow
def test_what_workers_do_is_recorded(server: LiveServer, traces: Path) -> None:
    assert server.post("/start_profile", {}).status_code == 200
    complete(server)
    files = server.post("/stop_profile", {}).json()["results"]
    assert sorted(files) == sorted(map(str, traces.iterdir())) and len(files) == 2
    for file in files:
        with gzip.open(file) as opened:
            assert any("aten::" in event.get("name", "") for event in json.load(opened)["traceEvents"])


def test_the_log_says_at_the_start_what_changes_nothing(server: LiveServer) -> None:
    said = server.output()
    assert "these flags change nothing here: --swap-space (docs/options.md lists all of them)" in said
    assert "variables of vLLM without meaning here: VLLM_USE_V1" in said
    assert "VLLM_SERVER_DEV_MODE as --server-dev-mode" in said


@pytest.mark.turns
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--logits-processors", "no_such:Class"), "--logits-processors no_such:Class cannot be imported"),
        (("--middleware", "no_such.Class"), "--middleware no_such.Class cannot be imported"),
        (("--log-config-file", "/nowhere.json"), "--log-config-file /nowhere.json: "),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(flags: tuple[str, ...], said: str) -> None:
    assert refusal("demo", *SMALL, *flags).startswith(f"error: {said}")
