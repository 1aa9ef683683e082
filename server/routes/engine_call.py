"""A request to the engine while it is answered: what its head and body say, whether it generates or pools."""

from __future__ import annotations

import re
import secrets
import time

from fastapi import Request

from engine_core.client.in_flight import AddOptions
from engine_core.protocol import CacheMiss
from server.access.admission import Admission
from server.access.time_limits import limits_of
from server.api.shared_fields import RequestTerms, Usage, make_usage
from server.errors import BadRequest
from server.http.middleware import REQUEST_ID
from server.http.traces import Attributes
from server.requests.cache_diagnosis import CacheDiagnosis, MissedPrompt, explain_miss
from server.requests.timing import RequestTimes
from server.routes.request_context import config_of, frontend_of, header_of

REPLICA = b"x-data-parallel-rank"
"""The header that names the replica to use. vLLM has the same header with the same meaning."""
PRIORITIES = (b"x-priority", b"x-vllm-priority")
"""The headers that name the priority, in place of the body. vLLM has the second."""


class EngineCall:
    """What holds for all texts of a request, and what every part of its answer repeats."""

    def __init__(self, request: Request, terms: RequestTerms, prefix: str) -> None:
        """`prefix` begins the answer's id."""
        config = config_of(request)
        self.frontend = frontend_of(request)
        self.facts = self.frontend.facts
        self.id = prefix + _request_id(request, terms.request_id)
        self.created = int(time.time())
        self.model = self.facts.model_names[0]
        self.times: RequestTimes = request.scope["times"]
        self.wants_diagnosis = "cache_diagnosis" in terms.include
        """Whether the answer shall say why no longer prefixes were cached."""
        self._shows_timing = config.reports.enable_timing or "timing" in terms.include
        self._shows_cached = config.enable_prompt_tokens_details
        self._salt = terms.salt
        self._replica, self._priority = _replica(request), _priority(request, terms.priority)
        self._limits = limits_of(request, config.access, self.times.started, terms.timeout)

    def describe(self) -> Attributes:
        """What a trace tells of this request."""
        return {"gen_ai.request.id": self.id, "gen_ai.response.model": self.model}

    def _add_options(self, admission: Admission, *, begun: bool = False) -> AddOptions:
        """What the engine is told of each text. `begun` says that it has had some of them before."""
        options = admission.caller.add_options(self._priority, self._salt)
        if self._limits is not None:
            self._limits.add_to(options, begun=begun)
        if self.wants_diagnosis:
            options["diagnoses"] = True
        return options

    def _explain(self, asked: MissedPrompt, miss: CacheMiss, cached: int) -> CacheDiagnosis:
        """Why no longer prefix of a text was cached."""
        size = self.facts.ready.worker.block_size
        return explain_miss(asked, miss, cached, self.frontend.tokenizer, size)

    def _usage(self, prompt: int, output: int, cached: int, reasoning: int | None = None) -> Usage:
        return make_usage(prompt, output, cached if self._shows_cached else None, reasoning)

    def _timed(self, usage: Usage) -> Usage:
        """The usage with the times of the request, if they are asked for."""
        if self._shows_timing:
            usage.timing = self.times.report()
        return usage


def _request_id(request: Request, asked: str | None) -> str:
    """The request's id: the client's, or a random one."""
    for where, given in (("X-Request-Id", header_of(request, b"x-request-id")), ("request_id", asked)):
        if given is not None:
            if not REQUEST_ID.fullmatch(given):
                raise BadRequest(f"{where} must be 1 to 128 characters of A-Z a-z 0-9 . _ : -", where)
            return given
    return secrets.token_hex(16)


def _replica(request: Request) -> int | None:
    """The number of the replica that the client names in a header; None if it names none."""
    named = header_of(request, REPLICA)
    if named is None:
        return None
    size = config_of(request).data_parallel_size
    if not named.isdecimal() or int(named) >= size:
        header = "X-data-parallel-rank"
        raise BadRequest(f"{header}: {named[:20]!r} is no replica; they are numbered from 0 to {size - 1}")
    return int(named)


def _priority(request: Request, asked: int) -> int:
    """The priority that a header names, or else the one that the body asked for."""
    for name, value in request.scope["headers"]:
        if name in PRIORITIES:
            if re.fullmatch(b"-?[0-9]{1,18}", value):
                return int(value)
            header, named = name.decode(), value[:20].decode("latin-1")
            raise BadRequest(f"{header}: {named!r} is no whole number; lower ones run earlier", header)
    return asked
