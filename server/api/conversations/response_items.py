"""The input items of POST /v1/responses, and the chat messages that they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from server.api.conversations.transcript import Content, Transcript, objects_of, shown, text_of, unsealed
from server.errors import BadRequest

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")

NOT_READ = frozenset(
    [
        "additional_tools",
        "agent_message",
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "context_compaction",
        "file_search_call",
        "ghost_snapshot",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    ]
)
"""Types of items that OpenAI has and no model here has learned: they are left out, and the client is told."""

KEPT_NOWHERE = "this server keeps no responses: send the items again."


class InputReader:
    """Reads items one after the other."""

    def __init__(self, called: Callable[[str, object], str]) -> None:
        """`called` returns the name under which the model knows the tool of a name and a namespace."""
        self.transcript = Transcript()
        self.left_out: list[str] = []
        """The types of items that were left out."""
        self._called = called

    def read(self, item: Mapping[str, Any], where: str) -> None:
        """Read one item, which is `where` in the request."""
        kind = item.get("type")
        if kind is None and "role" in item:
            kind = "message"
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                self.transcript.think(_reasoning(item, where))
            case "function_call":
                name, arguments = self._name(item, where), item.get("arguments") or "{}"
                self.transcript.call(_call_id(item, where), name, text_of(arguments, f"{where}.arguments"))
            case "custom_tool_call":
                arguments = json.dumps({"input": text_of(item.get("input"), f"{where}.input")})
                self.transcript.call(_call_id(item, where), self._name(item, where), arguments)
            case "local_shell_call":
                self.transcript.call(
                    _call_id(item, where), "local_shell", json.dumps(item.get("action") or {})
                )
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                output = _content(item.get("output"), f"{where}.output")
                self.transcript.answer(_call_id(item, where), output, f"{where}.call_id")
            case "item_reference":
                raise BadRequest(f"{where}: an item_reference cannot be found, because {KEPT_NOWHERE}", where)
            case str() if kind in NOT_READ:
                if kind not in self.left_out:
                    self.left_out.append(kind)
            case _:
                raise BadRequest(
                    f"{where}: items are of the types message, reasoning, function_call, "
                    "function_call_output, custom_tool_call and custom_tool_call_output, got "
                    f"{shown(kind)}.",
                    f"{where}.type",
                )

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            raise BadRequest(
                f"{where}.role is one of {', '.join(ROLES)}, got {shown(role)}.", f"{where}.role"
            )
        self.transcript.say(role, _content(item.get("content"), f"{where}.content"))

    def _name(self, item: Mapping[str, Any], where: str) -> str:
        return self._called(text_of(item.get("name"), f"{where}.name"), item.get("namespace"))


def _call_id(item: Mapping[str, Any], where: str) -> str:
    return text_of(item.get("call_id") or item.get("id"), f"{where}.call_id")


def _content(value: object, where: str) -> Content:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise BadRequest(f"{where} should be a string or a list of parts.", where)
    return [
        {"type": "text", "text": _part_text(part, f"{where}[{index}]")}
        for index, part in enumerate(objects_of(value, where))
    ]


def _part_text(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        raise BadRequest(
            f"{where}: parts of the type {shown(kind)} are not supported yet, only text is: input_text or "
            "output_text.",
            f"{where}.type",
        )
    field = "refusal" if kind == "refusal" else "text"
    return text_of(part.get(field), f"{where}.{field}")


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """The text of a reasoning item: what this server has sealed, else its content, else its summary."""
    if kept := unsealed(item.get("encrypted_content")):
        return kept
    for field in ("content", "summary"):
        parts = objects_of(item.get(field) or [], f"{where}.{field}")
        if parts:
            return "".join(_part_text(part, f"{where}.{field}[{index}]") for index, part in enumerate(parts))
    return ""
