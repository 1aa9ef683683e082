"""The tensors that go between the stages of a model that is cut into runs of layers.

The residual stream of each step goes to the next stage, and the tokens that the last stage samples go back to
the first, or to all that are before it if these keep states, which go on by guesses that hold. Each rank
exchanges with the rank of the same number in the other stage, and waits for nobody to take what it sends. The
engine has a sequence in one step at a time, and at most `in_flight` steps under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.parallel.parallel import Exchange
from worker.config import Place
from worker.protocol import SeqStep, StepInput, StepOutput
from worker.ranks.process_groups import Group, Links
from worker.sampling.sampler import SampleTargets


@dataclass(frozen=True, slots=True)
class SilentStep:
    """A step whose output another rank returns."""

    number: int

    def result(self) -> StepOutput:
        return StepOutput(self.number, tokens=[], logprobs=[], prompt_logprobs={})


@dataclass(frozen=True, slots=True)
class _AwaitedTokens:
    """Tokens that the last stage has sampled, or will."""

    places: set[int]
    """What no other step may read or write before they are here, as `_places_of` names it."""
    flat: Tensor  # [R] flat indices in the table of tokens
    landed: Callable[[], None] | None
    """What is done when they are in the table."""


class Stage:
    """This rank's pipeline stage, and its exchange with the others."""

    def __init__(self, place: Place, links: Links, stream: Tensor, in_flight: int) -> None:
        """`stream` [0, width]: an empty residual stream, of the type and on the device of all."""
        self.width = stream.shape[1]
        """The numbers of a token in the stream, which may be more once the model is known."""
        self.last = place.stage == place.stages - 1
        self._first = place.stage == 0
        self._told: Sequence[int] = (0,)
        """The stages that get sampled tokens."""
        self._place, self._no_stream, self._in_flight = place, stream, in_flight
        self._stream, self._tokens = links.stream, links.tokens
        self._awaited: deque[_AwaitedTokens] = deque()
        self._sent: deque[tuple[Exchange, Tensor]] = deque()
        self._try_links()

    def tell_all(self) -> None:
        """Send sampled tokens to all stages before the last one."""
        self._told = range(self._place.stages - 1)

    def receive_tokens(self, step: StepInput, tokens: Tensor) -> None:
        """On stages that get sampled tokens, write them into the table `tokens` before `step` needs them.

        A slot that gets a new sequence waits too, or late tokens would be written over the new text.
        """
        places = {new.slot for new in step.new}.union(*map(_places_of, step.seqs))
        while self._awaited and (
            len(self._awaited) >= self._in_flight
            or any(not places.isdisjoint(each.places) for each in self._awaited)
        ):
            awaited = self._awaited.popleft()
            values = tokens.new_empty(len(awaited.flat))
            self._tokens.receive(values, self._place.stages - 1)
            tokens.view(-1)[awaited.flat] = values
            if awaited.landed is not None:
                awaited.landed()

    def open_stream(self, count: int) -> Tensor | None:
        """Memory for the stream of `count` tokens [T, width]; None if no stage is before this one."""
        return None if self._first else self._no_stream.new_empty(count, self.width)

    def receive_stream(self, stream: Tensor) -> None:
        """Write the stream [T, width] of the stage before into this memory."""
        self._stream.receive(stream, self._place.stage - 1)

    def send_stream(
        self,
        stream: Tensor,
        step: StepInput,
        sampled: SampleTargets | None,
        landed: Callable[[], None] | None = None,
    ) -> None:
        """Send the stream, which must stay as it is; stages to which tokens come back note these.

        `landed` is called when they are in the table.
        """
        self._send(self._stream, stream.contiguous(), self._place.stage + 1)
        if self._place.stage in self._told and sampled is not None:
            rows = [step.seqs[row] for row in sampled.rows]
            places = set[int]().union(*map(_places_of, rows)) if landed else {row.slot for row in rows}
            # A copy: the staging buffer of a step may be used again before the step is over.
            self._awaited.append(_AwaitedTokens(places, sampled.flat.clone(), landed))

    def send_tokens(self, tokens: Tensor) -> None:
        """On the last stage, send sampled tokens back: a copy, for a recording writes them again."""
        copy = tokens.clone()
        for stage in self._told:
            self._send(self._tokens, copy, stage)

    def _send(self, group: Group, x: Tensor, to: int) -> None:
        self._sent.append((group.send(x, to), x))
        if len(self._sent) > (self._in_flight + 1) * len(self._told):
            transfer, _ = self._sent.popleft()
            transfer.wait()  # does not block: its step is over, so it has arrived

    def _try_links(self) -> None:
        """Send a number along every link: a broken link fails now, and a working one takes its memory now."""
        word = torch.zeros(1, device=self._no_stream.device)
        if not self._first:
            self._stream.receive(word, self._place.stage - 1)
        if self.last:
            self._tokens.send(word, 0).wait()
        else:
            self._stream.send(word, self._place.stage + 1).wait()
        if self._first:
            self._tokens.receive(word, self._place.stages - 1)


def _places_of(row: SeqStep) -> set[int]:
    """What a row reads and writes beside the cache: its slot, and ~place for each remembered state."""
    places = {row.slot, *(~place for _, place in row.kept)}
    return places | {~row.source} if row.source >= 0 else places


def open_stage(
    place: Place, links: Links | None, width: int, dtype: torch.dtype, target: torch.device, in_flight: int
) -> Stage | None:
    """The stage of this rank, if there are several. `width`: that of the residual stream."""
    if links is None:
        return None
    return Stage(place, links, torch.empty(0, width, dtype=dtype, device=target), in_flight)
