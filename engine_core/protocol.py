"""Messages between API servers and engines.

Every Add gets exactly one terminal answer: Tokens with a finish reason, Pooled, or Failed.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from engine_core.adapters.messages import AdapterState, DropAdapter, LoadAdapter
from engine_core.engine_stats import GuessReport, Stats, Timing
from engine_core.prompt_media import Media
from engine_core.reason_codes import QUARANTINED
from worker.buffers import Buffer, schema_of_buffer
from worker.calls.messages import CallWorkers, Returned
from worker.protocol import Pooling, Sampling, TokenLogprobs, Vectors
from worker.worker_facts import WorkerFacts

Finish = Literal["stop", "length", "abort"]

ALONE_TOKENS = 4
"""The tokens after which a request that runs alone has passed the place at which an engine ended with it."""


class Hello(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An engine's first frame on each of its two sockets. It names the engine and refuses mixed versions."""

    engine: int
    protocol: str
    process: str = ""
    """A random name of its process: requests go to that one, and not to the next, unknown yet."""


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


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The language in which an answer, or a part of it, is written."""

    kind: Literal["json", "regex", "lark", "llguidance"]
    """The form of `text`: JSON schema, regular expression, llguidance's Lark, or its grammars in JSON."""
    text: str
    wakes: tuple[tuple[int, ...], ...] = ()
    """The grammar begins behind any of these sequences of tokens; if there are none, with the first token."""
    again: bool = False
    """Whether the grammar, when it is complete, waits for the next of `wakes`; otherwise the answer ends."""


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The thinking of an answer, which a marker closes; a grammar that sleeps does not wake in it."""

    budget: int | None
    """The tokens after which only those of the marker may come, one by one. None: no bound."""
    marker: tuple[int, ...]
    open: bool = False
    """Whether the answer begins within thinking, because the prompt has opened it."""
    opens: tuple[tuple[int, ...], ...] = ()
    """Thinking begins behind any of these sequences of tokens."""
    ends: tuple[tuple[int, ...], ...] = ()
    """What ends it beside the marker."""


class Spelling(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The bytes of all tokens, by which an engine follows grammars; sent before the first grammar."""

    tokens: list[bytes]
    """The bytes of each token as the server's own tokenizer writes them; of special tokens, their names."""
    special: list[int]
    """The tokens that are no text."""
    ends: list[int]
    """The tokens that end an answer."""
    tokenizer: str
    """The path of the tokenizer.json from which the server itself reads; empty if there is none."""


class Source(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The input of an encoder-decoder's encoder: tokens, or features of a recording."""

    hash: str
    """A digest of all that decides what the encoder gives. Equal sources are encoded once."""
    length: int
    """The positions that the encoder gives, to which the answer attends."""
    tokens: list[int] = []
    features: Buffer | None = None
    """Float32 or float16 values of a recording [bands, frames]; None: it has tokens."""


class AddRequest(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    id: int
    """A number that the server has chosen, unique among its live requests."""
    tokens: list[int]
    params: Sampling | Pooling
    priority: int = 0
    """The lowest runs first, when the scheduling policy is "priority"."""
    salt: str = ""
    """Prefix-cache entries are shared only among requests of the same salt."""
    group: int = 0
    """The call to which this prompt belongs, if it has many: others do not wait for all of them."""
    owner: str = ""
    """The name of those among whose requests the engine is divided; all without a name are one owner."""
    weight: float = 1.0
    """The owner's part, in proportion to those of others."""
    max_running: int = 0
    """The sequences of the owner that run at a time, if not 0."""
    wait: float = 0.0
    """The seconds from its arrival in which it must begin, if not 0."""
    budget: float = 0.0
    """The seconds from its arrival in which it must end, if not 0."""
    sent: float = 0.0
    """When it was sent, on the monotonic clock of a machine that the engine shares; 0 if it does not."""
    streams: bool = False
    """Whether somebody reads the tokens as they come, so that steps are kept short while it decodes."""
    times_each: bool = False
    """Whether every answer shall carry the times so far, because the server may end the text by itself."""
    prompt_len: int = 0
    """If not 0, tokens from here on are those of the answer that are known, and not emitted again."""
    began: float = 0.0
    """When the first of those tokens came, on the same clock as `sent`."""
    grammar: Grammar | None = None
    """The language of the answer, if it has one."""
    thinking: Thinking | None = None
    alone: bool = False
    """Whether it runs alone until it has ALONE_TOKENS more tokens, because engines have ended with it."""
    media: tuple[Media, ...] = ()
    """The media of the prompt, in the order of their positions, which do not overlap."""
    source: Source | None = None
    """What the encoder reads, if the model has one."""
    most_guesses: int | None = None
    """The most tokens that are guessed for it at a time, if that is fewer than the engine would."""
    reports_guesses: bool = False
    """Whether its last answer shall tell what became of guesses."""
    adapter: str = ""
    """The digest of the adapter that computes it; "" is the model alone."""
    shared: tuple[int, ...] = ()
    """The lengths of beginnings, the shortest first, that later prompts find to their last tokens."""


class AddRequests(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Several Adds in one frame, in order."""

    adds: list[AddRequest]


class Abort(msgspec.Struct, frozen=True, tag=True, gc=False):
    ids: list[int]


class Pause(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A notice that these answers are not read, so that nothing is computed for them until `Resume`."""

    ids: list[int]


class Resume(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A notice that these answers, which were paused, are read again."""

    ids: list[int]


class Drain(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An order to finish what runs and waits within `seconds`, to abort the rest, and to exit."""

    seconds: float


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True, gc=False):
    pass


class AskStanding(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A question how far a request has come, to which `Standing` is the answer if it is still there."""

    id: int


PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of requests that are there when all are paused: they end, are finished, or stand still."""


class PauseAll(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An order to plan no more steps until `ResumeAll`, once what the mode says is done. Requests that come
    meanwhile wait."""

    mode: PauseMode
    clear_cache: bool = True
    """Whether prefixes are forgotten then, unless requests stand still."""


class ResumeAll(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An order to plan steps again."""


class UpdateWeights(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An order to compute with the weights of a folder from now on, which `WeightsUpdated` answers."""

    folder: str
    kind: Literal["check", "load", "catch_up", "give_up"]
    """Whether the engine only says if they fit, loads them, or loads them unless it has them already.

    From a check that finds that they fit, until it has loaded them or the server gives up, it refuses orders
    of other servers."""
    abort: bool = False
    """Whether what runs is ended before they are loaded."""
    number: int = 0
    """What tells the answer from those to other orders of the same server."""


class Sleep(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An order to give weights and cache back once nothing runs, or to load them again if `level` is 0."""

    level: int
    abort: bool = False
    """Whether what runs is ended, and not waited for."""


Loads = UpdateWeights | Sleep | LoadAdapter | DropAdapter
Orders = Drain | ResetPrefixCache | PauseAll | ResumeAll | Loads | CallWorkers
Request = Spelling | AddRequest | AddRequests | Abort | Pause | Resume | AskStanding | Orders
Greeting = Hello | Join


class Admitted(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A notice that a streamed request is accepted but will wait a while; others get none."""

    id: int
    expected: float
    """The seconds from its arrival in which its first token, or its vector, is expected."""


class RunsAlone(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A notice that a request that is to run alone (`AddRequest.alone`) runs from now on."""

    id: int


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
    """The times of the request, which come with the finish, or with each answer if `times_each` asks."""
    expected: float | None = None
    """The seconds in which the first token was expected, at arrival. It comes with the first tokens only."""
    guesses: GuessReport | None = None
    """What became of guesses, if asked for. It comes with the times."""


class Pooled(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """The only answer to a pooling request, unless it fails. An aborted one gets Failed."""

    id: int
    vectors: Vectors
    cached: int = 0
    """The number of prompt tokens found in the prefix cache."""
    timing: Timing | None = None
    expected: float | None = None
    """The seconds in which it was expected, at arrival."""


class Failed(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    id: int
    code: int
    """An HTTP status: 400 if it cannot be run, 500 if it broke, 503 if it is refused now, 504 if too late."""
    message: str
    error: str = ""
    """A name of the error for programs, if it has one: QUARANTINED, DEADLINE, or a code of `reasons`."""


def quarantined(id: int) -> Failed:
    """The answer to a request that makes the engine fail whenever it is computed."""
    message = "the engine fails whenever it computes this request: change it, or report the failure"
    return Failed(id, 500, message, QUARANTINED)


def lacks_memory(id: int) -> Failed:
    """The answer to a request that does not fit into memory, though it is computed alone."""
    return Failed(id, 503, "there is too little memory for this request now")


class Progress(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The progress of an engine's start, or the news that it is asleep: its phase, and the share done."""

    phase: str
    """A key of `reason_codes.PHASES`."""
    fraction: float
    """The share of this phase that is done."""
    folder: str = ""
    """The checkpoint's folder, once it is known: the server loads its tokenizer from there."""
    detail: str = ""
    """Details for people: which of several workers is the last, or why it cannot wake."""


class Ready(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Facts that a server must know to check requests, sent when the engine has done its first real steps."""

    model: str
    folder: str
    architecture: str
    vocab_size: int
    enable_prefix_caching: bool
    scheduling_policy: str
    worker: WorkerFacts
    quantization: str | None = None
    """What the weights are, for people, if they are quantized."""
    weights: str = ""
    """The folder whose weights it computes with, if they are not those of its start."""
    start_seconds: float = 0.0
    """The time from the start of its process to this message, without that of downloads."""


class Dead(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The reason why the engine ends. Nothing follows."""

    reason: str
    with_another: bool = False
    """Whether it ends because another one has with which it shares experts."""


class Leaving(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A notice that the engine ends. New requests, and those it refuses from now on, are for others."""


class AllPaused(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The news that an engine plans no more steps, and none is under way; or that it plans them again."""

    paused: bool


class WeightsUpdated(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The answer to `UpdateWeights`, to who has ordered it. To all, `Ready` tells what has changed."""

    problem: str
    """Why the weights are those from before; empty if they are the new ones, or would be."""
    number: int
    """The number of the order that it answers."""
    is_taken: bool = False
    """Whether another server has ordered weights before, which are not loaded yet."""


class Standing(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The answer to `AskStanding`: how far a request has come."""

    id: int
    ahead: int
    """About how many get their turn before it; -1 if it waits no more."""
    read: int
    """The tokens that are computed, of `known` ones. But for the last one they are before an answer comes."""
    known: int


Output = Admitted | RunsAlone | Standing | Tokens | Pooled | Failed
OutputsByClient = dict[int, list[Output]]
"""Outputs by the number of the server that gets them."""


class Outputs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """The outputs of one step for one server, in one frame."""

    outputs: list[Output]
    stats: Stats | None = None


News = Progress | Ready | AdapterState | AllPaused | Leaving | Dead
Answer = Hello | Outputs | Stats | Returned | WeightsUpdated | News


def _digest() -> str:
    found = msgspec.json.schema_components([Request, Answer, Greeting, Welcome], schema_hook=schema_of_buffer)
    return hashlib.sha256(msgspec.json.encode(found[1], order="sorted")).hexdigest()[:16]


PROTOCOL = _digest()
"""A digest of all messages: a server and an engine whose digests differ refuse each other."""
