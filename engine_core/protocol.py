"""What a server says to an engine, and what the engine answers.

Every Add gets exactly one terminal answer: Tokens with a finish reason, Pooled, or Failed.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from worker.protocol import Pooling, Sampling, TokenLogprobs, Vectors, WorkerFacts

Finish = Literal["stop", "length", "abort"]


class Hello(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An engine's first frame on each line to a server: makes it known and refuses mixed versions."""

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
    """Chosen by the server, unique among its live requests."""
    tokens: list[int]
    params: Sampling | Pooling
    priority: int = 0
    """Lower runs earlier, when the scheduling policy is "priority"."""
    salt: str = ""
    """Prefix-cache entries are shared only among requests of the same salt."""


class AddMany(msgspec.Struct, frozen=True, tag=True, gc=False):
    """As many Adds, one after the other, in one frame."""

    adds: list[Add]


class Abort(msgspec.Struct, frozen=True, tag=True, gc=False):
    ids: list[int]


class Drain(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Stop: finish what runs and waits if it can be done within `seconds`, abort the rest, then exit."""

    seconds: float


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True, gc=False):
    pass


Request = Add | AddMany | Abort | Drain | ResetPrefixCache
Greeting = Hello | Join


class Timing(msgspec.Struct, frozen=True, gc=False):
    """Seconds, as the engine saw them."""

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
    """With the first tokens only: one entry for each prompt token but the first."""
    cached: int = 0
    """With the first tokens only: prompt tokens found in the prefix cache."""
    finish: Finish | None = None
    timing: Timing | None = None
    """With the finish only."""


class Pooled(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """All that a pooling request gets, unless it fails. An aborted one is Failed."""

    id: int
    vectors: Vectors
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    timing: Timing | None = None


class Failed(msgspec.Struct, frozen=True, tag=True, gc=False):
    id: int
    code: int
    """An HTTP status: 400 the request cannot be run, 500 it broke, 503 the engine cannot take it now."""
    message: str


class Stats(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine's gauges and running totals. Sent when they changed, a few times a second at most."""

    running: int
    waiting: int
    kv_usage: float
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache, in total."""
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
    """How far an engine's start has come: a phase from download to warmup, and its share that is done."""

    phase: str
    """One of PHASES."""
    fraction: float
    """The share of this phase that is done."""
    folder: str = ""
    """The checkpoint's folder, once it is known: the server loads its tokenizer from there."""
    detail: str = ""
    """A word for people, such as which of several workers is the last."""


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
    """The engine ends for this reason. Nothing follows."""

    reason: str


class Leaving(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The engine finishes what it has and ends: new requests are for others, those it refuses too."""


class Outputs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """What one step gave the requests of one server: one frame a step."""

    outputs: list[Tokens | Pooled | Failed]
    stats: Stats | None = None


Answer = Hello | Outputs | Stats | Progress | Ready | Leaving | Dead


def _digest() -> str:
    said = [Request, Answer, Greeting, Welcome]
    schema = msgspec.json.encode(msgspec.json.schema_components(said)[1], order="sorted")
    return hashlib.sha256(schema).hexdigest()[:16]


PROTOCOL = _digest()
"""Changes when any message changes: a server and an engine of different versions refuse each other."""
