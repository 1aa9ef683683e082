"""The frames of messages, and what becomes of those that cannot be read."""

import pytest
import zmq
from fake_media import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from engine_core.protocol import Abort, AddRequest, AddRequests, Request
from engine_core.wire import transport
from engine_core.wire.transport import MAX_REQUEST_BYTES, Inbox, RequestTooLarge, frames_of
from worker.buffers import Decoder, Encoder
from worker.protocol import Sampling


def test_a_request_beyond_the_limit_is_refused_before_it_is_sent() -> None:
    with pytest.raises(RequestTooLarge, match=str(MAX_REQUEST_BYTES)):
        frames_of(Abort(ids=[2**62] * (MAX_REQUEST_BYTES // 9 + 1)), Encoder())


def test_too_many_bytes_of_media_are_refused_before_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_MEDIA_BYTES", 100)
    media = tuple(picture(bytes([at]), at, 1, pixels=bytes(60)) for at in range(2))
    with pytest.raises(RequestTooLarge, match="take 120 bytes when they are decoded; at most 100"):
        frames_of(AddRequest(id=1, tokens=[7] * 2, params=Sampling(max_tokens=1), media=media), Encoder())


WHOLE = Encoder().encode(
    AddRequests(
        [
            AddRequest(id=id, tokens=[1] * 9, params=Sampling(max_tokens=1), media=(picture(b"a", 0, 4),))
            for id in range(2)
        ]
    )
)
"""A message with two pictures, whose frames the fuzz test changes."""


class Sent:
    """A socket on which these messages have come."""

    def __init__(self, *messages: list[bytes]) -> None:
        self.messages = list(messages)

    def recv_multipart(self, *_: object, **__: object) -> list[zmq.Frame]:
        if not self.messages:
            raise zmq.Again
        return [zmq.Frame(frame) for frame in self.messages.pop(0)]


def inbox(*messages: list[bytes], head: int = 0) -> Inbox[Request]:
    return Inbox(Sent(*messages), Decoder[Request](Request), head=head)  # pyright: ignore[reportArgumentType]


WRONG = (WHOLE[:1], WHOLE[:2], [*WHOLE, b"more"], WHOLE[1:], [], [b""])


def test_a_message_whose_frames_are_lost_or_too_many_is_dropped() -> None:
    frames = [bytes(frame) for frame in WHOLE]
    assert len(frames) == 3
    box = inbox(*([bytes(frame) for frame in each] for each in WRONG), frames)
    assert [type(message) for message in box.read()] == [AddRequests]
    assert box.bad == len(WRONG)
    behind_name = inbox([b"engine-0", *frames], [b"engine-0"], head=1)
    assert [type(message) for message in behind_name.read()] == [AddRequests]
    assert behind_name.bad == 1


PARTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=9)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["type", "id", "tokens", "params", "media", "adds", "pixels"]), inner
        )
    ),
    max_leaves=12,
)
HEADS = st.binary(max_size=40) | PARTS.map(msgpack.encode)


@st.composite
def spoiled(draw: st.DrawFn) -> list[bytes]:
    """The frames of a good message with some bytes changed, cut away, or frames in other places."""
    frames = [bytearray(frame) for frame in WHOLE]
    for _ in range(draw(st.integers(1, 4))):
        frame = frames[draw(st.integers(0, len(frames) - 1))]
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        frame[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    order = draw(st.lists(st.integers(0, len(frames) - 1), max_size=4) | st.just([0, 1, 2]))
    return [bytes(frames[number]) for number in order]


@settings(deadline=None, max_examples=300)
@given(st.lists(spoiled() | st.lists(HEADS, max_size=3), max_size=3), st.integers(0, 1))
def test_no_message_ends_the_inbox(messages: list[list[bytes]], head: int) -> None:
    box = inbox(*messages, [b"name"] * head + [msgpack.encode(Abort(ids=[1]))], head=head)
    assert list(box.read())[-1] == Abort(ids=[1])
    assert box.bad <= len(messages)
