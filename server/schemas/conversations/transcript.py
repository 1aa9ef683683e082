"""Writes down a conversation as chat messages, from items or blocks that come one by one.

Responses and Anthropic's Messages split a turn of the model into reasoning, texts and calls. Chat templates
know one message for all of them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import PlainValidator, ValidationError

from server.errors import BadRequest
from server.schemas.body import invalid_body
from server.schemas.chat import ChatRequest
from server.schemas.messages import MOST_NAMED
from server.schemas.repaired_history import named

Content = str | list[dict[str, Any]] | None

SEALED = "facet1."
"""The beginning of sealed reasoning that this server has made."""


class Transcript:
    """Collects messages in the form of chat completions."""

    def __init__(self, entries: str) -> None:
        """`entries` is what clients call the parts of a conversation."""
        self._entries = entries
        self._left_out: dict[str, None] = {}
        """The types of those that were left out, in order."""
        self._messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None
        """The assistant's message that is being collected."""
        self._thoughts: list[str] = []
        """The reasoning of that message so far."""
        self._names: dict[str, str] = {}
        """The name of the tool that each call has called."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far."""
        self._end_turn()
        return self._messages

    @property
    def notes(self) -> list[str]:
        """What the client is told of what was left out."""
        kinds = ", ".join([*self._left_out][:MOST_NAMED])
        return [f"{self._entries} left out, which no model here reads: {kinds}"] if kinds else []

    def leave_out(self, kind: object) -> None:
        """Add nothing for an entry of this type."""
        self._left_out[named(kind)] = None

    def say(self, role: str, content: object) -> None:
        """Add a message, or what the assistant says in its turn."""
        if role != "assistant":
            self._end_turn()
            self._messages.append({"role": role, "content": content})
            return
        if self._has_spoken():
            self._end_turn()  # text behind text, or behind calls, belongs to a message of its own
        self._assistant()["content"] = content

    def think(self, text: str) -> None:
        """Add reasoning, which comes before the rest of a turn."""
        if self._has_spoken():
            self._end_turn()
        self._assistant()
        self._thoughts.append(text)

    def call(self, id: object, name: object, arguments: object) -> None:
        """Add a call to the assistant's turn. What is wrong with it is repaired later."""
        if isinstance(id, str) and isinstance(name, str):
            self._names[id] = name
        function = {"name": name, "arguments": arguments}
        self._assistant().setdefault("tool_calls", []).append(
            {"id": id, "type": "function", "function": function}
        )

    def answer(self, id: object, content: object) -> None:
        """Add what the tool of a call has answered, with the tool's name if the call came before."""
        self._end_turn()
        message = {"role": "tool", "tool_call_id": id, "content": content}
        if isinstance(id, str) and id in self._names:
            message["name"] = self._names[id]
        self._messages.append(message)

    def _assistant(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant"}
            self._messages.append(self._turn)
        return self._turn

    def _has_spoken(self) -> bool:
        return self._turn is not None and ("content" in self._turn or "tool_calls" in self._turn)

    def _end_turn(self) -> None:
        if self._turn is not None and self._thoughts:
            # Templates read one name or the other.
            self._turn["reasoning_content"] = self._turn["reasoning"] = "".join(self._thoughts)
        self._turn = None
        self._thoughts.clear()


def goes_on(messages: Sequence[Mapping[str, Any]]) -> bool | None:
    """True if the answer goes on with the last message, which clients of other APIs do not say; else None."""
    last = messages[-1] if messages else {}
    return (
        last.get("role") == "assistant" and bool(last.get("content")) and "tool_calls" not in last
    ) or None


def chat_request(asked: Mapping[str, Any], notes: Sequence[str] = ()) -> ChatRequest:
    """A request to chat completions with these fields; None is the same as leaving one out. `notes` are told
    to the client beside what the request itself gives cause for."""
    try:
        found = ChatRequest.model_validate({name: each for name, each in asked.items() if each is not None})
    except ValidationError as error:
        raise invalid_body(error.errors(include_url=False)) from None
    if notes:
        vars(found)["repairs"] = [*found.repairs, *notes]
    return found


def text_of(value: object, where: str) -> str:
    """A text of the request, or the error that it is none."""
    if not isinstance(value, str):
        raise BadRequest(f"{where} should be a string.", where)
    return value


def objects_of(value: object, where: str) -> list[dict[str, Any]]:
    """A list of objects of the request, or the error that it is none."""
    if not isinstance(value, list):
        raise BadRequest(f"{where} should be a list of objects.", where)
    for index, each in enumerate(value):
        if not isinstance(each, dict):
            raise BadRequest(f"{where}[{index}] should be an object.", f"{where}[{index}]")
    return value


def text_or_objects(name: str) -> PlainValidator:
    """The check of a field of this name that is a text, or a list of objects."""
    return PlainValidator(
        lambda value: value if isinstance(value, str) else objects_of(value, name),
        json_schema_input_type=str | list[dict[str, Any]],
    )


def shown(value: object) -> str:
    """A wrong value as an error message names it."""
    return repr(value[:64]) if isinstance(value, str) else "none"


def seal(reasoning: str) -> str:
    """Reasoning in the form in which a client keeps it for us. It is no secret: the client has seen it."""
    return SEALED + base64.b64encode(reasoning.encode()).decode()


def unsealed(sealed: object) -> str:
    """The reasoning that `seal` was given; empty for what others have made."""
    if not isinstance(sealed, str) or not sealed.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
    except ValueError:
        return ""
