"""`facet chat`, `complete` and `run`: answers that are streamed to a terminal or a pipe, as vLLM has them."""

from __future__ import annotations

import argparse
import base64
import json
import mimetypes
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from server.options.option_parsing import OptionError, nearest
from server.options.parse_server_options import client_key_of_environment
from server.terminal.console import CommandError, RepetitionGuard, Screen, parser_of, read_standard_input
from server.terminal.own_server import own_server
from server.terminal.server_client import ServerClient, ServerError, add_server_flags, client_of, model_of

HELP = '''/system TEXT     begin anew with this system prompt; without a text, with none
/model NAME      go on with another model; without a name, list them
/set NAME VALUE  send this field with every request, such as /set temperature 0; without a value, no more
/image PATH      send this picture with the next message, which may have several; without a path, none
/video PATH      the same for a video, and /audio PATH for a sound
/again           have the last answer generated again, or send a message again that failed
/clear           forget the conversation
/help            show this
/exit            leave, as Ctrl-D does
Several lines: begin and end them with """, or end each with a backslash. Ctrl-C stops an answer.'''

_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
REPEATED = (
    "stopped: the answer repeats itself; /set temperature 0.7 or /set repetition_penalty 1.1, then /again"
)
_QUOTES = '"""'
_KINDS = {"image": "picture", "video": "video", "audio": "sound"}
"""What a file may be that goes with a message, by the name of its command."""


def run(arguments: Sequence[str], command: str) -> int:
    """Runs `facet chat`, `facet complete` or `facet run`: that is the command's last word."""
    name = command.split()[-1]
    if name == "run":
        return _serve_and_chat(arguments, command)
    given = _parser(command, is_chat=name == "chat").parse_args(arguments)
    with client_of(given) as server:
        (_talk if name == "chat" else _continue)(server, given)
    return 0


def _serve_and_chat(arguments: Sequence[str], command: str) -> int:
    """Starts a server for a conversation, and ends it with that."""
    parser = parser_of(
        command,
        "Serve a model for one conversation, with options of `facet chat` and of `facet serve`. The server "
        "ends with the chat; until then, programs on this machine can use it, too.",
        "MODEL [options of chat and of serve]",
    )
    _add_chat_flags(parser)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="Default: one that is free.")
    parser.add_argument("--api-key", metavar="KEY", help="For the server; safer in FACET_API_KEY.")
    given, serve_options = parser.parse_known_args(arguments)
    given.model, key = None, given.api_key or client_key_of_environment()
    serve_options += ["--api-key", given.api_key] if given.api_key else []
    with own_server(serve_options, given.port) as own, ServerClient(own.url, key) as server:
        own.wait_until_ready()
        Screen().remark(f"the page of this server, while the chat lasts: {own.url}")
        _talk(server, given)
    return 0


def _talk(server: ServerClient, given: argparse.Namespace) -> None:
    chat = Chat(server, Screen(), model_of(server, given, "generate"), given.system_prompt)
    chat.fields.update(_given_fields(given))
    for kind in _KINDS:
        for path in getattr(given, kind):
            chat.attach(path, kind)
    _answer_given(given, chat.say, chat.converse)


def _continue(server: ServerClient, given: argparse.Namespace) -> None:
    screen, model = Screen(), model_of(server, given, "generate")
    body = {"model": model, **_given_fields(given), **_STREAMED}
    complete = partial(_complete, server, screen, body)
    _answer_given(given, complete, partial(_complete_typed, screen, model, complete))


def _given_fields(given: argparse.Namespace) -> dict[str, Any]:
    asked = {"max_tokens": given.max_tokens, "temperature": given.temperature}
    return {name: value for name, value in asked.items() if value is not None}


def _answer_given(
    given: argparse.Namespace, answer: Callable[[str], None], converse: Callable[[], None]
) -> None:
    """Answers the text of --quick or of a pipe, or those that are typed."""
    if given.quick is not None:
        answer(given.quick)
    elif not sys.stdin.isatty():
        answer(_piped_text())
    else:
        converse()


def _piped_text() -> str:
    """All of standard input, which is one message."""
    text = read_standard_input()
    if not text.strip():
        raise OptionError("standard input is empty: give a text through a pipe, or with --quick")
    return text


def _complete_typed(screen: Screen, model: str, complete: Callable[[str], None]) -> None:
    screen.remark(f'{model}: type the beginning of a text. """ begins and ends several lines.')
    for prompt in typed_messages():
        complete(prompt)


def _complete(server: ServerClient, screen: Screen, body: dict[str, Any], prompt: str) -> None:
    speed = Speed()
    try:
        for chunk in server.stream("/v1/completions", {**body, "prompt": prompt}):
            speed.count(chunk)
            for choice in chunk["choices"]:
                screen.text(choice["text"])
    except KeyboardInterrupt:
        if not screen.is_terminal:
            raise
    screen.text("\n")
    screen.remark(speed.summary())


class Chat:
    """A conversation: its messages so far, and what is sent with each request."""

    def __init__(
        self, server: ServerClient, screen: Screen, model: str, system_prompt: str | None = None
    ) -> None:
        self._server, self._screen = server, screen
        self.model = model
        self.fields: dict[str, Any] = {}
        """Fields of requests beside model and messages."""
        self._unsent = ""
        """The text of the last message, if there was no answer to it."""
        self.messages: list[dict[str, Any]] = []
        self._begin(system_prompt)

    def converse(self) -> None:
        """Answers what is typed, until the end."""
        screen = self._screen
        screen.remark(f"{self.model}: type a message, or /help")
        for message in typed_messages():
            try:
                if not message.startswith("/"):
                    self.say(message)
                elif not self.obey(message):
                    return
            except CommandError as error:
                screen.remark(f"error: {error}" + ("; /again sends it again" if self._unsent else ""))
            except KeyboardInterrupt:
                screen.text("\n")
                screen.remark("stopped")

    def say(self, text: str) -> None:
        """Sends a message and shows the answer as it comes. What came before a Ctrl-C is kept."""
        parts, self._media, self._unsent = self._media, [], ""
        content = [*parts, {"type": "text", "text": text}] if parts else text
        self.messages.append({"role": "user", "content": content})
        self._answer()

    def attach(self, path: str, kind: str = "image") -> None:
        """Reads a picture, video or sound that is sent with the next message. Raises CommandError."""
        cards = self._server.get("/v1/models")["data"]
        card = next((card for card in cards if card["id"] == self.model), {})
        media: dict[str, Any] = card.get("media") or {}
        if "media" in card and kind not in media.get("most", ()):  # servers of others do not tell
            raise CommandError(f"{self.model} takes no {_KINDS[kind]}s")
        url = file_url(path, media.get("max_bytes"))
        self._media.append({"type": f"{kind}_url", f"{kind}_url": {"url": url}})
        self._screen.remark(f"{path} goes with the next message")

    def obey(self, line: str) -> bool:
        """Does what a line that begins with a slash asks; returns whether the conversation goes on."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        match name:
            case "exit" | "quit" | "bye":
                return False
            case "system":
                self._begin(rest or None)
            case "clear":
                self._begin(self._system_prompt)
            case "model":
                self._change_model(rest)
            case "set":
                self._set(*rest.split(maxsplit=1))
            case "image" | "video" | "audio" if rest:
                self.attach(rest, name)
            case "image" | "video" | "audio":
                self._media[:] = [part for part in self._media if part["type"] != f"{name}_url"]
            case "again" if self._unsent:
                self.say(self._unsent)
            case "again" if self._take_last_answer_back():
                self._answer()
            case _:
                self._screen.remark(HELP)
        return True

    def _begin(self, system_prompt: str | None) -> None:
        """Forgets the conversation, and begins another with this system prompt."""
        self._system_prompt, self._unsent = system_prompt, ""
        self._media: list[dict[str, Any]] = []
        self.messages = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def _answer(self) -> None:
        pieces: list[str] = []
        speed, guard, is_reasoning = Speed(), RepetitionGuard(), False
        repeated = 0
        body = {**_STREAMED, **self.fields, "model": self.model, "messages": self.messages}
        try:
            for chunk in self._server.stream("/v1/chat/completions", body):
                speed.count(chunk)
                # Of several answers that /set n asks for, the first is shown.
                for delta in (one["delta"] for one in chunk["choices"] if not one.get("index")):
                    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
                    if reasoning:
                        is_reasoning = True
                        self._screen.reasoning(reasoning)
                    if text := delta.get("content") or "":
                        if is_reasoning and self._screen.is_terminal:
                            self._screen.text("\n\n")
                        is_reasoning = False
                        pieces.append(text)
                        self._screen.text(text)
                    if self._screen.is_terminal:
                        repeated = guard.repeated(reasoning + text)
                if repeated:
                    pieces[:] = ["".join(pieces)[:-repeated]] if pieces else []
                    break
        except (ServerError, KeyboardInterrupt):
            if pieces:
                self._keep(pieces)
            else:  # it was not answered: let it be sent again, with its pictures
                content = self.messages.pop()["content"]
                self._media[:0] = content[:-1] if isinstance(content, list) else []
                self._unsent = content[-1]["text"] if isinstance(content, list) else content
            raise
        self._keep(pieces)
        self._screen.text("\n")
        if repeated:
            self._screen.remark(REPEATED)
        self._screen.remark(speed.summary())

    def _keep(self, pieces: list[str]) -> None:
        """Adds an answer to the conversation, also one without text: templates want one for each message."""
        self.messages.append({"role": "assistant", "content": "".join(pieces)})

    def _take_last_answer_back(self) -> bool:
        """Returns whether there is a message to answer again."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        return bool(self.messages) and self.messages[-1]["role"] == "user"

    def _change_model(self, name: str) -> None:
        names = [card["id"] for card in self._server.get("/v1/models")["data"]]
        if name in names:
            self.model = name
        else:
            self._screen.remark("models: " + ", ".join(names))

    def _set(self, name: str = "", value: str = "") -> None:
        if name in ("model", "messages", "stream", "stream_options"):
            self._screen.remark(f"{name} cannot be set: see /help")
        elif value:
            _check_field(name)
            try:
                self.fields[name] = json.loads(value)
            except ValueError:
                self.fields[name] = value
        else:
            self.fields.pop(name, None)
            self._screen.remark("set: " + (json.dumps(self.fields) if self.fields else "nothing"))


def _check_field(name: str) -> None:
    """Raises CommandError if no request of a chat has this field."""
    from server.schemas.chat import ChatRequest  # imports much

    known = ChatRequest.known_names()
    if name not in known:
        raise CommandError(f"there is no field {name}{nearest(name, known, 'docs/api.md lists them')}")


def _parser(command: str, *, is_chat: bool) -> argparse.ArgumentParser:
    does = "Chat with a model: send a message by --quick or through a pipe, or type messages."
    if not is_chat:
        does = "Continue a text, given by --quick, through a pipe, or typed."
    parser = parser_of(command, does)
    add_server_flags(parser)
    if is_chat:
        _add_chat_flags(parser)
    else:
        _add_answer_flags(parser, "Continue this text, and exit.", "Most tokens of the output (16).")
    return parser


def _add_chat_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system-prompt", metavar="TEXT", help="The system prompt.")
    for kind, name in _KINDS.items():
        about = f"A {name} for the first message; may be given several times."
        parser.add_argument(f"--{kind}", action="append", default=[], metavar="PATH", help=about)
    _add_answer_flags(parser, "Send this message, and exit.", "Most tokens of an answer.")


def _add_answer_flags(parser: argparse.ArgumentParser, quick: str, longest: str) -> None:
    parser.add_argument("-q", "--quick", metavar="TEXT", help=quick)
    parser.add_argument("--max-tokens", type=int, metavar="N", help=longest)
    parser.add_argument("--temperature", type=float, metavar="X", help="Default: the server's.")


def file_url(path: str, max_bytes: int | None = None) -> str:
    """The data URL of a file. Raises CommandError if it cannot be read or is too long as base64."""
    try:
        file = Path(path).expanduser()
        if max_bytes is not None and file.stat().st_size * 4 // 3 > max_bytes:
            raise CommandError(f"{path} is too large: the server takes {max_bytes} bytes of base64")
        data = base64.b64encode(file.read_bytes()).decode()
    except (OSError, RuntimeError) as error:  # the latter of a home that is not known
        raise CommandError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{data}"


def typed_messages(read: Callable[[str], str] = input) -> Iterator[str]:
    '''Yields what is typed until Ctrl-D: one line each, or several between lines that are """.

    A line that ends with a backslash goes on in the next one.
    '''
    with suppress(ImportError):
        import readline  # noqa: F401  # gives input() editing and the lines before
    while True:
        try:
            message = _typed_message(read)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nCtrl-D leaves")
            continue
        if message.strip():
            yield message


def _typed_message(read: Callable[[str], str]) -> str:
    line = read("> ")
    if line.strip().startswith(_QUOTES):
        first = line.strip().removeprefix(_QUOTES)
        lines = [first] if first else []
        while not (lines and lines[-1].endswith(_QUOTES)):
            lines.append(read("… "))
        lines[-1] = lines[-1].removesuffix(_QUOTES)
        return "\n".join(lines).rstrip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(read("… "))
    return "\n".join(lines)


class Speed:
    """The tokens of a streamed answer, and how fast they came."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first = self._last = 0.0
        self._chunks = 0
        self._tokens: int | None = None

    def count(self, chunk: dict[str, Any]) -> None:
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
