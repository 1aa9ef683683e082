"""The content blocks and tools of POST /v1/messages, and the chat messages and tools that they are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from server.api.conversations.transcript import Content, Transcript, objects_of, shown, text_of, unsealed
from server.errors import BadRequest

BILLING = "x-anthropic-billing-header:"
"""The beginning of a block of Claude Code that differs in each request: with it no prompt would be cached."""

ROLES = ("user", "assistant", "system")

NOT_READ = frozenset(
    [
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "compaction",
        "container_upload",
        "mcp_tool_result",
        "mcp_tool_use",
        "redacted_thinking",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ]
)
"""Types of blocks that only Anthropic's own models and tools make: they are left out."""

_DATED = re.compile(r"[a-z_]+_[0-9]{8}")
"""Types of tools that Anthropic runs, or has taught to its own models."""


class BlockReader:
    """Reads messages one after the other."""

    def __init__(self) -> None:
        self.transcript = Transcript()
        self.left_out: list[str] = []
        """The types of blocks that were left out."""

    def system(self, content: object, where: str) -> None:
        """Read what the system says."""
        if isinstance(content, str):
            said: Content = content
        else:
            texts = [_text(block, f"{where}[{i}]") for i, block in enumerate(objects_of(content, where))]
            said = [{"type": "text", "text": text} for text in texts if not text.startswith(BILLING)]
        if said:
            self.transcript.say("system", said)

    def message(self, message: Mapping[str, Any], where: str) -> None:
        """Read one message, which is `where` in the request."""
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise BadRequest(f"{where}.role is one of {', '.join(ROLES)}, got {shown(role)}.", where)
        if role == "system":
            self.system(content, f"{where}.content")
        elif isinstance(content, str):
            self.transcript.say(role, content)
        else:
            self._blocks(role, objects_of(content, f"{where}.content"), f"{where}.content")

    def _blocks(self, role: str, blocks: Sequence[Mapping[str, Any]], where: str) -> None:
        said: list[dict[str, Any]] = []

        def say() -> None:
            if said:
                self.transcript.say(role, said.copy())
                said.clear()

        for index, block in enumerate(blocks):
            place, kind = f"{where}[{index}]", block.get("type")
            if kind in ("text", "document"):
                said.append({"type": "text", "text": _text(block, place)})
            elif kind == "tool_result" and role == "user":
                say()
                self._result(block, place)
            elif kind in ("thinking", "tool_use") and role == "assistant":
                say()
                self._assistant(block, place)
            elif kind in NOT_READ:
                if kind != "redacted_thinking" and kind not in self.left_out:
                    self.left_out.append(kind)
            else:
                raise _refused(kind, place, role)
        say()

    def _assistant(self, block: Mapping[str, Any], where: str) -> None:
        if block.get("type") == "thinking":
            text = text_of(block.get("thinking"), f"{where}.thinking")
            self.transcript.think(text or unsealed(block.get("signature")))
            return
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise BadRequest(f"{where}.input should be an object.", f"{where}.input")
        name = text_of(block.get("name"), f"{where}.name")
        self.transcript.call(text_of(block.get("id"), f"{where}.id"), name, json.dumps(arguments))

    def _result(self, block: Mapping[str, Any], where: str) -> None:
        id, content = text_of(block.get("tool_use_id"), f"{where}.tool_use_id"), block.get("content")
        if content is None or isinstance(content, str):
            said: Content = content or ""
        else:
            place = f"{where}.content"
            blocks = enumerate(objects_of(content, place))
            said = [{"type": "text", "text": _text(each, f"{place}[{i}]")} for i, each in blocks]
        self.transcript.answer(id, said, f"{where}.tool_use_id")


def _text(block: Mapping[str, Any], where: str) -> str:
    """The text of a block that has nothing else."""
    match block:
        case {"type": "text", "text": text}:
            return text_of(text, f"{where}.text")
        case {"type": "document", "source": {"type": "text", "data": text}}:
            return text_of(text, f"{where}.source.data")
        case {"type": "tool_reference", "tool_name": name}:
            return text_of(name, f"{where}.tool_name")
        case _:
            raise _refused(block.get("type"), where, "message")


def _refused(kind: object, where: str, role: str) -> BadRequest:
    return BadRequest(
        f"{where}: blocks of the type {shown(kind)} are not supported in the content of a {role}; text is, "
        "and where they belong tool_use, tool_result and thinking.",
        where,
    )


def read_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The tools as chat completions has them, and the types of those that are left out.

    If all that is asked for is left out, it is refused instead.
    """
    functions: list[dict[str, Any]] = []
    left_out: list[str] = []
    for index, tool in enumerate(tools):
        kind = tool.get("type") or "custom"
        if kind == "custom":
            functions.append({"type": "function", "function": _function(tool, f"tools[{index}]")})
        elif isinstance(kind, str) and (_DATED.fullmatch(kind) or kind == "mcp_toolset"):
            if kind not in left_out:
                left_out.append(kind)
        else:
            raise BadRequest(f"tools[{index}]: tools have the type custom, got {shown(kind)}.", "tools")
    if left_out and not functions:
        raise BadRequest(
            f"Tools of the type {', '.join(left_out)} are not here. This server runs no tools: it has those "
            "of the type custom, which clients run.",
            "tools",
        )
    return functions, left_out


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": text_of(tool.get("name"), f"{where}.name")}
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise BadRequest(f"{where}.input_schema should be an object.", f"{where}.input_schema")
    for key in ("description", "strict"):
        if tool.get(key) is not None:
            function[key] = tool[key]
    return {**function, "parameters": schema}
