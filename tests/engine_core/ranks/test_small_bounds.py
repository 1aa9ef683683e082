"""Bounds on their way through a network: the same tokens in fewer bytes."""

import socket
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
import zmq
from fake_worker import facts
from hypothesis import given
from hypothesis import strategies as st
from sizes import MODEL, worker_config
from toy_language import bound_of
from untimed import untimed

from engine_core.config import EngineConfig, ProcessConfig
from engine_core.ranks.layout import rank_places
from engine_core.ranks.ranks_executor import RanksExecutor, shrunk
from worker.buffers import Bytes
from worker.config import WorkerConfig
from worker.protocol import Bound, StepBounds
from worker.ranks.channel import RankReady
from worker.sampling.token_bounds import row_bits


def allowed(bound: Bound, vocab: int) -> list[int]:
    """The tokens that a worker would sample."""
    bits = row_bits(StepBounds(1, {0: bound}), {0: [0]}, vocab)
    assert bits is not None
    return np.flatnonzero(np.unpackbits(bits.words.view(np.uint8), bitorder="little")[:vocab]).tolist()


def smallest(bound: Bound, vocab: int) -> Bound:
    found = shrunk(StepBounds(1, {0: bound, 1: None}), vocab).rows
    assert found[1] is None and found[0] is not None
    return found[0]


@untimed()
@given(st.sets(st.integers(0, 999)), st.sampled_from([1000, 992, 2000]))
def test_the_same_tokens_may_come(ids: set[int], vocab: int) -> None:
    within = sorted(id for id in ids if id < vocab)
    bound = bound_of(within, vocab, "bits")
    assert allowed(smallest(bound, vocab), vocab) == within


def test_bounds_behind_guesses_are_small_too() -> None:
    few, most = bound_of([3], 1000, "bits"), bound_of(range(990), 1000, "bits")
    found = shrunk(StepBounds(1, {0: most, 4: None}, {0: [few, None, most]}), 1000)
    assert found.rows == {0: smallest(most, 1000), 4: None}
    assert found.guesses == {0: [smallest(few, 1000), None, smallest(most, 1000)]}


@pytest.mark.parametrize(
    ("count", "form"),
    [(3, "allowed"), (30, "allowed"), (500, "bits"), (980, "forbidden"), (1000, "forbidden")],
)
def test_it_is_the_smallest_form(count: int, form: str) -> None:
    bound = smallest(bound_of(range(count), 1000, "bits"), 1000)
    assert bound.form == form and len(bound.data) <= 128
    assert allowed(bound, 1000) == list(range(count))


def test_bits_beyond_the_vocabulary_are_no_tokens() -> None:
    for data in (b"\xff" * 128, b"\xfb" + b"\xff" * 127):
        bound = smallest(Bound("bits", data), 1000)
        assert bound.form == "forbidden"
        assert allowed(bound, 1000) == allowed(Bound("bits", data), 1000)


def test_what_is_no_whole_set_of_bits_stays_as_it_is() -> None:
    for bound in (
        Bound("bits", b"\xff" * 64),
        bound_of([1], 1000, "forbidden"),
        bound_of([1], 1000, "allowed"),
    ):
        assert smallest(bound, 1000) is bound


class Group:
    """Ranks that are ready at once, on this machine or on another."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.sent: list[bytes] = []
        self._readable, self._end = socket.socketpair()
        self._end.send(b"there is something to receive")
        self._said = [(0, msgspec.msgpack.encode(RankReady(facts())))]

    def start(self, config: WorkerConfig, log_level: str) -> None: ...

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._readable, zmq.POLLIN)

    def send(self, frames: Sequence[Bytes], later: Sequence[Bytes] | None = None) -> None:
        (frame,) = frames
        self.sent.append(bytes(frame))

    def receive(self) -> Iterator[tuple[int, bytes]]:
        said, self._said = self._said, []
        return iter(said)

    def host(self, rank: int) -> str:
        return self._host

    def stop(self, *, by_force: bool) -> None:
        self._readable.close()
        self._end.close()


@pytest.mark.parametrize(("host", "form"), [("", "bits"), ("node-2", "allowed")])
def test_only_a_network_gets_less(host: str, form: str) -> None:
    group = Group(host)
    executor = RanksExecutor(
        worker_config(),
        lambda *_, **__: None,
        places=rank_places(ProcessConfig(engine=EngineConfig(model=""))),
        groups=[group],
        log_level="critical",
    )
    executor.start()
    executor.bind(StepBounds(1, {0: bound_of([4], MODEL.vocab_size, "bits")}))
    executor.stop()
    [sent] = [msgspec.msgpack.decode(frame, type=StepBounds) for frame in group.sent]
    bound = sent.rows[0]
    assert bound is not None and bound.form == form and allowed(bound, MODEL.vocab_size) == [4]
