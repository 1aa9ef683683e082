"""Messages between API servers and engines.

Every Add gets exactly one terminal answer: Tokens with a finish reason, Pooled, or Failed.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from worker.protocol import Pooling, Sampling, TokenLogprobs, Vectors, WorkerFacts

Finish = Literal["stop", "length", "abort"]


class Hello(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An engine's first frame on each of its two sockets. It names the engine and refuses mixed versions."""

    engine: int
    protocol: str


class Join(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Sent by a headless machine before it starts engines, to ask how many servers and replicas there are."""

    protocol: str


class Welcome(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The answer to Join."""

    protocol: str
    servers: int
    """The number of API servers, to each of which every engine connects."""
    replicas: int
    """The number of engines on all machines together."""
    local_replicas: int
    """The number of engines beside the API servers, which are the first ones."""


class Add(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    id: int
    """A number that the server has chosen, unique among its live requests."""
    tokens: list[int]
    params: Sampling | Pooling
    priority: int = 0
    """The lowest runs first, when the scheduling policy is "priority"."""
    salt: str = ""
    """Prefix-cache entries are shared only among requests of the same salt."""


class AddMany(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Several Adds in one frame, in order."""

    adds: list[Add]


class Abort(msgspec.Struct, frozen=True, tag=True, gc=False):
    ids: list[int]


class Drain(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An order to finish what runs and waits within `seconds`, to abort the rest, and to exit."""

    seconds: float


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True, gc=False):
    pass


Request = Add | AddMany | Abort | Drain | ResetPrefixCache
Greeting = Hello | Join


class Timing(msgspec.Struct, frozen=True, gc=False):
    """The times of a request in seconds, as the engine measured them."""

    queued: float
    prefill: float
    decode: float
    preemptions: int


class Tokens(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """New tokens of a request. The stop token itself is included, as the last one."""

    id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] | None = None
    """An entry for each prompt token but the first. It comes with the first tokens only."""
    cached: int = 0
    """The number of prompt tokens found in the prefix cache. It comes with the first tokens only."""
    finish: Finish | None = None
    timing: Timing | None = None
    """The times of the request, which come with the finish only."""


class Pooled(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """The only answer to a pooling request, unless it fails. An aborted one gets Failed."""

    id: int
    vectors: Vectors
    cached: int = 0
    """The number of prompt tokens found in the prefix cache."""
    timing: Timing | None = None


class Failed(msgspec.Struct, frozen=True, tag=True, gc=False):
    id: int
    code: int
    """An HTTP status: 400 for a request that cannot be run, 500 if it broke, 503 if it is refused now."""
    message: str


class Stats(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine's gauges and running totals, sent when they have changed, a few times a second at most."""

    running: int
    waiting: int
    kv_usage: float
    prefix_queries: int
    """The number of prompt tokens looked up in the prefix cache, in total."""
    prefix_hits: int
    preemptions: int
    steps: int
    step_tokens: int


PHASES = {
    "start": "starting",
    "download": "fetching the model",
    "import": "loading libraries",
    "weights": "loading weights",
    "cache": "allocating its cache",
    "warmup": "warming up",
    "ready": "serving",
}
"""The phases of an engine's life in order, each with what the engine is doing then."""


class Progress(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The progress of an engine's start: its phase, from download to warmup, and the share that is done."""

    phase: str
    """A key of PHASES."""
    fraction: float
    """The share of this phase that is done."""
    folder: str = ""
    """The checkpoint's folder, once it is known: the server loads its tokenizer from there."""
    detail: str = ""
    """Details for people, such as which of several workers is the last."""


class Ready(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Facts that a server must know to check requests, sent when the engine has done its first real steps."""

    model: str
    folder: str
    architecture: str
    vocab_size: int
    enable_prefix_caching: bool
    scheduling_policy: str
    worker: WorkerFacts


class Dead(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The reason why the engine ends. Nothing follows."""

    reason: str


class Leaving(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A notice that the engine ends. New requests, and those it refuses from now on, are for others."""


class Outputs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """The outputs of one step for one server, in one frame."""

    outputs: list[Tokens | Pooled | Failed]
    stats: Stats | None = None


Answer = Hello | Outputs | Stats | Progress | Ready | Leaving | Dead


def _digest() -> str:
    messages = [Request, Answer, Greeting, Welcome]
    schema = msgspec.json.encode(msgspec.json.schema_components(messages)[1], order="sorted")
    return hashlib.sha256(schema).hexdigest()[:16]


PROTOCOL = _digest()
"""A digest of all messages: a server and an engine whose digests differ refuse each other."""
