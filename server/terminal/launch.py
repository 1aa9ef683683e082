"""`facet launch`: starts a coding agent against a running server, with settings for that one call.

They stand in the environment and on the command line of the agent: the user's own files stay as they are.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from server.options.option_parsing import OptionError
from server.options.parse_server_options import client_key_of_environment
from server.terminal.console import CommandError, Screen, parser_of
from server.terminal.server_client import add_server_flags, card_of, client_of, parsed_address, root_of
from worker.host.machine import environment_with

_KEY_VARIABLE = "FACET_API_KEY"


class Target(NamedTuple):
    """The server and the model that an agent shall use."""

    url: str
    """The server's address, without /v1."""
    key: str
    model: str
    context: int | None
    """The context length of the model, if the server tells it."""


Settings = tuple[dict[str, str], list[str]]
"""Variables of the environment, and words that come first on the command line."""


def _claude_code(target: Target) -> Settings:
    models = ["ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"]
    models += [f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")]
    variables = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_API_KEY": "",  # a key of Anthropic's would go before the token
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        **dict.fromkeys(models, target.model),
    }
    return variables, []


def _codex(target: Target) -> Settings:
    provider = {
        "name": "Facet",
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        "env_key": _KEY_VARIABLE,
    }
    options: dict[str, object] = {"model": target.model, "model_provider": "facet"}
    options |= {f"model_providers.facet.{name}": value for name, value in provider.items()}
    if target.context is not None:
        options["model_context_window"] = target.context
    # JSON's texts and numbers are TOML's, as which these values are read.
    words = [word for name, value in options.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return {_KEY_VARIABLE: target.key}, words


def _opencode(target: Target) -> Settings:
    model: dict[str, Any] = {"name": target.model}
    if target.context is not None:
        model["limit"] = {"context": target.context, "output": target.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Facet",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
        "models": {target.model: model},
    }
    name = f"facet/{target.model}"
    config = {"provider": {"facet": provider}, "model": name, "small_model": name}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, []


class Agent(NamedTuple):
    """A program that `facet launch` starts."""

    program: str
    package: str
    """Its package on npm."""
    settings: Callable[[Target], Settings]
    least_context: int
    """Tokens of its first prompt, with room for an answer."""


AGENTS = {
    "claude-code": Agent("claude", "@anthropic-ai/claude-code", _claude_code, 40_000),
    "codex": Agent("codex", "@openai/codex", _codex, 16_000),
    "opencode": Agent("opencode", "opencode-ai", _opencode, 16_000),
}


def run(arguments: Sequence[str], command: str) -> int:
    """Becomes the agent, unless it cannot be started."""
    parser = parser_of(
        command,
        "Start a coding agent that uses a running server, with settings for this call alone.",
        "claude-code|codex|opencode [options] [-- arguments of the agent]",
    )
    parser.add_argument("agent", choices=sorted(AGENTS), metavar="AGENT", help=", ".join(AGENTS))
    add_server_flags(parser)
    words = list(arguments)
    split = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:split])
    agent = AGENTS[given.agent]
    program = shutil.which(agent.program)
    if program is None:
        raise CommandError(f"there is no program {agent.program} here: npm install -g {agent.package}")
    address = parsed_address(given.url)
    if address is None or given.url.startswith("unix:"):
        raise OptionError(f"--url {given.url}: {given.agent} needs an address of http or https")
    with client_of(given) as server:
        card = card_of(server, given, "generate")
    key = given.api_key or client_key_of_environment() or "none"
    url = f"{address.scheme}://{address.netloc}{root_of(address)}"
    target = Target(url, key, card["id"], card.get("max_model_len"))
    if target.context is not None and target.context < agent.least_context:
        Screen().remark(
            f"{target.model} has a context length of {target.context}, and {given.agent} needs some "
            f"{agent.least_context} tokens: serve it with a larger --max-model-len, or another model"
        )
    variables, first = agent.settings(target)
    argv = [program, *first, *words[split + 1 :]]
    os.execve(program, argv, environment_with(**variables))
