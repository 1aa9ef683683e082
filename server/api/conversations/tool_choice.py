"""The field `tool_choice`: whether the answer calls tools, and which of them it may call."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, cast

import msgspec

from server.errors import BadRequest

Mode = Literal["none", "auto", "required"]


class ToolChoice(msgspec.Struct, frozen=True, gc=False):
    mode: Mode = "auto"
    names: tuple[str, ...] = ()
    """The tools that may be called; all, if none is named."""
    is_named: bool = False
    """Whether the answer is one call of the one tool."""

    def check(self, tools: Collection[str]) -> None:
        """Refuse a choice that cannot be made among these tools."""
        if not tools and (self.mode == "required" or self.names):
            raise BadRequest("When using `tool_choice`, `tools` must be set.", "tool_choice")
        if missing := [name for name in self.names if name not in tools]:
            raise BadRequest(
                f"tool_choice names {missing[0][:64]!r}, which is not one of `tools`.", "tool_choice"
            )

    def allows(self, name: str) -> bool:
        return self.mode != "none" and (not self.names or name in self.names)


def read_tool_choice(choice: object) -> ToolChoice:
    """What a client has sent, in OpenAI's form. Raises BadRequest, which says what there is."""
    match choice:
        case None:
            return ToolChoice()
        case "none" | "auto" | "required":
            return ToolChoice(cast("Mode", choice))
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)},
        }:
            names = [name for tool in tools if (name := _name_in(tool)) is not None]
            if len(names) < len(tools) or not names:
                raise BadRequest("Each of `allowed_tools` names a tool.", "tool_choice")
            return ToolChoice(cast("Mode", mode), tuple(names))
        case _ if (name := _name_in(choice)) is not None:
            return ToolChoice("required", (name,), is_named=True)
        case _:
            raise BadRequest(
                "tool_choice is one of none, auto, required, or names a tool, as in "
                '{"type": "function", "function": {"name": "..."}}, or several, as '
                '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}.',
                "tool_choice",
            )


def _name_in(tool: object) -> str | None:
    """The name in a tool that a choice refers to."""
    if not isinstance(tool, Mapping):
        return None
    described: Mapping[str, Any] = tool
    kind = described.get("type")
    if kind not in ("function", "custom"):
        return None
    inside = described.get(kind, described)
    name = inside.get("name") if isinstance(inside, Mapping) else None
    return name if isinstance(name, str) else None
