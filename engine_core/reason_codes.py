"""The reasons why requests are not served now: codes for clients, each with a sentence that tells no secrets.

What happened in detail is for the operator, and stands in the log. Below them are the reasons why no longer
prefix of a prompt was found in the cache.
"""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "loading",
    "engine_lost",
    "engine_killed",
    "engine_broke",
    "engine_stopped",
    "engine_stalled",
    "engine_given_up",
    "api_restarting",
    "api_stalled",
    "api_given_up",
    "too_slow",
    "draining",
    "asleep",
    "load_failed",
]

QUARANTINED = "request_quarantined"
"""The error of a request that makes the engine fail whenever it is computed."""

DEADLINE = "deadline_exceeded"
"""The error of a request that has waited, or has taken, longer than it may."""

TOO_LONG = "the request would take longer than it may even alone, as fast as the engine is now"
"""The message for a request that cannot be in time, however little else there is to do."""

SENTENCES: dict[Reason, str] = {
    "loading": "The model is still loading.",
    "engine_lost": "The connection to the engine has ended. The engine is started again.",
    "engine_killed": "The engine was ended by a signal. It is started again.",
    "engine_broke": "The engine broke. It is started again.",
    "engine_stopped": "The engine was asked to end. It is started again.",
    "engine_stalled": "The engine makes no progress. If that lasts, it is started again.",
    "engine_given_up": "The engine has ended and is not started again; the log says why.",
    "api_restarting": "The HTTP server is started again.",
    "api_stalled": "The HTTP server does not answer. If that lasts, it is started again.",
    "api_given_up": "The HTTP server has ended and is not started again; the log says why.",
    "too_slow": "The model did not compute a token in time.",
    "draining": "The server is shutting down. Try again later or on another instance.",
    "asleep": "The model is asleep and takes no requests until somebody wakes it (POST /wake_up).",
    "load_failed": "The model cannot be loaded; the server's log says why.",
}

PHASES = {
    "start": "starting",
    "download": "fetching the model",
    "import": "loading libraries",
    "weights": "loading weights",
    "cache": "allocating its cache",
    "warmup": "warming up",
    "ready": "serving",
    "asleep": "asleep",
}
"""The phases of an engine's life in order, each with what the engine is doing then."""
