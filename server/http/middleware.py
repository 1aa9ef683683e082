"""Middleware that every HTTP request passes before its route: metrics, ids, times, and the check of keys.

Plain ASGI, because it runs for every message of every answer.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access.client_identity import Caller
from server.access.keyring import OPERATOR, Access
from server.access.request_state import KEY, UNKNOWN, Attributes, Described, path_of, state_of
from server.errors import ApiError, Forbidden, Unauthorized
from server.http.error_answers import error_response, explain
from server.metrics.server_metrics import Metrics
from server.requests.timing import RequestTimes
from worker import logs

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})
"""The methods that metrics name; all others are counted together."""


def on_head(send: Send, act: Callable[[Message], None]) -> Send:
    """Makes a `send` that calls `act` with the message that begins the answer, which may change it."""

    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            act(message)
        await send(message)

    return watched


class HttpMetrics:
    """Counts and times each request by the path of its route, never by the path that the client wrote.

    It is the outermost of all: it gives back the places that a request has in the server, and answers if
    middleware fails.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, traces: Traces | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state, started = state_of(scope), time.monotonic()
        status, begun = 500, False

        def note_status(message: Message) -> Awaitable[None]:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
            return send(message)

        try:
            await self._app(scope, receive, note_status)
        except Exception as error:
            if not begun:
                await explain(Request(scope), error)(scope, receive, note_status)
            raise
        finally:
            state.release()
            handler = getattr(scope.get("route"), "path", "none")
            method, seconds = scope["method"], time.monotonic() - started
            self._metrics.http(handler, method if method in METHODS else "OTHER", status, seconds)
            if self._traces is not None and state.work is not None:
                self._traces.report(scope, state.work, state.times, seconds, status)
            del scope[KEY]  # a connection that stays open keeps the scope of its last request


class RequestIds:
    """Gives each answer an X-Request-Id: the client's own, if it is well-formed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        def add_id(head: Message) -> None:
            MutableHeaders(scope=head)["X-Request-Id"] = request_id

        await self._app(scope, receive, on_head(send, add_id))


class TimingHeaders:
    """Tells the times of each whole answer in headers of their own. A stream's head is sent before them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = state_of(scope)

        def add_times(head: Message) -> None:
            head["headers"] = [*head.get("headers", ()), *state.times.named_headers()]

        await self._app(scope, receive, on_head(send, add_times))


OPEN_PATHS = frozenset({"/live", "/health", "/ready", "/ping"})
"""Paths that are answered without a key: they tell only whether the server lives."""
PAGES = frozenset({"/", "/docs"})
"""Paths of pages, which anybody may read: they ask for the key. What is posted there needs one."""
PAGE_FOLDERS = ("/page/", "/docs/")
"""The beginnings of the paths of the pages' files, which anybody may read."""
DEEP = "deep"
"""The query parameter of /health with which it has the model compute a token."""
ADMIN_PATHS = frozenset(
    {"/metrics", "/load", "/live/events", "/openapi.json", "/server_info"}
    | {"/sleep", "/wake_up", "/reset_prefix_cache", "/reset_mm_cache", "/flush_cache", "/slots"}
    | {"/models/load", "/models/unload"}
    | {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    | {"/collective_rpc", "/pause", "/resume", "/is_paused", "/start_profile", "/stop_profile"}
    | {"/update_weights", "/update_weights_from_disk"}
)
"""Paths that a key of a file must be an administrator's for."""

KEY_NAME: ContextVar[str] = ContextVar("key_name")
"""The name of the key with which the request of this task came."""


class AccessLog:
    """Stands for the access logger of uvicorn: leaves some paths out, and names keys and clients without an
    address.

    A line costs a tenth of what a record costs, which is made only where the operator has handlers or filters
    of their own.
    """

    def __init__(self, quiet_paths: Collection[str] = ()) -> None:
        self._quiet_paths = quiet_paths
        self._logger = logging.getLogger("uvicorn.access")

    def info(self, form: str, client: str, method: str, path: str, version: str, status: int) -> None:
        """Log a request, as uvicorn calls its logger: with its own form, which is that of the line."""
        if path.partition("?")[0] in self._quiet_paths:
            return
        named = f"{client or 'unix'} {KEY_NAME.get('')}".rstrip()
        if not logs.write_info(self._logger, f'{named} - "{method} {path} HTTP/{version}" {status}'):
            self._logger.info(form, named, method, path, version, status)


def is_open(scope: Scope) -> bool:
    """Whether anybody may ask this: the page and signs of life, but no check that has the model compute."""
    query: bytes = scope.get("query_string", b"")
    path = path_of(scope)
    if path.startswith(PAGE_FOLDERS) or (path in PAGES and scope.get("method") in ("GET", "HEAD")):
        return True
    return path in OPEN_PATHS and not (query and DEEP in QueryParams(query))


class KeyCheck:
    """Refuses a request without a valid key, unless its path is open to all, and notes who sends others."""

    def __init__(self, app: ASGIApp, access: Access, names: Collection[str] = ()) -> None:
        """`names` are those of the only model; of several, requests tell later which they are for."""
        self._app = app
        self._access, self._names = access, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or is_open(scope):
            return await self._app(scope, receive, send)
        state = state_of(scope)
        caller = self._access.holder(scope) if state.caller is UNKNOWN else state.caller
        error = _refusal(scope, caller)
        if error is None and caller is not None and self._names:
            error, caller = _other_model(caller, self._names), caller.for_model(self._names)
        if error is not None:
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})
            return await error_response(error, path_of(scope))(scope, receive, send)
        if caller is None or caller is OPERATOR:
            return await self._app(scope, receive, send)
        state.caller = caller
        scope.setdefault("state", {})["key"] = caller.owner
        KEY_NAME.set(caller.owner)
        if (account := caller.account) is not None and account.has_quotas:

            def tell_quotas(head: Message) -> None:
                known = state.caller.account or account  # by now its model may be known
                head["headers"] = [*head.get("headers", ()), *known.headers()]

            send = on_head(send, tell_quotas)
        await self._app(scope, receive, send)


def _refusal(scope: Scope, caller: Caller | None) -> ApiError | None:
    if caller is None:
        return Unauthorized(
            "A valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key'."
        )
    if (key := caller.key) is None:
        return None
    if key.has_expired():
        return Unauthorized(f"The API key of {key.name} has expired: ask the operator for another one.")
    if path_of(scope) in ADMIN_PATHS and not key.admin:
        return Forbidden(f"The API key of {key.name} may not be used for this: it is for administrators.")
    return None


def _other_model(caller: Caller, names: Collection[str]) -> ApiError | None:
    """Why a client may not use the only model, if its key is for others."""
    if caller.key is None or caller.key.own_name(names) is not None:
        return None
    return Forbidden(
        f"The API key of {caller.owner} may not be used for {next(iter(names))}: it is for "
        f"{', '.join(caller.key.models or ()) or 'no model'}."
    )


_CONTEXT = ("traceparent", "tracestate")
"""The headers by which W3C Trace Context says which span a request belongs to."""


def _make_tracer(endpoint: str) -> Tracer:
    """A tracer that sends spans from a thread of its own, and what is left when the process ends.

    The service's name and more of the resource come from OpenTelemetry's own variables, such as
    OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, and so do headers for the collector.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "facet"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)))
    return provider.get_tracer("facet")


class Traces:
    """Makes the span of each request that had work for the engine when its answer has ended, in vLLM's words.

    It is there with --otlp-traces-endpoint only; without it nothing of OpenTelemetry is imported. No text of
    a request or an answer is in a span.
    """

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = _make_tracer(endpoint)
        self._kind, self._error = SpanKind.SERVER, Status(StatusCode.ERROR)
        self._extract = TraceContextTextMapPropagator().extract

    def report(self, scope: Scope, work: Described, times: RequestTimes, seconds: float, status: int) -> None:
        """Send the span of a request that has taken so many seconds until now."""
        began = time.time_ns() - round(1e9 * seconds)
        given = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        context = self._extract({name: given[name] for name in _CONTEXT if name in given})
        span = self._tracer.start_span("llm_request", context, self._kind, start_time=began)
        described = {**work.describe(), **_latencies(times)}
        span.set_attributes({name: value for name, value in described.items() if value is not None})
        span.set_attribute("http.route", getattr(scope.get("route"), "path", ""))
        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(self._error)
        span.end()


def _latencies(times: RequestTimes) -> Attributes:
    """The times of a request in seconds; those of the engine only if it has computed something."""
    whole = {"gen_ai.latency.e2e": time.monotonic() - times.started}
    if not times.steps:
        return whole
    return {
        **whole,
        "gen_ai.latency.time_to_first_token": times.first_token,
        "gen_ai.latency.time_in_queue": times.queued_time,
        "gen_ai.latency.time_in_model_prefill": times.prefill_time,
        "gen_ai.latency.time_in_model_decode": times.decode_time,
        "gen_ai.latency.time_in_model_inference": times.prefill_time + times.decode_time,
    }
