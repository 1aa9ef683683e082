"""Writes docs/options.md, api.md, rooms.svg and the table of models in getting-started.md from the code; with
--check, fails if they are out of date."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from rooms_picture import picture

from server.options.foreign_options import LLAMA_FLAGS, OBEYED, PLUGINS, VLLM_FLAGS
from server.options.option_parsing import Option, VllmFlag, flag_of
from server.options.parse_server_options import OPTIONS
from server.run.app import openapi_schema
from server.terminal import suggestions

HERE = Path(__file__).parent

HELP_TEXT = (
    "`serve --help` shows the twenty that most people\nuse, `--help=all` all, `--help=scheduler` those of a "
    "group."
)
FLAGS_TEXT = (
    "They are accepted, so that start scripts keep working, and the log names those that were given in vain. "
    "Every other\nflag of vLLM is an option above, or is refused with a sentence; for llama.cpp's see "
    "[migrating.md](migrating.md#llamacpps-server)."
)
REFUSED_TEXT = "They are refused, and the sentence behind the name says why, or what to do instead."
VARIABLES_TEXT = (
    "These are obeyed by `serve`; all others have no meaning here. The log says at the start which "
    "of them are set.\n`FACET_` variables, the file and flags win over them."
)


def options_page() -> str:
    lines = ["# Options", "", "Made from `server/options/server_flags.py` by `make docs`. " + HELP_TEXT, ""]
    for group, options in groupby(OPTIONS, lambda option: option.doc.group):
        lines += [f"## {group}", "", "| Flag | Default | Meaning |", "|---|---|---|"]
        lines += map(option_row, options)
        lines.append("")
    idle = sorted(", ".join(each.flags) for each in [*VLLM_FLAGS, *LLAMA_FLAGS] if each.is_idle)
    lines += [
        "## Flags of vLLM and llama.cpp that change nothing",
        "",
        FLAGS_TEXT,
        "",
        ", ".join(f"`{flags}`" for flags in idle) + ".",
    ]
    lines += [
        "",
        "## Flags of vLLM that have another way",
        "",
        REFUSED_TEXT,
        "",
        "| Flag | Refusal |",
        "|---|---|",
    ]
    refused = [each for each in VLLM_FLAGS if each.instead != VllmFlag.instead]
    lines += [f"| `{', '.join(each.flags)}` | {cell(each.instead)} |" for each in refused]
    lines += ["", "## Variables of vLLM", "", VARIABLES_TEXT, "", "| Variable | Here |", "|---|---|"]
    lines += [f"| `{name}` | `{flag_of(field)}` |" for name, field in OBEYED.items()]
    lines.append(f"| `{PLUGINS}` | installed plug-ins that are called ([plugins.md](plugins.md)) |")
    return "\n".join([*lines, ""])


def option_row(option: Option) -> str:
    flags = ", ".join([*option.flags, *([f"--no-{option.flag[2:]}"] if option.is_switch else [])])
    return f"| `{flags}` | {cell(option.written_default)} | {cell(option.text)} |"


def api_page(schema: dict[str, Any]) -> str:
    lines = ["# HTTP API", "", "Made from the routes in `server/routes/` by `make docs`.", ""]
    sections: dict[tuple[str, str], list[str]] = {}
    for call, operation in operations(schema):
        method, path = call.split(" ", 1)
        sections.setdefault((method, operation_text(operation, schema)), []).append(path)
    for (method, text), paths in sections.items():
        lines += [f"## {method} {', '.join(paths)}", "", text]
    return "\n".join(lines)


def operation_text(operation: dict[str, Any], schema: dict[str, Any]) -> str:
    """Write what a request does, and the fields of its bodies: equal for paths that share an endpoint."""
    lines = [about(operation), ""]
    for name, model in body_models(operation, schema):
        lines += [f"`{name}`:", "", "| Field | Type | Default | Meaning |", "|---|---|---|---|"]
        for field, kind, default, meaning in fields_of(model):
            shown = default if default == "required" else f"`{default}`"
            lines.append(f"| `{field}` | {cell(kind)} | {shown} | {cell(meaning)} |")
        lines.append("")
    return "\n".join(lines)


def operations(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each route as its method and path, and what is said of it."""
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def about(operation: dict[str, Any]) -> str:
    return f"{operation['summary']}.\n\n{operation.get('description', '')}".rstrip()


def body_models(operation: dict[str, Any], schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The one model of a route's body by its name, or each of several it may be."""
    content = operation.get("requestBody", {}).get("content", {})
    if form := content.get("multipart/form-data"):
        yield form["schema"]["title"], form["schema"]
    if found := content.get("application/json"):
        body = found["schema"]
        for option in body.get("anyOf") or body.get("oneOf") or [body]:
            if "$ref" in option:
                name = option["$ref"].rsplit("/", 1)[1]
                yield name, schema["components"]["schemas"][name]


def fields_of(model: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Each field's name, type, default as JSON or the word required, and meaning."""
    required = model.get("required", [])
    for field, facts in model.get("properties", {}).items():
        default = "required" if field in required else json.dumps(facts.get("default"))
        yield field, kind_of(facts), default, facts.get("description", "")


def kind_of(facts: dict[str, Any]) -> str:
    """The type of a field in words."""
    if "anyOf" in facts:
        return " or ".join(kind_of(option) for option in facts["anyOf"])
    if "$ref" in facts:
        return facts["$ref"].rsplit("/", 1)[1]
    if "enum" in facts:
        return " or ".join(json.dumps(value) for value in facts["enum"])
    if "const" in facts:
        return json.dumps(facts["const"])
    if facts.get("type") == "array":
        return f"list of {kind_of(facts.get('items', {}))}"
    return facts.get("type", "any")


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def first_page() -> str:
    """The page for newcomers, with the table from machine to model below the line that announces it."""
    before, line, behind = (HERE / "getting-started.md").read_text().partition("<!-- made by make docs -->\n")
    _, gap, after = behind.partition("\n\n")
    return "".join([before, line, suggestions.table(), gap, after])


def main() -> int:
    pages = {
        "options.md": options_page(),
        "api.md": api_page(openapi_schema()),
        "rooms.svg": picture(),
        "getting-started.md": first_page(),
    }
    stale = [name for name, text in pages.items() if not same(HERE / name, text)]
    if "--check" in sys.argv[1:]:
        if stale:
            print(f"docs/{', docs/'.join(stale)}: not up to date; run `make docs`", file=sys.stderr)
        return bool(stale)
    for name in stale:
        (HERE / name).write_text(pages[name])
        print(f"wrote docs/{name}")
    return 0


def same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
