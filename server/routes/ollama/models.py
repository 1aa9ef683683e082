"""Ollama's routes on models: /api/tags, /api/show, /api/ps, /api/version, and /api/pull of what is served."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from server.access.request_state import path_of, state_of
from server.errors import HttpError
from server.frontend.frontend import Frontend
from server.frontend.many_models import ManyModels
from server.http.endpoint import Endpoint, require_ready
from server.http.sse import encode
from server.model_facts import GENERATE, TAG, Facts
from server.options.server_flags import ServerConfig
from server.output_parsing.format_detection import find_format
from server.routes.ollama.generating import NDJSON
from server.routes.request_context import config_of, frontend_of, server_of
from server.schemas.ollama.requests import OllamaPullRequest, OllamaShowRequest

router = APIRouter(route_class=Endpoint, tags=["Ollama"], dependencies=[Depends(require_ready)])

VERSION = "0.12.11"
"""The version of Ollama whose API this is: clients refuse servers that are too old for them."""
NEVER = "1970-01-01T00:00:00Z"
FOREVER = "9999-12-31T23:59:59Z"
_NO_DETAILS = {
    **dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), ""),
    "families": None,
}
"""What is told of a model that was never loaded. Clients in typed languages read no list that lacks one."""
_TYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
"""Ollama's names of number types, and their bytes."""


@router.head("/api/tags", include_in_schema=False)
@router.get("/api/tags")
async def list_models(request: Request) -> JSONResponse:
    """List the served models."""
    server = server_of(request)
    if not isinstance(server, ManyModels):
        adapters = [] if server.adapters is None else server.adapters.states
        names = [*server.facts.model_names, *(each.adapter.name for each in adapters)]
        return JSONResponse({"models": [_listed(name, server.facts) for name in names]})
    named = server.named(state_of(request.scope).caller)
    return JSONResponse(
        {
            "models": [
                _unknown(name) if state.facts is None else _listed(name, state.facts) for name, state in named
            ]
        }
    )


@router.get("/api/ps")
async def list_running(request: Request) -> JSONResponse:
    """List the loaded models and their memory. A single model stays loaded while the server runs."""
    server = server_of(request)
    if isinstance(server, ManyModels):
        allowed = dict.fromkeys(state for _, state in server.named(state_of(request.scope).caller))
        loaded = [state.slot.served for state in allowed if state.slot.served is not None]
    else:
        loaded = [server]
    return JSONResponse({"models": [_running(frontend.facts) for frontend in loaded]})


def _running(facts: Facts) -> dict[str, object]:
    size = facts.ready.worker.weight_bytes + facts.ready.worker.kv_bytes
    in_use = {
        "size": size,
        "size_vram": 0 if facts.ready.worker.device.startswith("cpu") else size,
        "context_length": facts.max_model_len,
        "expires_at": FOREVER,
    }
    return _listed(facts.model_names[0], facts) | in_use


@router.post("/api/show")
async def show(body: OllamaShowRequest, request: Request) -> JSONResponse:
    """Describe a model: its capabilities and context length."""
    frontend = frontend_of(request)
    frontend.check_model(body.model or body.name)
    facts = frontend.facts
    family, count, width = _family(facts), _parameters(facts), facts.ready.worker.widths.get("embed")
    info = {
        "general.architecture": family,
        "general.basename": facts.model_names[0],
        f"{family}.context_length": facts.max_model_len,
        **({} if count is None else {"general.parameter_count": count}),
        **({} if width is None else {f"{family}.embedding_length": width}),
    }
    shown: dict[str, object] = {
        "license": "",
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in facts.defaults.items()),
        "template": "",
        "details": _details(facts),
        "model_info": info,
        "capabilities": _capabilities(frontend, config_of(request)),
        "modified_at": _time(facts),
    }
    server = server_of(request)
    if isinstance(server, ManyModels):
        for state in server.states:
            if state.slot.served is frontend:
                state.shown = shown
    return JSONResponse(shown)


@router.head("/api/version", include_in_schema=False)
@router.get("/api/version")
async def show_version() -> JSONResponse:
    """Return the version of Ollama whose API this is."""
    return JSONResponse({"version": VERSION})


@router.post("/api/pull")
async def pull(body: OllamaPullRequest, request: Request) -> Response:
    """Succeed if the model is served, as its files are here then; models cannot be added by this."""
    name, server = body.model or body.name, server_of(request)
    if isinstance(server, ManyModels):
        server.find(name, state_of(request.scope).caller)
    else:
        server.check_model(name)
    if body.stream is False:
        return JSONResponse({"status": "success"})
    lines = (encode({"status": status}) + b"\n" for status in ("pulling manifest", "success"))
    return Response(b"".join(lines), media_type=NDJSON)


@router.post("/api/push")
@router.post("/api/create")
@router.post("/api/copy")
@router.delete("/api/delete")
async def refuse(request: Request) -> Response:
    """Answer 501: this server has the model that it was started with."""
    raise HttpError(
        501,
        f"{path_of(request.scope)} is not here: this server has the model that it was started with; "
        "`serve MODEL` starts another one.",
    )


def _tagged(name: str) -> str:
    return name if ":" in name else name + TAG


def _unknown(name: str) -> dict[str, object]:
    """What is told of a model that was never loaded."""
    tagged = _tagged(name)
    digest = hashlib.sha256(name.encode()).hexdigest()
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": NEVER,
        "size": 0,
        "digest": digest,
        "details": _NO_DETAILS,
    }


def _listed(name: str, facts: Facts) -> dict[str, object]:
    tagged, ready = _tagged(name), facts.ready
    told = f"{facts.root} {ready.architecture} {ready.worker.fingerprint}"
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _time(facts),
        "size": ready.worker.weight_bytes,
        "digest": hashlib.sha256(told.encode()).hexdigest(),
        "details": _details(facts),
    }


def _time(facts: Facts) -> str:
    return datetime.fromtimestamp(facts.created, UTC).isoformat()


def _family(facts: Facts) -> str:
    """The name of the model's kind, as its architecture has it."""
    return re.sub(r"(For[A-Z]|LMHead|Model).*", "", facts.ready.architecture).lower()


def _details(facts: Facts) -> dict[str, object]:
    family, count, level = _family(facts), _parameters(facts), facts.ready.quantization
    return {
        "parent_model": "",
        "format": "gguf" if "gguf" in (level or "").lower() else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "" if count is None else f"{count / 1e6:.1f}M",
        "quantization_level": level or _TYPES[facts.ready.worker.dtype][0],
    }


def _parameters(facts: Facts) -> int | None:
    """The number of weights; None of quantized ones, whose bytes do not tell it."""
    worker = facts.ready.worker
    return None if facts.ready.quantization else worker.weight_bytes // _TYPES[worker.dtype][1]


def _capabilities(frontend: Frontend, config: ServerConfig) -> list[str]:
    facts = frontend.facts
    format = find_format(frontend.tokenizer, config.tool_call_parser, config.reasoning_parser)
    generates = GENERATE in facts.tasks
    can = {
        "completion": generates,
        "tools": generates and format.dialect is not None,
        "thinking": generates and format.thinking is not None,
        "vision": facts.media is not None and "image" in facts.media.most,
        "embedding": "embed" in facts.tasks,
    }
    return [name for name, is_so in can.items() if is_so]
