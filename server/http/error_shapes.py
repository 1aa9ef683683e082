"""The JSON of an error in the shape of the API that a path belongs to: OpenAI's, or Anthropic's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the supervisor, which is small, needs this module and not that one
    from server.errors import ApiError

ANTHROPIC = "/v1/messages"
"""The path of Anthropic's API, with which its others begin."""

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError, path: str) -> dict[str, object]:
    if path.startswith(ANTHROPIC):
        return anthropic_error(error.status, error.message)
    return error.body()


def anthropic_error(status: int, message: str) -> dict[str, object]:
    """An error as Anthropic's API says it. Whatever cannot be answered now is overloaded."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
