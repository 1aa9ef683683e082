"""GET /openapi.json, the description of all routes, and GET /docs: the same on one page, without scripts and
without other hosts. docs/api.md is made from the description, too.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response

from server.http.endpoint import Endpoint

router = APIRouter(route_class=Endpoint, tags=["page"], include_in_schema=False)

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin: 2.5rem 0 0; font-size: 1.1rem; overflow-wrap: anywhere }
h2 b { display: inline-block; min-width: 4rem; opacity: .7 }
nav { columns: 18rem } nav a { display: block }
code, h2, nav { font-family: ui-monospace, monospace }
table { border-collapse: collapse; width: 100%; font-size: .9rem }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-top: 1px solid #8884 }
td { overflow-wrap: anywhere }
"""


class ApiDescription:
    """An application's description, and its page, for the requests that ask for them.

    Both are made at the first request, in a thread: that takes half a second, for which the event loop would
    stand still.
    """

    def __init__(self) -> None:
        self._being_made = asyncio.Lock()
        self._made: tuple[bytes, str] | None = None

    async def of(self, app: FastAPI) -> tuple[bytes, str]:
        """Returns the description as JSON, and the page."""
        async with self._being_made:
            if self._made is None:
                self._made = await asyncio.to_thread(_describe, app)
        return self._made


def _describe(app: FastAPI) -> tuple[bytes, str]:
    schema = app.openapi()
    path: str = app.state.config.root_path
    whole = {**schema, "servers": [{"url": path}]} if path else schema
    return json.dumps(whole, ensure_ascii=False).encode(), api_page(schema)


async def _description(request: Request) -> tuple[bytes, str]:
    return await request.app.state.description.of(request.app)


@router.get("/openapi.json")
async def tell_description(request: Request) -> Response:
    return Response((await _description(request))[0], media_type="application/json")


@router.get("/docs")
async def show_api_page(request: Request) -> Response:
    return Response((await _description(request))[1], media_type="text/html", headers=_HEADERS)


def api_page(schema: dict[str, Any]) -> str:
    """The page, made of an OpenAPI description."""
    routes = list(operations(schema))
    links = "".join(f'<a href="#{_anchor(call)}">{escape(call)}</a>' for call, _ in routes)
    sections = "".join(_section(call, operation, schema) for call, operation in routes)
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}: HTTP API</title><style>{_STYLE}</style><h1>{title}: HTTP API</h1>"
        '<p>Programs read the same at <a href="openapi.json">openapi.json</a>.</p>'
        f"<nav>{links}</nav>{sections}</html>"
    )


def _section(call: str, operation: dict[str, Any], schema: dict[str, Any]) -> str:
    method, path = call.split()
    tables = "".join(_table(name, model) for name, model in body_models(operation, schema))
    return (
        f'<h2 id="{_anchor(call)}"><b>{method}</b>{escape(path)}</h2><p>{_text(about(operation))}</p>{tables}'
    )


def _table(name: str, model: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code><td>{escape(kind)}<td>{escape(default)}<td>{_text(meaning)}"
        for field, kind, default, meaning in fields_of(model)
    )
    return (
        f"<details><summary>Body: <code>{escape(name)}</code></summary>"
        f"<table><tr><th>Field<th>Type<th>Default<th>Meaning{rows}</table></details>"
    )


def _anchor(call: str) -> str:
    return re.sub(r"\W+", "-", call.lower()).strip("-")


def _text(text: str) -> str:
    """Escaped text, in which words between backticks are code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def operations(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each route as its method and path, and what is said of it."""
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def about(operation: dict[str, Any]) -> str:
    return operation.get("description") or operation["summary"]


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
