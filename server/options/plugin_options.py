"""Options that name the operator's own code for the API processes (docs/plugins.md)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from worker.option_groups import PLUGINS
from worker.options import OptionDoc


class PluginOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Code of the operator's own that runs in the API processes. That of workers is an option of theirs."""

    middleware: Annotated[list[str], OptionDoc(PLUGINS, repeats=True)] = []
    """ASGI middleware that every request passes first, as module.Class or module.async_function."""
    stat_loggers: Annotated[list[str], OptionDoc(PLUGINS, repeats=True)] = []
    """Classes that are told every second how each engine does: names of installed ones (entry points of the
    group facet.stat_loggers), or module:Class."""
    tool_parser_plugin: Annotated[str | None, OptionDoc(PLUGINS)] = None
    """A Python file that registers ways to write tool calls, for --tool-call-parser to name."""
    reasoning_parser_plugin: Annotated[str | None, OptionDoc(PLUGINS)] = None
    """A Python file that registers markers of reasoning, for --reasoning-parser to name."""

    @property
    def parsers(self) -> dict[str, str]:
        """The files that register parsers, by the flags that name them."""
        named = {
            "--tool-parser-plugin": self.tool_parser_plugin,
            "--reasoning-parser-plugin": self.reasoning_parser_plugin,
        }
        return {flag: file for flag, file in named.items() if file is not None}
