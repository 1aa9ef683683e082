"""What goes from stage to stage of a model that is cut into runs of layers.

The residual stream of each step goes to the next stage, and the tokens that the last stage samples go back
to the first, which embeds them in the next step of their sequences. Each rank talks to the rank with its own
place in the other stage. Nobody waits for a neighbour to take what is sent; the engine sees to it that a
sequence is in one step at a time, and that no more than `in_flight` steps are under way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.batch import Sampled
from worker.config import Place
from worker.protocol import StepInput, StepOutput
from worker.ranks.groups import Group, Links, Pending


@dataclass(frozen=True, slots=True)
class Unheard:
    """A step whose outcome another rank tells."""

    number: int

    def result(self) -> StepOutput:
        return StepOutput(self.number, tokens=[], logprobs=[], prompt_logprobs={})


@dataclass(frozen=True, slots=True)
class _Awaited:
    """Tokens that the last stage has sampled, or will."""

    rows: set[int]
    places: Tensor  # [R] in the table, flat


class Stage:
    def __init__(
        self,
        place: Place,
        links: Links,
        *,
        width: int,
        dtype: torch.dtype,
        target: torch.device,
        in_flight: int,
    ) -> None:
        """`width`, `dtype`: of the stream."""
        self.last = place.stage == place.stages - 1
        self._first = place.stage == 0
        self._place = place
        self._width, self._dtype, self._target = width, dtype, target
        self._in_flight = in_flight
        self._stream, self._tokens = links.stream, links.tokens
        self._awaited: deque[_Awaited] = deque()
        self._sent: deque[tuple[Pending, Tensor]] = deque()
        self._greet()

    def catch_up(self, step: StepInput, tokens: Tensor) -> None:
        """The first stage takes what was sampled, into the table `tokens`, before a step reads it there.

        A row that changes hands waits too, or late tokens would land in the text of its new sequence.
        """
        wanted = {seq.slot for seq in step.seqs} | {new.slot for new in step.new}
        while self._awaited and (
            len(self._awaited) >= self._in_flight
            or any(not wanted.isdisjoint(each.rows) for each in self._awaited)
        ):
            arrived = self._awaited.popleft()
            values = torch.empty(len(arrived.places), dtype=tokens.dtype, device=self._target)
            self._tokens.receive(values, self._place.stages - 1)
            tokens.view(-1)[arrived.places] = values

    def receive(self, count: int) -> Tensor | None:
        """The stream of `count` tokens [T, width] from the stage before; None if this is the first."""
        if self._first:
            return None
        stream = torch.empty(count, self._width, dtype=self._dtype, device=self._target)
        self._stream.receive(stream, self._place.stage - 1)
        return stream

    def pass_on(self, stream: Tensor, step: StepInput, sampled: Sampled | None) -> None:
        """To the next stage. The first one notes what will come back."""
        self._send(self._stream, stream.contiguous(), self._place.stage + 1)
        if self._first and sampled is not None:
            rows = {step.seqs[row].slot for row in sampled.rows}
            # A copy: what was staged for a step does not last until the step is over.
            self._awaited.append(_Awaited(rows, sampled.places.clone()))

    def tell(self, tokens: Tensor) -> None:
        """The last stage has sampled these."""
        self._send(self._tokens, tokens, 0)

    def _send(self, group: Group, x: Tensor, to: int) -> None:
        self._sent.append((group.send(x, to), x))
        if len(self._sent) > self._in_flight + 1:
            pending, _ = self._sent.popleft()
            pending.wait()  # its step is over: it has long arrived

    def _greet(self) -> None:
        """Something along every link: one that does not work is found now, and has its memory from now on."""
        word = torch.zeros(1, device=self._target)
        if not self._first:
            self._stream.receive(word, self._place.stage - 1)
        if self.last:
            self._tokens.send(word, 0).wait()
        else:
            self._stream.send(word, self._place.stage + 1).wait()
        if self._first:
            self._tokens.receive(word, self._place.stages - 1)
