"""`facet complete`: goes on with a text, as `vllm complete` does; streamed, on a terminal or in a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from server.terminal.connection import Server
from server.terminal.lines import Lines, piped
from server.terminal.options import add_server_flags, model_of, parser_of, server_of
from server.terminal.pace import Pace
from server.terminal.screen import Screen


def run(arguments: Sequence[str], command: str, api_key: str | None) -> int:
    given = _parser(command).parse_args(arguments)
    with server_of(given, api_key) as server:
        _complete_all(server, Screen(), given)
    return 0


def _complete_all(server: Server, screen: Screen, given: argparse.Namespace) -> None:
    fields = {"model": model_of(server, given, "generate"), **_sampling(given)}
    if given.quick is not None:
        _complete(server, screen, {**fields, "prompt": given.quick})
    elif not sys.stdin.isatty():
        _complete(server, screen, {**fields, "prompt": piped()})
    else:
        screen.remark(f'{fields["model"]}: type the beginning of a text. """ begins and ends several lines.')
        for prompt in Lines():
            _complete(server, screen, {**fields, "prompt": prompt})


def _complete(server: Server, screen: Screen, fields: dict[str, Any]) -> None:
    pace = Pace()
    body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    try:
        for chunk in server.stream("/v1/completions", body):
            pace.see(chunk)
            for choice in chunk["choices"]:
                screen.text(choice["text"])
    except KeyboardInterrupt:
        if not screen.is_terminal:
            raise
    screen.text("\n")
    screen.remark(pace.summary())


def _sampling(given: argparse.Namespace) -> dict[str, Any]:
    asked = {"max_tokens": given.max_tokens, "temperature": given.temperature}
    return {name: value for name, value in asked.items() if value is not None}


def _parser(command: str) -> argparse.ArgumentParser:
    parser = parser_of(command, "Go on with a text: --quick's, that of a pipe, or those that are typed.")
    add_server_flags(parser)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Complete this, and end.")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="Default: the server's, 16.")
    parser.add_argument("--temperature", type=float, metavar="X", help="Default: the server's.")
    return parser
