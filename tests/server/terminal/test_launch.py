"""`facet launch`, with stand-ins for the agents that print what they got."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_frontend import FakeFrontend
from served_app import served

from server.options.server_flags import AccessOptions
from server.run.commands import BAD_USAGE, FAILED, run

PRINTS = f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A PATH on which all agents are programs that print their arguments and their environment."""
    for name in ("claude", "codex", "opencode"):
        (tmp_path / name).write_text(PRINTS)
        (tmp_path / name).chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def launched(programs: str, *words: str) -> tuple[list[str], dict[str, str]]:
    """The arguments and the environment that an agent got."""
    command = [sys.executable, "-P", "-m", "facet", "launch", *words]
    environment = {**os.environ, "PATH": programs, "ANTHROPIC_API_KEY": "theirs"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_claude_code_gets_variables(url: str, programs: str) -> None:
    words, variables = launched(programs, "claude-code", "--url", f"{url}/v1", "--", "-p", "hi", "--", "x")
    assert words == ["-p", "hi", "--", "x"]
    ours = {name: value for name, value in variables.items() if name.startswith("ANTHROPIC_")}
    named = [name for name, value in ours.items() if value == "org/tiny"]
    assert len(named) == 5
    assert {"ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"} <= {*named}
    rest = {name: value for name, value in ours.items() if name not in named}
    assert rest == {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_API_KEY": ""}


def test_codex_gets_a_provider_of_responses(programs: str) -> None:
    with served(FakeFrontend(), access=AccessOptions(api_key=["secret"])) as url:
        words, variables = launched(
            programs, "codex", "--url", url, "--api-key", "secret", "--model", "tiny", "--", "exec", "hi"
        )
    assert words[-2:] == ["exec", "hi"]
    assert set(words[:-2:2]) == {"-c"}
    options = dict(word.split("=", 1) for word in words[1:-2:2])
    assert options == {
        "model": '"tiny"',
        "model_provider": '"facet"',
        "model_providers.facet.name": '"Facet"',
        "model_providers.facet.base_url": f'"{url}/v1"',
        "model_providers.facet.wire_api": '"responses"',
        "model_providers.facet.env_key": '"FACET_API_KEY"',
        "model_context_window": "128",
    }
    assert variables["FACET_API_KEY"] == "secret"


def test_opencode_gets_a_configuration(url: str, programs: str) -> None:
    words, variables = launched(programs, "opencode", "--url", url)
    config: dict[str, Any] = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["facet"]
    assert words == []
    assert (config["model"], config["small_model"]) == ("facet/org/tiny", "facet/org/tiny")
    assert provider["npm"] == "@ai-sdk/openai-compatible"
    assert provider["options"] == {"baseURL": f"{url}/v1", "apiKey": "none"}
    assert provider["models"]["org/tiny"]["limit"]["context"] == 128


def test_what_is_missing_is_told(
    url: str, programs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert run("facet", ["launch", "opencode", "--url", url]) == FAILED
    assert capsys.readouterr().err == "error: there is no program opencode here: npm install -g opencode-ai\n"
    monkeypatch.setenv("PATH", programs)
    assert run("facet", ["launch", "codex", "--url", "unix:/tmp/x"]) == BAD_USAGE
    assert "needs an address of http or https" in capsys.readouterr().err
    assert run("facet", ["launch", "cursor"]) == BAD_USAGE
    assert "claude-code" in capsys.readouterr().err
