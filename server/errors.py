"""All errors that a client can see: one tree of classes, one JSON body, the shape of the OpenAI API.

    ApiError
    ├── BadRequest            400  the request itself is wrong
    ├── Unauthorized          401
    ├── NotFound              404
    ├── TooLarge              413
    ├── Internal              500  ours
    └── Unavailable           503  not now: loading, draining or dead
        └── Overloaded        503  not now: the queue is full

Messages are written for clients: no paths, no addresses, no text of foreign exceptions.
"""

from __future__ import annotations

MAX_MESSAGE = 1000


class ApiError(Exception):
    status = 500
    type = "InternalServerError"

    def __init__(self, message: str, param: str | None = None, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, object]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class BadRequest(ApiError):
    status = 400
    type = "BadRequestError"


class Unauthorized(ApiError):
    status = 401
    type = "AuthenticationError"

    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class NotFound(ApiError):
    status = 404
    type = "NotFoundError"


class TooLarge(ApiError):
    status = 413
    type = "RequestTooLargeError"


class Internal(ApiError):
    pass


class Unavailable(ApiError):
    status = 503
    type = "ServiceUnavailableError"


class Overloaded(Unavailable):
    type = "Service Unavailable"


def invalid(param: str, message: str, value: object) -> BadRequest:
    """The error for a refused value, in vLLM's form: the sentence, then the parameter and its value."""
    shown = repr(value) if isinstance(value, str) else str(value)
    if len(shown) > 200:
        shown = shown[:200] + "…"
    return BadRequest(f"{message} (parameter={param}, value={shown})", param)


def from_engine(code: int, message: str) -> ApiError:
    """The error that a client sees when the engine answers with Failed."""
    if code == 400:
        return BadRequest(message)
    if code == 503:
        return Unavailable(message, retry_after=5)
    return Internal(message)
