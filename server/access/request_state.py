"""The state of one request, from its head to the last byte of its answer: one object.

It lies in the ASGI scope under one key, and `state_of` returns it. Each field says who sets it, and when.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.types import Scope

from server.access.admission import Admission, Admissions
from server.access.client_identity import Caller, caller_at
from server.media.inline_files import InlineFiles
from server.media.media_cache import KeptItem
from server.media.prompt import NO_MEDIA, UNREAD, LaidMedia, MediaNeeded
from server.model_facts import Right
from server.requests.timing import RequestTimes

R = TypeVar("R")

KEY = "facet"
"""The key of the scope under which a request's state lies."""

UNKNOWN = Caller()
"""The client of a request of which nobody knows yet who sends it."""

Attributes = Mapping[str, str | int | float | None]
"""Names and values; None if nothing is known."""


class Described(Protocol):
    """Work for the engine that a trace can describe."""

    def describe(self) -> Attributes: ...


@dataclass(slots=True, eq=False)
class RequestState:
    """One request on its way. The fields stand in the order in which they are set."""

    times: RequestTimes = field(default_factory=RequestTimes)
    """The times of the request, from the making of this object, when its head has been read. Calls to the
    engine add to them; headers, usage and traces tell them."""
    follow_reader: Callable[[Callable[[bool], None]], None] | None = None
    """Tells a stream whether its client keeps up with reading. The connection sets it, of which there is none
    where the server asks itself."""
    caller: Caller = UNKNOWN
    """The client. The check of heads or that of keys sets it to the holder of the key that the request has,
    and whoever asks on behalf of an owner to that; the choice of a model narrows it to the quotas for that
    model. Where nobody has set it, the endpoint sets it to the client at the address."""
    keep_turn: Callable[[Any], None] | None = None
    """Takes the `Turn` that an answer adds to a conversation, in place of the database. Who asks on behalf
    of an owner sets it, and writes the turn together with the answer, so that it is added once."""
    admission: Admission | None = None
    """The places that the request has. The check of heads takes the first if it can, `admit` the
    others, and the outermost middleware gives all back."""
    frontend: Any = None
    """The `Frontend` of the model that the request is for. The choice of a model or an adapter sets it; else
    the endpoint sets it to what is served: the only model, or the set of several."""
    head: Mapping[bytes, bytes] = field(default_factory=dict)
    """The headers by names in small letters; of several with one name the first. The check of headers sets
    it, or else the endpoint."""
    sent: bytes | bytearray = b""
    """The body of a response as it came. The endpoint sets it when it has read the body."""
    continued: bytes | bytearray = b""
    """The body of a response with what it continues, as it may be kept and computed later. The endpoint sets
    it when it has read the body."""
    inline_files: InlineFiles | None = None
    """The files that were cut out of the body. The endpoint sets it, if the body may have media."""
    media_items: Mapping[bytes, KeptItem] = field(default_factory=dict)
    """The media that were prepared for the request, by their hashes. The reading of the body sets it."""
    reading: Any = None
    """The `Reading` of the body, in the dialect that is asked for. The endpoint sets it."""
    notes: Any = None
    """The `FieldNotes` of the body. The endpoint sets it when it begins to read one."""
    read: Any = None
    """What the helper process has read of a long body. The endpoint sets it."""
    work: Described | None = None
    """The request to the engine, for traces. It sets itself."""

    def arrive(self, scope: Scope) -> None:
        """Sets what nobody has set before the endpoint of the request is called."""
        if not self.head:
            self.head = dict(reversed(scope["headers"]))
        served = scope["app"].state
        if self.frontend is None:
            self.frontend = served.frontend
        if self.caller is UNKNOWN:
            by_address = served.config.access.fair_between == "addresses"
            found = self.admission
            self.caller = caller_at(scope, by_address=by_address) if found is None else found.caller

    def header(self, name: bytes) -> str | None:
        value = self.head.get(name)
        return None if value is None else value.decode("latin-1")

    def require_right(self, *rights: Right) -> None:
        """Raises Forbidden if the client's key may be used for none of these."""
        if self.caller.key is not None:
            self.caller.key.require(*rights)

    def admit(self, admissions: Admissions, places: int) -> Admission:
        """Lets the request in for so many sequences, or raises an error. The outermost middleware calls
        `release` at the end, or whoever has made this object `close`."""
        self.admission = admission = admissions.admit(self.caller, places, self.admission)
        admission.since = self.times.started
        return admission

    async def read_with_media(
        self,
        read: Callable[[LaidMedia], Awaitable[R]],
        watch: AbstractContextManager[object] = nullcontext(),
    ) -> R:
        """Reads the texts of the request, once more if they need media that have to be prepared first.
        `watch` is entered while these are prepared."""
        reader, inline = self.frontend.media, self.inline_files
        try:
            found = await read(NO_MEDIA)
        except MediaNeeded as needed:
            key = self.caller.owner if self.caller.key else ""
            with watch:
                items = await reader.prepare(needed, inline or InlineFiles(), key, self.caller.owner)
            self.media_items = {item.hash: item for item in items.values()}
            found = await read({**dict.fromkeys(needed.parts, UNREAD), **reader.lay(items)})
        if inline is not None:
            inline.check_taken()
        return found

    def release(self) -> None:
        """Gives back the places that the request has. Further calls do nothing."""
        if self.admission is not None:
            self.admission.release()

    def close(self) -> None:
        """Ends a request that did not come by HTTP, also if it was never sent."""
        self.release()
        self.work = None  # which knows this object, so that both would stay until they are looked for

    def count(self) -> None:
        """Counts the request against the quotas of the client's key. Raises QuotaExceeded beyond them."""
        if self.caller.account is not None:
            self.caller.account.begin_request()


def path_of(scope: Scope) -> str:
    """The path without the prefix that a proxy has added, as routes are written."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def state_of(scope: Scope) -> RequestState:
    """The state of the request with this scope, which is made here if the request did not come by one of our
    connections."""
    state: RequestState | None = scope.get(KEY)
    if state is None:
        state = scope[KEY] = RequestState()
    return state
