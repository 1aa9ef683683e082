"""`facet chat`: a conversation with a model, as `vllm chat` has it; on a terminal or in a pipe."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from server.terminal.connection import Server, ServerError
from server.terminal.lines import Lines, piped
from server.terminal.options import add_server_flags, model_of, parser_of, server_of
from server.terminal.pace import Pace
from server.terminal.screen import Screen

HELP = '''/system TEXT     begin anew with this system prompt; without a text, with none
/model NAME      go on with another model; without a name, list them
/set NAME VALUE  send this field with every request, such as /set temperature 0; without a value, no more
/again           have the last answer generated again
/clear           forget the conversation
/help            show this
/exit            leave, as Ctrl-D does
Several lines: begin and end them with """, or end each with a backslash. Ctrl-C stops an answer.'''


def run(arguments: Sequence[str], command: str, api_key: str | None) -> int:
    given = _parser(command).parse_args(arguments)
    with server_of(given, api_key) as server:
        chat = Chat(server, Screen(), model_of(server, given, "generate"), given.system_prompt)
        _begin(chat, given)
    return 0


def _begin(chat: Chat, given: argparse.Namespace) -> None:
    fields = {"max_tokens": given.max_tokens, "temperature": given.temperature}
    chat.fields.update({name: value for name, value in fields.items() if value is not None})
    if given.quick is not None:
        chat.say(given.quick)
    elif not sys.stdin.isatty():
        chat.say(piped())
    else:
        _converse(chat)


def _converse(chat: Chat) -> None:
    screen = chat.screen
    screen.remark(f"{chat.model}: type a message, or /help")
    for message in Lines():
        try:
            if not message.startswith("/"):
                chat.say(message)
            elif not chat.obey(message):
                return
        except ServerError as error:
            screen.remark(f"error: {error}")
        except KeyboardInterrupt:
            screen.text("\n")
            screen.remark("stopped")


class Chat:
    """A conversation: its messages so far, and what is sent with each request."""

    def __init__(self, server: Server, screen: Screen, model: str, system: str | None = None) -> None:
        self._server, self.screen = server, screen
        self.model = model
        self.fields: dict[str, Any] = {}
        """Fields of requests beside model and messages."""
        self.messages: list[dict[str, str]] = []
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Forgets the conversation, and begins another with this system prompt."""
        self._system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> None:
        """Sends a message and shows the answer as it comes. What came before a Ctrl-C is kept."""
        self.messages.append({"role": "user", "content": text})
        self._answer()

    def obey(self, line: str) -> bool:
        """Does what a line that begins with a slash asks; returns whether the conversation goes on."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        match name:
            case "exit" | "quit" | "bye":
                return False
            case "system":
                self.begin(rest or None)
            case "clear":
                self.begin(self._system)
            case "model":
                self._change_model(rest)
            case "set":
                self._set(*rest.split(maxsplit=1))
            case "again" if self._can_repeat():
                self._answer()
            case _:
                self.screen.remark(HELP)
        return True

    def _answer(self) -> None:
        pieces: list[str] = []
        pace, thinking = Pace(), False
        body = {
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
            "model": self.model,
            "messages": self.messages,
        }
        try:
            for chunk in self._server.stream("/v1/chat/completions", body):
                pace.see(chunk)
                for choice in chunk["choices"]:
                    delta = choice["delta"]
                    if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                        thinking = True
                        self.screen.thought(thought)
                    if text := delta.get("content"):
                        if thinking and self.screen.is_terminal:
                            self.screen.text("\n\n")
                        thinking = False
                        pieces.append(text)
                        self.screen.text(text)
        except ServerError:
            if not pieces:
                self.messages.pop()  # it was not answered: let it be sent again
            raise
        finally:
            if pieces:
                self.messages.append({"role": "assistant", "content": "".join(pieces)})
        self.screen.text("\n")
        self.screen.remark(pace.summary())

    def _can_repeat(self) -> bool:
        """Takes the last answer back; returns whether there is a message to answer."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    def _change_model(self, name: str) -> None:
        names = [card["id"] for card in self._server.get("/v1/models")["data"]]
        if name in names:
            self.model = name
        else:
            self.screen.remark("models: " + ", ".join(names))

    def _set(self, name: str = "", value: str = "") -> None:
        if name in ("model", "messages", "stream", "stream_options"):
            self.screen.remark(f"{name} cannot be set: see /help")
        elif value:
            try:
                self.fields[name] = json.loads(value)
            except ValueError:
                self.fields[name] = value
        else:
            self.fields.pop(name, None)
            self.screen.remark("set: " + (json.dumps(self.fields) if self.fields else "nothing"))


def _parser(command: str) -> argparse.ArgumentParser:
    parser = parser_of(
        command, "Talk to a model: --quick's message, that of a pipe, or those that are typed."
    )
    add_server_flags(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="How the model shall answer.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="Send this message, and end.")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="Longest answer.")
    parser.add_argument("--temperature", type=float, metavar="X", help="Default: the server's.")
    return parser
