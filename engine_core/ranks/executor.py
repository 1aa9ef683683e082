"""The executor for a model whose ranks have processes of their own, on this machine or on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq
from msgspec.structs import replace

from engine_core.executor import ExecutorDead, ReportStage
from engine_core.protocol import STAGES
from engine_core.ranks.local import Crew
from worker.config import Place, WorkerConfig
from worker.protocol import StepInput, StepOutput, WorkerFacts
from worker.ranks.channel import RankFailed, RankMessage, RankProgress, RankReady, StepFailed

_LAG_MS = 300  # after the first word of a failure, those of other machines may still be under way


class RanksExecutor:
    """Every rank takes every step; the one whose place answers tells what came of it.

    No thread of its own: whoever waits for a step listens to all ranks meanwhile.
    """

    def __init__(
        self,
        config: WorkerConfig,
        report: ReportStage,
        *,
        places: Sequence[Place],
        crews: Sequence[Crew],
        log_level: str,
    ) -> None:
        self._config = config
        self._crews = crews
        self._log_level = log_level
        self._ranks = {place.rank: _Rank(place) for place in places}
        self._report = report
        self._landed: dict[int, StepOutput | StepFailed] = {}
        self._dead: ExecutorDead | None = None
        self._poller = zmq.Poller()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(RankMessage)

    def start(self) -> WorkerFacts:
        for crew in self._crews:
            crew.start(self._config, self._log_level)
        while any(rank.facts is None for rank in self._ranks.values()):
            self._listen()
        return self._facts()

    def submit(self, step: StepInput) -> _Step:
        self.check()
        frame = self._encoder.encode(step)
        for crew in self._crews:
            crew.send(frame)
        return _Step(self, step.number)

    def land(self, number: int) -> StepOutput:
        while number not in self._landed:
            self._listen()
        landed = self._landed.pop(number)
        if isinstance(landed, StepFailed):
            raise RuntimeError(landed.message)
        return landed

    @property
    def sentinels(self) -> list[int]:
        return [sentinel for crew in self._crews for sentinel in crew.sentinels]

    def check(self) -> None:
        self._listen(timeout=0)

    def stop(self) -> None:
        crews, self._crews = self._crews, ()
        for crew in crews:
            crew.stop(at_once=self._dead is not None)
        if self._dead is None:
            self._dead = ExecutorDead("the workers have been stopped")

    def _listen(self, timeout: int | None = None) -> None:
        """Take in what the ranks say, waiting for it if need be."""
        if self._dead is not None:
            raise self._dead
        self._wait(timeout)
        failed = self._hear()
        if failed:
            # Those that were lost by the first to fail may be heard before it: look again.
            self._wait(_LAG_MS if any(self._host(rank) for rank in failed) else 0)
            self._dead = self._death(self._hear() | failed)
            raise self._dead

    def _wait(self, timeout: int | None) -> None:
        for crew in self._crews:
            crew.register(self._poller)
        self._poller.poll(timeout)

    def _hear(self) -> dict[int, RankFailed]:
        """Returns the ranks that have ended."""
        failed: dict[int, RankFailed] = {}
        for crew in self._crews:
            for rank, frame in crew.news():
                says: RankMessage = self._decoder.decode(frame)
                match says:
                    case StepOutput() | StepFailed():
                        self._landed[says.number] = says
                    case RankProgress():
                        self._ranks[rank].stage, self._ranks[rank].fraction = says.phase, says.fraction
                        self._tell_progress()
                    case RankReady(facts):
                        self._ranks[rank].facts = facts
                    case RankFailed():
                        failed.setdefault(rank, says)  # its own word, if it had one, comes first
        return failed

    def _tell_progress(self) -> None:
        """All are as far as the last of them is."""
        last = min(self._ranks.values(), key=_Rank.advance)
        ahead = sum(rank.advance() > last.advance() for rank in self._ranks.values())
        detail = f"rank {last.place.rank} is behind {ahead} of {len(self._ranks) - 1} others" if ahead else ""
        self._report(last.stage, last.fraction, detail)

    def _death(self, failed: dict[int, RankFailed]) -> ExecutorDead:
        """Names the one that failed first. One that was silenced comes before those that felt its loss."""
        rank, failure = min(failed.items(), key=lambda item: (not item[1].unreported, item[1].at))
        doing = STAGES["ready" if self._ranks[rank].facts else self._ranks[rank].stage]
        return ExecutorDead(f"{self._name(rank)} ended while {doing}: {failure.message}")

    def _name(self, rank: int) -> str:
        place = self._ranks[rank].place
        if place.size == 1:
            return "the worker"
        where = f"tensor {place.tensor_rank} of {place.tensor_size}, stage {place.stage} of {place.stages}"
        host = self._host(rank)
        return f"rank {rank} ({where}{f', on {host}' if host else ''})"

    def _host(self, rank: int) -> str:
        return "".join(crew.where(rank) for crew in self._crews)

    def _facts(self) -> WorkerFacts:
        """Those of the rank that answers, with what all of them hold together."""
        ranks = list(self._ranks.values())
        all_facts = [rank.facts for rank in ranks if rank.facts is not None]
        answering = next(
            rank.facts for rank in ranks if rank.place.returns_outputs and rank.facts is not None
        )
        return replace(
            answering,
            weight_bytes=sum(facts.weight_bytes for facts in all_facts),
            kv_bytes=sum(facts.kv_bytes for facts in all_facts),
        )


@dataclass(slots=True)
class _Rank:
    """What is known of one of them."""

    place: Place
    stage: str = "import"
    fraction: float = 0.0
    facts: WorkerFacts | None = None

    def advance(self) -> tuple[int, float]:
        return list(STAGES).index(self.stage), self.fraction


class _Step:
    def __init__(self, executor: RanksExecutor, number: int) -> None:
        self._executor = executor
        self._number = number

    def result(self) -> StepOutput:
        return self._executor.land(self._number)
