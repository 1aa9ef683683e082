"""GET /openapi.json, the description of all routes, and GET /docs, which shows it in Swagger UI.

The package fastapi-swagger brings Swagger UI's files. Nothing is loaded from other hosts.
"""

from __future__ import annotations

import asyncio
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response

from server.errors import NotFound
from server.http.endpoint import Endpoint
from server.page.routes import FOLDER, INDEX_HEADERS, MEDIA_TYPES

router = APIRouter(route_class=Endpoint, tags=["page"], include_in_schema=False)

GROUPS = {
    "Chat": "Answers to conversations, in the APIs of OpenAI and Anthropic.",
    "Completions": "Texts that go on from a prompt.",
    "Embeddings and classification": "Vectors, labels and entities of texts, pictures and tokens.",
    "Scoring and reranking": "How well texts belong together.",
    "Decisions": "Typed questions about a text, answered with probabilities.",
    "Speech": "Recordings as text.",
    "Models": "What is served.",
    "Tokens": "Texts as tokens, and back.",
    "Files and batches": "Many requests in one file, answered when the server has time.",
    "Adapters": "LoRA adapters, loaded and unloaded while the server runs.",
    "Ollama": "Ollama's own API.",
    "llama.cpp": "The native API of llama.cpp's server.",
    "SGLang": "The native API of SGLang.",
    "text-embeddings-inference": "The native API of text-embeddings-inference.",
    "SageMaker": "What Amazon SageMaker asks of a container.",
    "Health and administration": "Signs of life, metrics, memory.",
    "Development": "Profiles and calls of the workers, with the options that allow them.",
}
"""The groups of routes, which are their tags, in the order in which the page shows them."""

_HERE = Path(__file__).parent / "docs"
_SWAGGER = Path(str(files("fastapi_swagger"))) / "resources"
_FILES = {
    path.name: path
    for path in (
        *(_SWAGGER / "swagger-ui-bundle.js", _SWAGGER / "swagger-ui.css"),
        *(_HERE / "start.js", _HERE / "style.css", FOLDER / "icon.svg"),
    )
}


def summarize(operation: dict[str, Any]) -> None:
    """Make the first sentence of an operation's description its summary."""
    text = operation.pop("description", "")
    sentence = re.match(r"(.+?)\.(?:\s+|$)(?![a-z])", text, re.DOTALL)
    if sentence is not None:
        operation["summary"] = " ".join(sentence[1].split())
        if rest := text[sentence.end() :]:
            operation["description"] = rest


class ApiDescription:
    """An application's description as JSON, for the requests that ask for it.

    It is made at the first request, in a thread: that takes half a second, for which the event loop would
    stand still.
    """

    def __init__(self) -> None:
        self._being_made = asyncio.Lock()
        self._made: bytes | None = None

    async def of(self, app: FastAPI) -> bytes:
        async with self._being_made:
            if self._made is None:
                self._made = await asyncio.to_thread(_describe, app)
        return self._made


def _describe(app: FastAPI) -> bytes:
    schema, config = dict(app.openapi()), app.state.config
    used = {tag for methods in schema["paths"].values() for one in methods.values() for tag in one["tags"]}
    schema["tags"] = [group for group in schema["tags"] if group["name"] in used]
    bodies = json.loads((_HERE / "examples.json").read_text("utf-8"))
    for path, body in bodies.items():
        if (methods := schema["paths"].get(path)) is not None:
            named = {**body, **({"model": config.model_names[0]} if "model" in body else {})}
            said = methods["post"].setdefault("requestBody", {"content": {"application/json": {}}})
            said["content"]["application/json"]["example"] = named
    if config.root_path:
        schema["servers"] = [{"url": config.root_path}]
    return json.dumps(schema, ensure_ascii=False).encode()


@router.get("/openapi.json")
async def tell_description(request: Request) -> Response:
    return Response(await request.app.state.description.of(request.app), media_type="application/json")


@router.api_route("/docs", methods=["GET", "HEAD"])
async def show_api_page() -> Response:
    return Response((_HERE / "index.html").read_bytes(), media_type="text/html", headers=INDEX_HEADERS)


@router.get("/docs/{name}")
async def api_page_file(name: str) -> Response:
    if (path := _FILES.get(name)) is None:
        raise NotFound("The page /docs has no such file; load it again.")
    return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix], headers=INDEX_HEADERS)
