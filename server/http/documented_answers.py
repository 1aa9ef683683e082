"""What /openapi.json says of answers beyond FastAPI's knowledge: streams, and errors as they really look."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from server.errors import ANTHROPIC


def _object(required: str, **fields: Any) -> dict[str, Any]:
    """The schema of an object with these fields, of which those named first are always there."""
    return {"type": "object", "required": required.split(), "properties": fields}


_TEXT = {"type": "string"}
_CODE = {"type": ["integer", "string", "null"]}
_ERROR = _object(
    "error",
    error=_object("message type", message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code=_CODE),
)
_ANTHROPIC_ERROR = _object(
    "type error", type={"const": "error"}, error=_object("type message", type=_TEXT, message=_TEXT)
)
_ERRORS = {
    "4XX": "The request is wrong, not allowed, too large, or more than the client's share.",
    "5XX": "The request cannot be answered now, or has failed; Retry-After says when to try again.",
}


class DocumentedApp(FastAPI):
    def openapi(self) -> dict[str, Any]:
        known = self.openapi_schema is not None
        schema = super().openapi()
        if not known:
            for path, methods in schema["paths"].items():
                error = _ANTHROPIC_ERROR if path.startswith(ANTHROPIC) else _ERROR
                for operation in methods.values():
                    _document(operation, error, schema["components"]["schemas"])
        return schema


def _document(operation: dict[str, Any], error: dict[str, Any], schemas: dict[str, Any]) -> None:
    answers = operation["responses"]
    answers.pop("422", None)  # errors of bodies are 400 here
    for status, description in _ERRORS.items():
        answers[status] = {"description": description, "content": {"application/json": {"schema": error}}}
    if _may_stream(operation, schemas):
        answers["200"]["content"]["text/event-stream"] = {}


def _may_stream(operation: dict[str, Any], schemas: dict[str, Any]) -> bool:
    """Whether the body has a field `stream`."""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = body.get("$ref", "").rpartition("/")[2]
    return "stream" in schemas.get(name, {}).get("properties", {})
