"""The executor of engines that share experts, with ranks in processes of their own, and what engines send."""

import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_worker import VOCAB, reference, text_after
from msgspec.structs import replace
from sizes import worker_config
from small_steps import follow, read
from toy_language import bound_of

from engine_core.config import EngineConfig, ProcessConfig
from engine_core.executor import ExecutorDead, OtherEngineDead
from engine_core.ranks.joint_executor import JointExecutor
from engine_core.ranks.layout import rank_places
from engine_core.ranks.peers import OtherEngines, Peers
from engine_core.ranks.rank_groups import LocalRanks
from engine_core.ranks.ranks_executor import RanksExecutor
from worker.protocol import StepBounds

Make = Callable[..., list[JointExecutor]]


@pytest.fixture
def make(tmp_path: Path, support_path: None) -> Iterator[Make]:
    made: list[JointExecutor] = []

    def make(ranks: int) -> list[JointExecutor]:
        """Two executors that have met, each with so many ranks."""
        ends = socket.socketpair()
        for index, end in enumerate(ends):
            end.setblocking(False)
            made.append(build(index, ranks, tmp_path, end))
            made[-1].start()
        return made

    yield make
    for executor in made:
        executor.stop()


def build(index: int, ranks: int, folder: Path, to_other: socket.socket) -> JointExecutor:
    own = folder / f"own-{index}"
    own.mkdir()
    peers = Peers({1 - index: to_other})
    places = rank_places(ProcessConfig(engine=EngineConfig(model="", tensor_parallel_size=ranks)))
    inner = RanksExecutor(
        worker_config(folder=str(own)),
        lambda phase, fraction, detail="": None,
        places=places,
        groups=[LocalRanks(places, "fake_rank"), OtherEngines(peers)],
        log_level="critical",
    )
    return JointExecutor(inner, index, peers)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_waits_for_all_engines_and_one_that_is_planned_ahead_runs_while_it_is_awaited(
    make: Make, ranks: int
) -> None:
    one, other = make(ranks)
    first, second = one.submit(read(1, [5, 6, 7]), 0.5), one.submit(follow(2, 3), 0.25)
    assert not first.done()
    other.receive()
    assert other.is_behind and other.slowest == 0.5
    empty, own = other.follow(), other.submit(read(1, [8]))
    other.receive()
    assert not other.is_behind
    assert first.result().tokens + second.result().tokens == reference([5, 6, 7], 2)
    landed = empty.result()
    assert (landed.number, landed.tokens) == (-1, [])
    assert own.result().tokens == reference([8], 1)


def test_bounds_that_are_told_before_their_step_may_run_follow_it(
    make: Make,
) -> None:
    one, other = make(2)
    bound = [replace(step, seqs=[replace(step.seqs[0], bound=True)]) for step in (read(1, [5]), follow(2, 1))]
    steps = [one.submit(step) for step in bound]
    one.bind(StepBounds(1, {0: bound_of([9], VOCAB, "bits")}))
    for _ in range(2):
        other.receive()
        other.follow()
    assert steps[0].result().tokens == [9]
    one.bind(StepBounds(2, {0: None}))
    assert steps[1].result().tokens == [text_after([5, 9])]


def test_a_step_begins_though_what_others_announced_was_read_on_the_way(make: Make) -> None:
    """No poll tells it any more: whoever asks whether the step is done has it begin."""
    one, other = make(1)
    step = one.submit(read(1, [5]))
    other.receive()
    other.follow()
    one.check()
    step.done()
    assert step.running is not None


def test_an_engine_whose_ranks_end_with_another_engine_names_that(
    make: Make,
) -> None:
    one, other = make(1)
    other.stop()
    with pytest.raises(ExecutorDead, match="engine 1, which shares experts with this one, has ended"):
        one.submit(read(1, [5]))


def test_one_that_ends_while_ranks_start_is_not_waited_for(tmp_path: Path, support_path: None) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.close()
    executor = build(0, 1, tmp_path, ours)
    with pytest.raises(OtherEngineDead, match="engine 1, which shares experts with this one, has ended"):
        executor.start()
    executor.stop()


# Messages.


Pair = tuple[Peers, socket.socket]
"""The peers of engine 0, and what engine 1 holds of the connection to it."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    peers = Peers({1: ours})
    yield peers, theirs
    peers.close()
    theirs.close()


def test_a_message_may_come_in_pieces(pair: Pair) -> None:
    peers, theirs = pair
    message = struct.pack("<qqd", 1, 7, 0.5) + struct.pack("<qqd", 2, 0, 0.25)
    for at in range(len(message)):
        theirs.send(message[at : at + 1])
        peers.receive()
        assert peers.announced == (at + 1) // 24
    assert [peers.take_round() for _ in range(3)] == [{1: 7}, {1: 0}, None]
    assert peers.slowest == 0.5
    for number in range(3, 11):
        theirs.send(struct.pack("<qqd", number, 1, 0.1))
    peers.receive()
    assert peers.slowest == 0.1, "what was slow is long over"


def test_rounds_out_of_order_are_an_error(pair: Pair) -> None:
    peers, theirs = pair
    theirs.send(struct.pack("<qqd", 2, 7, 0.0))
    with pytest.raises(ExecutorDead, match="engine 1 announced step 2 after 0"):
        peers.receive()


@pytest.mark.parametrize(("says", "leaves"), [(False, True), (True, False), (True, True)])
def test_only_who_leaves_with_this_engine_may_end(pair: Pair, says: bool, leaves: bool) -> None:
    peers, theirs = pair
    if leaves:
        peers.leave()
        theirs.recv(100)
    if says:
        theirs.send(struct.pack("<qqd", -1, 0, 0.0))
    theirs.close()
    if says and leaves:
        peers.receive()
        assert peers.all_leave
        return
    with pytest.raises(ExecutorDead, match="engine 1"):
        peers.receive()
