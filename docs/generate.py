"""Writes docs/options.md and docs/api.md from the code; with --check, fails if they are out of date."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from server.app import openapi_schema
from server.options.reference import option_groups

HERE = Path(__file__).parent


def options_page() -> str:
    lines = ["# Options", "", "Made from the option table in `server/options/table.py` by `make docs`.", ""]
    for group, options in option_groups():
        lines += [f"## {group}", "", "| Flag | Default | Meaning |", "|---|---|---|"]
        lines += [f"| `{o.flags}` | {cell(o.default)} | {cell(o.help)} |" for o in options]
        lines.append("")
    return "\n".join(lines)


def api_page(schema: dict[str, Any]) -> str:
    lines = ["# HTTP API", "", "Made from the routes in `server/routes/` by `make docs`.", ""]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            about = operation.get("description") or operation["summary"]
            lines += [f"## {method.upper()} {path}", "", about, ""]
            if body := operation.get("requestBody"):
                form = body["content"]["application/json"]["schema"]
                lines += body_table(form, schema["components"]["schemas"])
    return "\n".join(lines)


def body_table(body: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    lines = []
    for name, model in bodies(body, schemas):
        lines += [f"`{name}`:", "", "| Field | Type | Default | Meaning |", "|---|---|---|---|"]
        required = model.get("required", [])
        for field, facts in model.get("properties", {}).items():
            default = "required" if field in required else f"`{json.dumps(facts.get('default'))}`"
            about = cell(facts.get("description", ""))
            lines.append(f"| `{field}` | {cell(kind(facts))} | {default} | {about} |")
        lines.append("")
    return lines


def bodies(body: dict[str, Any], schemas: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The one model of a body, or each of several it may be."""
    for option in body.get("anyOf") or body.get("oneOf") or [body]:
        if "$ref" in option:
            name = option["$ref"].rsplit("/", 1)[1]
            yield name, schemas[name]


def kind(facts: dict[str, Any]) -> str:
    if "anyOf" in facts:
        return " or ".join(kind(option) for option in facts["anyOf"])
    if "$ref" in facts:
        return facts["$ref"].rsplit("/", 1)[1]
    if "enum" in facts:
        return " or ".join(json.dumps(value) for value in facts["enum"])
    if "const" in facts:
        return json.dumps(facts["const"])
    if facts.get("type") == "array":
        return f"list of {kind(facts.get('items', {}))}"
    return facts.get("type", "any")


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    pages = {"options.md": options_page(), "api.md": api_page(openapi_schema())}
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
