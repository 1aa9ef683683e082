"""A server on a machine that has little: no home, no compiler, no locale, few descriptors."""

import os
from pathlib import Path

import pytest
from live import COMMAND, LiveServer, starting

BODY = {"prompt": "Héllo", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
SMALL = ("--kv-cache-memory-bytes", "64M", "--max-model-len", "256")
NEEDED = ("PYTHONPATH", "COVERAGE_PROCESS_START")
"""Variables by which the tests themselves find the code."""


def bare(*limits: str, **environment: str) -> list[str]:
    """The command under limits of the shell, and in an environment with nothing else."""
    kept = {name: os.environ[name] for name in NEEDED if name in os.environ}
    given = {**kept, "FACET_CPU_THREADS": "1", **environment}  # threads of torch would wait for each other
    variables = [f"{name}={value}" for name, value in given.items()]
    script = "; ".join((*(f"ulimit {limit}" for limit in limits), 'exec "$@"'))
    return ["/bin/bash", "-c", script, "bash", "/usr/bin/env", "-i", *variables, *COMMAND]


@pytest.fixture
def expected(demo: LiveServer) -> str:
    return demo.post("/v1/completions", BODY).json()["choices"][0]["text"]


@pytest.mark.slow
def test_no_home_no_compiler_no_locale_and_few_descriptors(expected: str, tmp_path: Path) -> None:
    """The cache folder cannot be made either, so there is nowhere to compile to but a temporary folder."""
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    command = bare("-n 64", LC_ALL="C", PATH="/nowhere", XDG_CACHE_HOME=str(nowhere / "cache"))
    with starting("demo", *SMALL, "--dtype", "float32", command=command) as server:
        server.wait_ready(120)
        answers = [server.post("/v1/completions", BODY) for _ in range(3)]
        assert [answer.json()["choices"][0]["text"] for answer in answers] == [expected] * 3
