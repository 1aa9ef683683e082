"""What /openapi.json says of answers beyond FastAPI's knowledge: streams, and errors as they really look."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from server.errors import ANTHROPIC

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
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
