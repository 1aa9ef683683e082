"""`facet chat` and `facet complete`, as vLLM has them: streamed, on a terminal or in a pipe."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from server.options.option_table import OptionError
from server.terminal.connection import Server, ServerError
from server.terminal.screen import Screen
from server.terminal.server_flags import add_server_flags, model_of, parser_of, server_of

HELP = '''/system TEXT     begin anew with this system prompt; without a text, with none
/model NAME      go on with another model; without a name, list them
/set NAME VALUE  send this field with every request, such as /set temperature 0; without a value, no more
/again           have the last answer generated again
/clear           forget the conversation
/help            show this
/exit            leave, as Ctrl-D does
Several lines: begin and end them with """, or end each with a backslash. Ctrl-C stops an answer.'''


def run(arguments: Sequence[str], command: str, api_key: str | None) -> int:
    """Runs `facet chat`, or `facet complete` if that is the command's name."""
    talks = command.endswith("chat")
    given = _parser(command, talks=talks).parse_args(arguments)
    asked = {"max_tokens": given.max_tokens, "temperature": given.temperature}
    fields = {name: value for name, value in asked.items() if value is not None}
    with server_of(given, api_key) as server:
        screen, model = Screen(), model_of(server, given, "generate")
        if talks:
            chat = Chat(server, screen, model, given.system_prompt)
            chat.fields.update(fields)
            _say(given, chat.say, lambda: _converse(chat))
        else:
            body = {"model": model, **fields, "stream": True, "stream_options": {"include_usage": True}}
            _say(
                given,
                lambda prompt: _complete(server, screen, {**body, "prompt": prompt}),
                lambda: _complete_typed(server, screen, body),
            )
    return 0


def _say(given: argparse.Namespace, say: Callable[[str], None], converse: Callable[[], None]) -> None:
    """Says one text, that of --quick or of a pipe, or else whatever is typed."""
    if given.quick is not None:
        say(given.quick)
    elif not sys.stdin.isatty():
        say(piped())
    else:
        converse()


def _complete_typed(server: Server, screen: Screen, body: dict[str, Any]) -> None:
    screen.remark(f'{body["model"]}: type the beginning of a text. """ begins and ends several lines.')
    for prompt in Lines():
        _complete(server, screen, {**body, "prompt": prompt})


def _complete(server: Server, screen: Screen, body: dict[str, Any]) -> None:
    pace = Pace()
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


def _parser(command: str, *, talks: bool) -> argparse.ArgumentParser:
    if talks:
        does = "Talk to a model: --quick's message, that of a pipe, or those that are typed."
        quick, longest = "Send this message, and end.", "Longest answer."
    else:
        does = "Go on with a text: --quick's, that of a pipe, or those that are typed."
        quick, longest = "Complete this, and end.", "Default: the server's, 16."
    parser = parser_of(command, does)
    add_server_flags(parser)
    if talks:
        parser.add_argument("--system-prompt", metavar="TEXT", help="How the model shall answer.")
    parser.add_argument("-q", "--quick", metavar="TEXT", help=quick)
    parser.add_argument("--max-tokens", type=int, metavar="N", help=longest)
    parser.add_argument("--temperature", type=float, metavar="X", help="Default: the server's.")
    return parser


_QUOTES = '"""'


def piped() -> str:
    """All of standard input, which is one message."""
    text = sys.stdin.read()
    if not text.strip():
        raise OptionError("standard input is empty: give a text through a pipe, or with --quick")
    return text


class Lines:
    '''Yields what is typed until Ctrl-D: one line each, or several between lines that are """.

    A line that ends with a backslash goes on in the next one.
    '''

    def __init__(self, read: Callable[[str], str] = input) -> None:
        self._read = read
        with suppress(ImportError):
            import readline  # noqa: F401  # gives input() editing and the lines before

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                message = self._message()
            except EOFError:
                print()
                return
            if message.strip():
                yield message

    def _message(self) -> str:
        line = self._read("> ")
        if line.strip().startswith(_QUOTES):
            return self._quoted(line.strip().removeprefix(_QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._read("… "))
        return "\n".join(lines)

    def _quoted(self, first: str) -> str:
        lines = [first] if first else []
        while not (lines and lines[-1].endswith(_QUOTES)):
            lines.append(self._read("… "))
        lines[-1] = lines[-1].removesuffix(_QUOTES)
        return "\n".join(lines).rstrip("\n")


class Pace:
    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first = self._last = 0.0
        self._chunks = 0
        self._tokens: int | None = None

    def see(self, chunk: dict[str, Any]) -> None:
        """Counts a chunk of a stream; the one with `usage` says how many tokens there were."""
        if chunk.get("choices"):
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._chunks += 1
        if usage := chunk.get("usage"):
            self._tokens = usage["completion_tokens"]

    def summary(self) -> str:
        if not self._chunks:
            return "no token came"
        count = self._chunks if self._tokens is None else self._tokens
        seconds = self._last - self._first
        rate = f", {(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds > 0 else ""
        tokens = "1 token" if count == 1 else f"{count} tokens"
        return f"{tokens}{rate}, the first after {self._first - self._started:.2f} s"
