"""An engine of simulated time that replays known texts with guesses, in steps of single tokens only."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from model_facts import WORKER
from msgspec.structs import replace

from engine_core.features.speculation.speculator import Speculator
from engine_core.options.speculation_options import SpeculationOptions
from engine_core.protocol import AddRequest
from engine_core.scheduling.queue.shares import Owner
from engine_core.scheduling.sequence import Record, Sequence
from engine_core.scheduling.step_time_model import StepTime
from worker.protocol import Sampling

Text = tuple[list[int], list[int]]
"""A prompt, and the answer that is replayed."""

SMALL_BF16 = (6.6, 6.6, 6.9, 7.0, 7.0, 7.7, 8.0, 9.2, 9.6)
"""Milliseconds of a step by its rows, from 1 on, as a model of 135M parameters has taken on two cores."""
_EACH_MORE = 1.08


def small_bf16(rows: int) -> float:
    """The seconds of a step of so many rows."""
    more = max(0, rows - len(SMALL_BF16))
    return (SMALL_BF16[min(rows, len(SMALL_BF16)) - 1] + more * _EACH_MORE) / 1e3


def sequence(id: int, prompt: list[int], most: int = 1000, **asked: object) -> Sequence:
    """A sequence that has not begun to decode."""
    request = AddRequest(id, list(prompt), Sampling(max_tokens=most), **asked)  # pyright: ignore[reportArgumentType]
    return Sequence((0, id), request, (0, 0.0, id), len(prompt) + most, Owner(""), Record(0.0))


Forced = Callable[[Sequence], list[int]]


def none_forced(seq: Sequence) -> list[int]:
    raise AssertionError("no sequence is followed here")


def guesser(
    method: str = "ngram", most: int = 8, most_rows: int = 64, forced: Forced = none_forced, **options: object
) -> Speculator:
    """A guesser of a worker on a CPU, whose first line of costs is that of its warm-up."""
    given = SpeculationOptions(method=method, most=most, **options)  # pyright: ignore[reportArgumentType]
    line = StepTime([(1, 7e-3), (16, 17e-3)])
    return Speculator(given, replace(WORKER, most_rows=most_rows), line, forced)


@dataclass
class Replay:
    """Replays texts, so many at once, and counts what that took."""

    guesser: Speculator
    seconds_of: Callable[[int], float] = small_bf16
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    """What as many tokens take without guesses."""
    guessed: int = 0
    held: int = 0
    planned_ahead: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    """The steps in which so many tokens were guessed."""

    def run(self, texts: Ordered[Text], at_once: int = 1) -> Replay:
        waiting = [(id, prompt, answer) for id, (prompt, answer) in enumerate(texts) if len(answer) > 1]
        waiting.reverse()
        running: dict[Sequence, list[int]] = {}
        while waiting or running:
            while waiting and len(running) < at_once:
                id, prompt, answer = waiting.pop()
                seq = sequence(id, prompt, len(answer))
                seq.tokens.append(answer[0])
                self.guesser.enter(seq)
                running[seq] = prompt + answer
            self._step(running)
            for seq in [seq for seq, text in running.items() if len(seq.tokens) == len(text)]:
                self.guesser.leave(seq)
                del running[seq]
        return self

    def _step(self, running: dict[Sequence, list[int]]) -> None:
        seqs = list(running)
        pays = self.guesser.pays(seqs)
        self.planned_ahead += not pays
        drafts = self.guesser.choose(seqs, 64) if pays else {}
        rows = len(seqs) + sum(map(len, drafts.values()))
        takes = self.seconds_of(rows)
        reads = sum(len(seq.tokens) for seq in seqs)
        self.guesser.step_time.learn([1.0, rows, reads, rows, 0.0], takes, fills=False)
        self.seconds += takes
        self.steps += 1
        self.counts[rows - len(seqs)] = self.counts.get(rows - len(seqs), 0) + 1
        for seq, text in running.items():
            known, draft = len(seq.tokens), drafts.get(seq, [])
            held = 0
            while held < len(draft) and draft[held] == text[known + held]:
                held += 1
            seq.tokens += text[known : known + held + 1]
            if draft:
                self.guesser.landed(seq, len(draft), held)
            self.guesser.follow(seq, held + 1)
            self.guessed += len(draft)
            self.held += held
            self.tokens += held + 1
            self.plain_seconds += self.seconds_of(len(seqs)) * (held + 1) / len(seqs)

    @property
    def gain(self) -> float:
        """How many times as many tokens a second there were as without guesses."""
        return self.plain_seconds / self.seconds
