"""The JSON of an error in the shape of the API that a path belongs to: OpenAI's, or Anthropic's."""

from __future__ import annotations

from server.errors import ApiError, Overloaded

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
}


def error_body(error: ApiError, path: str) -> dict[str, object]:
    return anthropic_body(error) if path.startswith(ANTHROPIC) else error.body()


def anthropic_body(error: ApiError) -> dict[str, object]:
    """The error as Anthropic's API says it. The status of the answer stays ours: a full server is 503."""
    if isinstance(error, Overloaded):
        kind = "overloaded_error"
    else:
        kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
