"""The executor that a configuration asks for, and the one for ranks that have processes of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import zmq
from msgspec.structs import replace

from engine_core.config import ProcessConfig
from engine_core.executor import Executor, ExecutorDead, InlineExecutor, MakeExecutor, ReportPhase
from engine_core.ranks.joint_executor import JointExecutor
from engine_core.ranks.layout import backend_of, rank_places
from engine_core.ranks.peers import OtherEngines, Peers
from engine_core.ranks.rank_groups import LocalRanks, RemoteRanks
from engine_core.ranks.ranks_disk import RanksDisk
from engine_core.ranks.ray_ranks import RayRanks
from engine_core.ranks.rendezvous import Rendezvous, meet
from engine_core.reason_codes import PHASES
from engine_core.wire.sockets import ClusterKeys
from worker.buffers import Bytes, Encoder
from worker.calls.messages import WorkerCall, WorkerReturn
from worker.config import Place, WorkerConfig
from worker.protocol import Bound, StepBounds, StepInput, StepOutput
from worker.ranks import channel
from worker.worker_facts import WorkerFacts

_WORD, _ID_BYTES = 32, 4  # bits of a word of a bound, bytes of a token's id
_LAG_MS = 300  # after the first message of a failure, those of other machines may still be on their way


class RankGroup(Protocol):
    """Some of the ranks of a model, all started and reached in one way. Frames pass through it unread."""

    def start(self, config: WorkerConfig, log_level: str) -> None: ...

    def register(self, poller: zmq.Poller) -> None:
        """Register what has to be awaited before the next call of `receive`, the end of a rank included."""
        ...

    def send(self, frames: Sequence[Bytes], later: Sequence[Bytes] | None = None) -> None:
        """Send the frames of a message to each rank; never waits.

        `later`: what ranks behind the first stage need of it, if that is less.
        """
        ...

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Each frame that has come, with its rank; never waits. The last frame of a rank is a RankFailed."""
        ...

    def host(self, rank: int) -> str:
        """The name of the rank's machine, for people; empty if the rank is not of this group, or here."""
        ...

    def stop(self, *, by_force: bool) -> None:
        """End all ranks; `by_force` at once, because some hang when others have ended."""
        ...


class RanksExecutor:
    """Every rank runs every step; only the first rank of the last stage returns outputs.

    It has no thread of its own: whoever waits for a step receives from all ranks meanwhile.
    """

    def __init__(
        self,
        config: WorkerConfig,
        report: ReportPhase,
        *,
        places: Sequence[Place],
        groups: Sequence[RankGroup],
        log_level: str,
    ) -> None:
        self._config = config
        self._groups = groups
        self._log_level = log_level
        self._ranks = {place.rank: _Rank(place) for place in places}
        self._has_stages = any(place.stage for place in places)
        self._report = report
        self._landed: dict[int, StepOutput | channel.StepFailed] = {}
        self._returned: dict[int, dict[int, WorkerReturn]] = {}
        """What ranks have returned of each call that is under way."""
        self._disk = RanksDisk(self._send, self._receive, len(places))
        self._dead: ExecutorDead | None = None
        self._idle_work = False
        self._preparing = False
        self._poller = zmq.Poller()
        self._encoder = Encoder()
        self._decoder = msgspec.msgpack.Decoder(channel.RankMessage)

    def start(self) -> WorkerFacts:
        for group in self._groups:
            group.start(self._config, self._log_level)
        while any(rank.facts is None for rank in self._ranks.values()):
            self._receive()
        facts = self._facts()
        self._idle_work = facts.has_idle_work
        return facts

    @property
    def store(self) -> RanksDisk | None:
        """The blocks of the cache that all ranks keep on disk, if they do."""
        return self._disk.opened()

    def submit(self, step: StepInput) -> _StepFuture:
        self.check()
        # The first stage alone encodes media, whose pixels are most of a step's bytes.
        later = self._encoder.encode(replace(step, encode=[])) if step.encode and self._has_stages else None
        self._send(step, later)
        return _StepFuture(self, step.number)

    def bind(self, bounds: StepBounds) -> None:
        if any(self._host(rank) for rank in self._ranks):
            bounds = shrunk(bounds, self._config.model.vocab_size)
        self._send(bounds)

    def idle(self, *, wait: bool = False) -> bool:
        if not self._preparing and self._idle_work:
            self._preparing = True
            self._send(channel.Prepare())
        is_preparing = self._preparing
        while wait and self._preparing:
            self._receive()
        return is_preparing

    def call(self, call: WorkerCall) -> _RanksReturn:
        self.check()
        self._returned[call.number] = {}
        self._send(call)
        return _RanksReturn(self, call.number)

    def wait_for_call(self, number: int) -> list[WorkerReturn]:
        """What each rank has returned of a call, in the order of ranks."""
        while not self.has_returned(number):
            self._receive()
        returned = self._returned.pop(number)
        return [returned[rank] for rank in sorted(returned)]

    def has_returned(self, number: int) -> bool:
        """Whether all ranks have returned of a call."""
        if len(self._returned[number]) < len(self._ranks):
            self._receive(timeout=0)
        return len(self._returned[number]) == len(self._ranks)

    def wait_for(self, number: int) -> StepOutput:
        """The output of a step, once it has landed."""
        while number not in self._landed:
            self._receive()
        landed = self._landed.pop(number)
        if isinstance(landed, channel.StepFailed):
            raise RuntimeError(landed.message)
        return landed

    def has(self, number: int) -> bool:
        if number not in self._landed:
            self._receive(timeout=0)
        return number in self._landed

    def register(self, poller: zmq.Poller) -> None:
        for group in self._groups:
            group.register(poller)

    def check(self) -> None:
        self._receive(timeout=0)

    def stop(self) -> None:
        groups, self._groups = self._groups, ()
        for group in groups:
            group.stop(by_force=self._dead is not None)
        if self._dead is None:
            self._dead = ExecutorDead("the workers have been stopped")

    def _send(self, message: channel.Order, later: Sequence[Bytes] | None = None) -> None:
        frames = self._encoder.encode(message)
        for group in self._groups:
            group.send(frames, later)

    def _receive(self, timeout: int | None = None) -> None:
        """Wait for messages of the ranks and handle them. Raises ExecutorDead if a rank has ended."""
        if self._dead is not None:
            raise self._dead
        self._wait(timeout)
        failed = self._handle()
        if failed:
            # The first rank to fail ends others, whose messages may come before its own: look again.
            self._wait(_LAG_MS if any(self._host(rank) for rank in failed) else 0)
            self._dead = self._death(self._handle() | failed)
            raise self._dead

    def _wait(self, timeout: int | None) -> None:
        self.register(self._poller)
        self._poller.poll(timeout)

    def _handle(self) -> dict[int, channel.RankFailed]:
        """Handle all messages that have come; returns the ranks that have ended."""
        failed: dict[int, channel.RankFailed] = {}
        for group in self._groups:
            for rank, frame in group.receive():
                message: channel.RankMessage = self._decoder.decode(frame)
                match message:
                    case StepOutput() | channel.StepFailed():
                        self._landed[message.number] = message
                    case channel.RankProgress(phase, fraction):
                        self._ranks[rank].phase, self._ranks[rank].fraction = phase, fraction
                        self._report_progress()
                    case channel.RankReady(facts):
                        self._ranks[rank].facts = facts
                    case WorkerReturn():
                        self._returned.setdefault(message.number, {})[rank] = message
                    case channel.DiskNews():
                        self._disk.hear(rank, message)
                    case channel.RankPrepared(left):
                        self._preparing, self._idle_work = False, left
                    case channel.RankFailed():
                        failed.setdefault(rank, message)  # its own message, if it sent one, comes first
        return failed

    def _report_progress(self) -> None:
        """Report the progress of the last rank as that of all."""
        last = min(self._ranks.values(), key=_Rank.progress)
        ahead = sum(rank.progress() > last.progress() for rank in self._ranks.values())
        detail = f"rank {last.place.rank} is behind {ahead} of {len(self._ranks) - 1} others" if ahead else ""
        self._report(last.phase, last.fraction, detail)

    def _death(self, failed: dict[int, channel.RankFailed]) -> ExecutorDead:
        """The error that names the rank to blame: one that sent no message, or else the first to fail.

        A rank that died without a message did so by itself; the others failed because it did.
        """
        rank, failure = min(failed.items(), key=lambda item: (not item[1].unreported, item[1].at))
        doing = PHASES["ready" if self._ranks[rank].facts else self._ranks[rank].phase]
        return ExecutorDead(f"{self._name(rank)} ended while {doing}: {failure.message}")

    def _name(self, rank: int) -> str:
        place = self._ranks[rank].place
        if place.size == 1:
            return "the worker"
        where = f"tensor {place.tensor_rank} of {place.tensor_size}, stage {place.stage} of {place.stages}"
        host = self._host(rank)
        return f"rank {rank} ({where}{f', on {host}' if host else ''})"

    def _host(self, rank: int) -> str:
        return "".join(group.host(rank) for group in self._groups)

    def _facts(self) -> WorkerFacts:
        """The facts of the rank that returns outputs, with the bytes that all ranks hold together, and the
        most that one of them takes of its card."""
        ranks = list(self._ranks.values())
        all_facts = [rank.facts for rank in ranks if rank.facts is not None]
        answering = next(
            rank.facts for rank in ranks if rank.place.returns_outputs and rank.facts is not None
        )
        return replace(
            answering,
            weight_bytes=sum(facts.weight_bytes for facts in all_facts),
            kv_bytes=sum(facts.kv_bytes for facts in all_facts),
            mapped_bytes=sum(facts.mapped_bytes for facts in all_facts),
            device_bytes=max(facts.device_bytes for facts in all_facts),
        )


@dataclass(slots=True)
class _Rank:
    """The state of one rank, as far as it has been reported."""

    place: Place
    phase: str = "import"
    fraction: float = 0.0
    facts: WorkerFacts | None = None

    def progress(self) -> tuple[int, float]:
        """The phase and the share of it that is done, as numbers that only grow."""
        return list(PHASES).index(self.phase), self.fraction


@dataclass(slots=True)
class _RanksReturn:
    executor: RanksExecutor
    number: int

    def done(self) -> bool:
        return self.executor.has_returned(self.number)

    def result(self) -> list[WorkerReturn]:
        return self.executor.wait_for_call(self.number)


@dataclass(slots=True)
class _StepFuture:
    executor: RanksExecutor
    number: int

    def done(self) -> bool:
        return self.executor.has(self.number)

    def result(self) -> StepOutput:
        return self.executor.wait_for(self.number)


def shrunk(bounds: StepBounds, vocab_size: int) -> StepBounds:
    """The same bounds, each in its smallest form, for ranks that a network lies before.

    Bits take a kilobyte for each 8,000 tokens and row, and every step has some. Mostly nearly all tokens may
    come, or nearly none, and then a few ids say the same.
    """
    rows = {slot: each and _smallest(each, vocab_size) for slot, each in bounds.rows.items()}
    guesses = {
        slot: [each and _smallest(each, vocab_size) for each in own] for slot, own in bounds.guesses.items()
    }
    return replace(bounds, rows=rows, guesses=guesses)


def _smallest(bound: Bound, vocab_size: int) -> Bound:
    bits = bound.data
    if bound.form != "bits" or len(bits) != _WORD // 8 * -(-vocab_size // _WORD):
        return bound
    allowed = int.from_bytes(bits, "little").bit_count()  # and bits beyond the vocabulary, at most
    if _ID_BYTES * min(allowed, vocab_size - allowed) >= len(bits):
        return bound
    words = np.frombuffer(bits, "<u4")
    if allowed <= vocab_size - allowed:
        return Bound("allowed", _ids(words, vocab_size))
    return Bound("forbidden", _ids(~words, vocab_size))


def _ids(words: np.ndarray, vocab_size: int) -> bytes:
    """The tokens whose bits are set, as int32."""
    places = np.flatnonzero(words)
    bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(-1, _WORD)
    rows, columns = bits.nonzero()
    ids = places[rows] * _WORD + columns
    return ids[ids < vocab_size].astype("<i4").tobytes()


def make_executor(process: ProcessConfig) -> MakeExecutor:
    """A function that makes the executor of this engine process, once the worker's options are known."""
    backend, shares_experts = backend_of(process), process.expert_replicas > 1

    def make(worker: WorkerConfig, report: ReportPhase) -> Executor:
        worker = replace(worker, run_folder=process.folder or "")
        if process.most_cache_bytes is not None:
            worker = replace(worker, most_cache_bytes=process.most_cache_bytes)
        met = meet(process, report) if shares_experts else Rendezvous()
        places = rank_places(process, met.rendezvous, met.address)
        if backend == "uni":
            return InlineExecutor(replace(worker, place=places[0]), report)
        groups, peers = _groups(process, backend, places, report), Peers(met.sockets)
        if shares_experts:
            groups.append(OtherEngines(peers))
        ranks = RanksExecutor(worker, report, places=places, groups=groups, log_level=process.log_level)
        if not shares_experts:
            return ranks
        return JointExecutor(ranks, process.index, peers)

    return make


def _groups(
    process: ProcessConfig, backend: str, places: list[Place], report: ReportPhase
) -> list[RankGroup]:
    config = process.engine
    if backend == "ray":
        return [RayRanks(config, places, report)]
    per_node = config.ranks // config.nnodes
    local = LocalRanks(places[:per_node], folder=process.folder, progress_page=process.progress_page)
    if config.nnodes == 1:
        return [local]
    keys = ClusterKeys.derive(config.cluster_key or "")
    nodes = {node: places[node * per_node : (node + 1) * per_node] for node in range(1, config.nnodes)}
    # Other machines come first: local ranks that wait for them would not report it.
    return [RemoteRanks(config.master_addr, config.master_port, keys, nodes, report), local]
