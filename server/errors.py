"""All errors that a client can see: one tree of classes, in the shape of the API that is asked.

    ApiError
    ├── BadRequest            400  the request itself is wrong
    ├── Unauthorized          401
    ├── Forbidden             403  the key is valid, but not for this
    ├── NotFound              404
    ├── TooLarge              413
    ├── Unprocessable         422  what the request refers to cannot be had
    ├── TooManyRequests       429  more than the client's share
    │   └── QuotaExceeded     429  more than its key may in a minute
    ├── Internal              500  ours
    │   └── Quarantined       500  the engine fails whenever it computes the request
    ├── Unavailable           503  not now: loading, draining or dead
    │   ├── NoEngine          503  no engine can answer any more
    │   ├── Overloaded        503  not now: the queue is full
    │   └── TooLate           503  it would have had to begin earlier
    ├── DeadlineExceeded      504  it has begun, and taken longer than it may
    └── HttpError             any  it breaks a rule of HTTP, or of this server's connections

Messages are written for clients: no paths, no addresses, no text of foreign exceptions.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from typing import Literal, cast

import msgspec

from engine_core.protocol import Failed
from engine_core.reason_codes import DEADLINE, QUARANTINED, SENTENCES, Reason

MAX_MESSAGE = 1000

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""The numbers of an OSError of a full disk, or of a disk quota that is used up."""

ANTHROPIC = "/v1/messages"
"""The path of Anthropic's API, with which its others begin."""

OLLAMA = "/api/"
"""The beginning of the paths of Ollama's API."""

SYSTEM_ONE = "/v1/systemone"
"""The path of TypeSafe's API."""

Api = Literal["openai", "anthropic", "ollama", "system_one", "cohere", "tei", "llama.cpp"]
"""An API that says errors in a shape of its own."""

_BY_START: dict[str, Api] = {ANTHROPIC: "anthropic", OLLAMA: "ollama", "/v2/": "cohere", "/cohere/": "cohere"}
_TEI = ("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode")
_LLAMA_CPP = ("/completion", "/completions", "/infill", "/embedding", "/apply-template", "/props", "/slots")
_BY_PATH: dict[str, Api] = {
    SYSTEM_ONE: "system_one",
    **dict.fromkeys(_TEI, "tei"),
    **dict.fromkeys(_LLAMA_CPP, "llama.cpp"),
}
_DIALECTS: dict[str, Api] = {"tei": "tei", "llama.cpp": "llama.cpp"}
"""Dialects of paths that several APIs share; errors of the others have the shape of the path."""

_TEI_STATUSES = {400: 413, 500: 424, 504: 424}
"""text-embeddings-inference's own statuses: what is wrong with a body is a 413."""

_LLAMA_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_ANTHROPIC_CODES = {"thread": "thread_unsupported_request"}
"""Codes of refused fields: by them Anthropic's clients know to send all messages, without the field."""


class ApiError(Exception):
    status = 500
    type = "InternalServerError"
    code: str | None = None
    """A name for programs; without one they get the status."""

    def __init__(self, message: str, param: str | None = None, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
        self.sentence = self.message
        """The message where an API has no place for more than a sentence."""
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, object]:
        code = self.code or self.status
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": code}}

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class BadRequest(ApiError):
    status = 400
    type = "BadRequestError"


@contextmanager
def for_programs() -> Iterator[None]:
    """Has a BadRequest of a program be a ValueError, too, as those of vLLM are. Those of HTTP cannot be:
    pydantic takes each ValueError for one of its own."""
    try:
        yield
    except BadRequest as error:
        error.__class__ = _value_error(type(error))
        raise


@cache
def _value_error(kind: type[BadRequest]) -> type[BadRequest]:
    """The same class as one of ValueErrors."""
    if issubclass(kind, ValueError):
        return kind
    return type(kind.__name__, (kind, ValueError), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class Unauthorized(ApiError):
    status = 401
    type = "AuthenticationError"

    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class Forbidden(ApiError):
    status = 403
    type = "PermissionDeniedError"


class NotFound(ApiError):
    status = 404
    type = "NotFoundError"


class TooLarge(ApiError):
    status = 413
    type = "RequestTooLargeError"


class Unprocessable(ApiError):
    status = 422
    type = "UnprocessableEntityError"


class TooManyRequests(ApiError):
    status = 429
    type = "TooManyRequestsError"
    code = "rate_limit_exceeded"


class QuotaExceeded(TooManyRequests):
    """As OpenAI answers: the type is the quota that is used up, `requests` or `tokens`."""

    def __init__(self, message: str, quota: str, *, retry_after: int) -> None:
        super().__init__(message, retry_after=retry_after)
        self.type = quota


class Internal(ApiError):
    pass


class Quarantined(Internal):
    type = QUARANTINED


class Unavailable(ApiError):
    status = 503
    type = "ServiceUnavailableError"

    def __init__(self, message: str, *, retry_after: int | None = None, reason: Reason | None = None) -> None:
        """`reason` becomes the type of the error, so that programs can tell one reason from another."""
        super().__init__(message, retry_after=retry_after)
        if reason is not None:
            self.type = reason


class HttpError(ApiError):
    """An error of which HTTP's own phrase says enough: no such path, a late request, an unreadable body."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        phrase = HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "")
        self.type = "BadRequestError" if status == 400 else phrase.removesuffix("Error") + "Error"
        self._headers = headers or {}

    def headers(self) -> dict[str, str]:
        return dict(self._headers)


class NoEngine(Unavailable):
    """Clients are told the reason by its code; `str()` of the error tells programs in this process all."""

    def __init__(self, detail: str, reason: Reason, retry_after: int | None = None) -> None:
        super().__init__(SENTENCES[reason], retry_after=retry_after, reason=reason)
        self.args = (detail,)


class Overloaded(Unavailable):
    type = "Service Unavailable"


class TooLate(Unavailable):
    type = DEADLINE


class DeadlineExceeded(ApiError):
    status = 504
    type = DEADLINE


def invalid(param: str, message: str, value: object) -> BadRequest:
    """The error for a refused value, in vLLM's form: the sentence, then the parameter and its value."""
    shown = repr(value) if isinstance(value, str) else str(value)
    if len(shown) > 200:
        shown = shown[:200] + "…"
    return BadRequest(f"{message} (parameter={param}, value={shown})", param)


def too_many(param: str, most: int, entries: str, got: int) -> BadRequest:
    """The error for a field with more entries than it may have."""
    return BadRequest(f"`{param}` may hold at most {most} {entries}, got {got}.", param)


def from_engine(failed: Failed, retry_after: int = 5) -> ApiError:
    """The error that a client sees when a request has failed."""
    if failed.code == 400:
        return BadRequest(failed.message)
    if failed.error == DEADLINE:
        message = f"{failed.message[0].upper()}{failed.message[1:]}."
        late = failed.code == 503
        return TooLate(message, retry_after=retry_after) if late else DeadlineExceeded(message)
    if failed.code == 503 and failed.error in SENTENCES:
        return NoEngine(failed.message, cast("Reason", failed.error), retry_after)
    if failed.code == 503:
        return Unavailable(failed.message, retry_after=retry_after)
    return Quarantined(failed.message) if failed.error == QUARANTINED else Internal(failed.message)


@contextmanager
def refused_if_full(message: str) -> Iterator[None]:
    """Turns the error of a full disk, or of a disk quota that is used up, into a 507 with this message."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise HttpError(507, message) from error


def api_of(path: str, dialect: str = "") -> Api:
    """The API in whose shape errors of a path are written, where bodies may be in this dialect."""
    if dialect in _DIALECTS:
        return _DIALECTS[dialect]
    for start, api in _BY_START.items():
        if path.startswith(start):
            return api
    return _BY_PATH.get(path, "openai")


def error_body(error: ApiError, path: str, dialect: str = "") -> dict[str, object]:
    """The JSON of an error in the shape of the API that a path, and a dialect there, belong to."""
    match api_of(path, dialect):
        case "openai":
            return error.body()
        case "anthropic":
            return anthropic_error(error.status, error.message, _ANTHROPIC_CODES.get(error.param or ""))
        case "ollama":
            return {"error": error.sentence}
        case "system_one":
            return system_one_error(error)
        case "cohere":
            return {"message": error.message}
        case "tei":
            kinds = {422: "Tokenizer", 424: "Backend", 429: "Overloaded", 503: "Unhealthy"}
            kind = kinds.get(status_at(error, path, dialect), "Validation")
            return {"error": error.message, "error_type": kind}
        case "llama.cpp":
            kind = _LLAMA_TYPES.get(
                error.status, "invalid_request_error" if error.status < 500 else "server_error"
            )
            return {"error": {"code": error.status, "message": error.message, "type": kind}}


def status_at(error: ApiError, path: str, dialect: str = "") -> int:
    """The status of an error in the API that a path, and a dialect there, belong to."""
    api = api_of(path, dialect)
    if api == "system_one" and error.status == 400:
        return 422
    if api != "tei":
        return error.status
    return 429 if isinstance(error, Overloaded) else _TEI_STATUSES.get(error.status, error.status)


def system_one_error(error: ApiError) -> dict[str, object]:
    """An error as TypeSafe's API says it: where a body is wrong, or what else went wrong."""
    if status_at(error, SYSTEM_ONE) != 422:
        kind = _ANTHROPIC_TYPES.get(
            error.status, "invalid_request_error" if error.status < 500 else "api_error"
        )
        return {"detail": {"error_type": kind, "message": error.message}}
    place = [error.param.removeprefix("body.")] if error.param and error.param != "body" else []
    return {"detail": [{"loc": ["body", *place], "msg": error.message, "type": "value_error"}]}


def anthropic_error(status: int, message: str, code: str | None = None) -> dict[str, object]:
    """An error as Anthropic's API says it. Whatever cannot be answered now is overloaded."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"details": {"error_code": code}} if code else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


class Status(msgspec.Struct, frozen=True):
    """The state of the server, in the words of its health routes."""

    state: Literal["ready", "loading", "restarting", "stalled", "draining", "asleep", "dead"]
    """While it is restarting or stalled, requests are let in, and wait for an engine that makes progress."""
    reason: Reason | Literal[""] = ""
    """Why it is not ready."""
    stage: str = ""
    """One of start, download, import, weights, cache, warmup; or tokenizer, while only that is missing."""
    fraction: float = 1.0
    """The part of this stage that is done, 0 to 1."""
    since: float = 0.0
    """The time at which requests began to wait, on the monotonic clock, if they do."""
    refuses: bool = False
    """Whether it takes no new requests. Until it does, load balancers have time to notice that it drains."""

    def raise_if_refused(self) -> None:
        """Raises Unavailable if requests are refused now."""
        if self.reason and self.refuses:
            message, seconds = SENTENCES[self.reason], 5 if self.state == "draining" else 10
            if self.state == "loading":
                stage = f"stage {self.stage}, {self.fraction:.0%}"
                message = f"The model is still loading ({stage}). GET /ready tells when it is done."
                seconds = 2
            raise Unavailable(message, retry_after=seconds, reason=self.reason)


READY = Status("ready")
ASLEEP = Status("asleep", "asleep", fraction=0.0, refuses=True)


def loading(stage: str, fraction: float) -> Status:
    return Status("loading", "loading", stage, fraction, refuses=True)


def refuse_for_sources(**fields: bool) -> None:
    """Refuses the first field that is asked for; all of them are about prompts that are continued."""
    if asked := [name for name, is_asked in fields.items() if is_asked]:
        raise BadRequest(
            f"{asked[0]}: this is an encoder-decoder model, whose answers do not continue the prompt. Leave "
            "the field out.",
            asked[0],
        )


def no_chats() -> BadRequest:
    """The error for a conversation with a model that reads sources."""
    return BadRequest(
        "This is an encoder-decoder model, which has no chats: POST /v1/completions with a text as `prompt`.",
        "messages",
    )
