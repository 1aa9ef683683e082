"""The tensors that go between the stages of a model that is cut into runs of layers.

The residual stream of each step goes to the next stage, and the tokens that the last stage samples go back to
the first. Each rank exchanges with the rank of the same number in the other stage, and waits for nobody to
take what it sends. The engine has a sequence in one step at a time, and at most `in_flight` steps under way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from models.parallel.parallel import Exchange
from worker.config import Place
from worker.protocol import StepInput, StepOutput
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

    slots: set[int]
    flat: Tensor  # [R] flat indices in the table of tokens


class Stage:
    """This rank's pipeline stage, and its exchange with the others."""

    def __init__(self, place: Place, links: Links, stream: Tensor, in_flight: int) -> None:
        """`stream` [0, width]: an empty residual stream, of the type and on the device of all."""
        self.width = stream.shape[1]
        """The numbers of a token in the stream, which may be more once the model is known."""
        self.last = place.stage == place.stages - 1
        self._first = place.stage == 0
        self._place, self._no_stream, self._in_flight = place, stream, in_flight
        self._stream, self._tokens = links.stream, links.tokens
        self._awaited: deque[_AwaitedTokens] = deque()
        self._sent: deque[tuple[Exchange, Tensor]] = deque()
        self._try_links()

    def receive_tokens(self, step: StepInput, tokens: Tensor) -> None:
        """On the first stage, write sampled tokens into the table `tokens` before `step` reads them there.

        A slot that gets a new sequence waits too, or late tokens would be written over the new text.
        """
        slots = {seq.slot for seq in step.seqs} | {new.slot for new in step.new}
        while self._awaited and (
            len(self._awaited) >= self._in_flight
            or any(not slots.isdisjoint(each.slots) for each in self._awaited)
        ):
            awaited = self._awaited.popleft()
            values = tokens.new_empty(len(awaited.flat))
            self._tokens.receive(values, self._place.stages - 1)
            tokens.view(-1)[awaited.flat] = values

    def open_stream(self, count: int) -> Tensor | None:
        """Memory for the stream of `count` tokens [T, width]; None if no stage is before this one."""
        return None if self._first else self._no_stream.new_empty(count, self.width)

    def receive_stream(self, stream: Tensor) -> None:
        """Write the stream [T, width] of the stage before into this memory."""
        self._stream.receive(stream, self._place.stage - 1)

    def send_stream(self, stream: Tensor, step: StepInput, sampled: SampleTargets | None) -> None:
        """Send the stream, which must stay as it is; the first stage notes the tokens that come back."""
        self._send(self._stream, stream.contiguous(), self._place.stage + 1)
        if self._first and sampled is not None:
            slots = {step.seqs[row].slot for row in sampled.rows}
            # A copy: the staging buffer of a step may be used again before the step is over.
            self._awaited.append(_AwaitedTokens(slots, sampled.flat.clone()))

    def send_tokens(self, tokens: Tensor) -> None:
        """On the last stage, send sampled tokens to the first: a copy, for a recording writes them again."""
        self._send(self._tokens, tokens.clone(), 0)

    def _send(self, group: Group, x: Tensor, to: int) -> None:
        self._sent.append((group.send(x, to), x))
        if len(self._sent) > self._in_flight + 1:
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
