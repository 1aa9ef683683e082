"""Flags that all commands share which talk to a server; their names are those of `vllm chat`."""

from __future__ import annotations

import argparse

from server.options.option_table import Parser
from server.terminal.connection import DEFAULT_URL, Server, ServerError


def parser_of(command: str, description: str, usage: str = "[options]") -> Parser:
    return Parser(prog=command, usage=f"{command} {usage}", description=description, allow_abbrev=False)


def add_server_flags(parser: argparse.ArgumentParser, *, model: bool = True) -> None:
    parser.add_argument(
        "--url", default=DEFAULT_URL, metavar="URL", help=f"The server ({DEFAULT_URL}); unix:PATH, too."
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="Its key; better in FACET_API_KEY, VLLM_API_KEY or OPENAI_API_KEY."
    )
    if model:
        parser.add_argument(
            "--model-name", "--model", dest="model", metavar="NAME", help="Default: the first it lists."
        )


def server_of(given: argparse.Namespace, api_key: str | None) -> Server:
    return Server(given.url, given.api_key or api_key)


def model_of(server: Server, given: argparse.Namespace, task: str) -> str:
    """The model that was asked for, or the server's first. Raises ServerError if it cannot do the task."""
    cards = server.get("/v1/models").get("data", [])
    card = next((card for card in cards if given.model in (None, card["id"])), None)
    if card is None:
        names = ", ".join(card["id"] for card in cards) or "none"
        raise ServerError(f"{server.url} has no model {given.model}; it has {names}")
    tasks = card.get("tasks")
    if tasks is not None and task not in tasks:
        raise ServerError(f"{card['id']} cannot {task}; it can {', '.join(tasks)}")
    return card["id"]
