"""Carries tensors between the ranks of one machine through Unix sockets, one for each pair of ranks."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from worker.ranks.unix_sockets import RankLostError, connect_all


class Sending:
    """A tensor on its way; who sends it keeps it until `wait` returns."""

    def __init__(self, to: int, tensor: Tensor) -> None:
        self.out = {to: _bytes_of(tensor)} if tensor.numel() else {}
        """The bytes that are not sent yet."""
        self._error: Exception | None = None
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """Tensors on their way between this rank and all others, by rank, as bytes that are left to move."""

    out: dict[int, memoryview]
    into: dict[int, memoryview]
    finish: Callable[[Swap], None]

    def wait(self) -> None:
        self.finish(self)


class SocketCarrier:
    """Carries tensors between all pairs of some ranks."""

    def __init__(self, prefix: str, rank: int, size: int, timeout: float) -> None:
        """`prefix` begins the paths of all ranks' sockets. `timeout`: seconds to wait for another rank."""
        self._rank, self._timeout = rank, timeout
        self._peers = connect_all(prefix, rank, size, timeout)
        self._waiting: SimpleQueue[Sending | None] = SimpleQueue()
        self._last: Sending | None = None
        """The tensor that the thread sends last; None: there is no thread yet."""
        self._swaps: deque[Swap] = deque()

    def swap(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> Swap:
        """Begin to send a tensor to each other rank, and to receive one from each."""
        swap = Swap(
            {rank: _bytes_of(out[rank]) for rank in self._peers if out[rank].numel()},
            {rank: _bytes_of(into[rank]) for rank in self._peers if into[rank].numel()},
            self._finish,
        )
        if not self._swaps:
            if self._last is not None:
                self._last.wait()
            self._push(swap.out)
        self._swaps.append(swap)
        return swap

    def send(self, x: Tensor, to: int) -> Sending:
        """Begin to send a tensor. What does not fit on its way is left to a thread, so that nobody waits."""
        sending = Sending(to, x)
        if self._last is None or self._last.done:
            self._push(sending.out)
        if sending.out:
            self._leave_to_thread(sending)
        else:
            sending.finish()
        return sending

    def receive(self, x: Tensor, source: int) -> None:
        """Wait for the next tensor that `source` has sent, and write it into `x`."""
        if x.numel():
            self._move({}, {source: _bytes_of(x)})

    def close(self) -> None:
        self._waiting.put(None)
        for peer in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
            peer.close()

    def _finish(self, last: Swap) -> None:
        """Finish the swaps that are under way, up to this one, in the order in which they began."""
        while last in self._swaps:
            swap = self._swaps.popleft()
            self._move(swap.out, swap.into)
            if self._swaps:
                self._push(self._swaps[0].out)

    def _leave_to_thread(self, sending: Sending) -> None:
        if self._last is None:
            threading.Thread(target=self._send_waiting, name="sending", daemon=True).start()
        self._last = sending
        self._waiting.put(sending)

    def _send_waiting(self) -> None:
        while sending := self._waiting.get():
            try:
                self._move(sending.out, {})
            except (RankLostError, OSError) as error:
                sending.finish(error)
            else:
                sending.finish()

    def _move(self, out: dict[int, memoryview], into: dict[int, memoryview]) -> None:
        """Send the bytes of `out` and fill `into`, each by rank, whichever goes first."""
        while True:
            self._push(out)
            self._pull(into)
            if not out and not into:
                return
            self._wait(out, into)

    def _push(self, out: dict[int, memoryview]) -> None:
        """Send as much as fits on its way. What is sent leaves `out`."""
        for rank in list(out):
            self._advance(rank, out, self._peers[rank].send)

    def _pull(self, into: dict[int, memoryview]) -> None:
        """Receive as much as has come. What is full leaves `into`."""
        for rank in list(into):
            self._advance(rank, into, self._peers[rank].recv_into)

    def _advance(self, rank: int, pieces: dict[int, memoryview], call: Callable[[memoryview], int]) -> None:
        """Send or receive a rank's piece as far as it goes; what is left of it stays in `pieces`."""
        rest = pieces.pop(rank)
        try:
            while rest:
                count = call(rest)
                if not count:
                    raise _lost(rank)
                rest = rest[count:]
        except BlockingIOError:
            pieces[rank] = rest
        except OSError as error:
            raise _lost(rank) from error

    def _wait(self, out: dict[int, memoryview], into: dict[int, memoryview]) -> None:
        poller = select.poll()
        for rank in out.keys() | into.keys():
            events = (select.POLLOUT if rank in out else 0) | (select.POLLIN if rank in into else 0)
            poller.register(self._peers[rank], events)
        if not poller.poll(self._timeout * 1000):
            waits_for = ", ".join(map(str, sorted(out.keys() | into.keys())))
            raise RankLostError(f"rank {self._rank} has waited {self._timeout:g} s for {waits_for}")


def _bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    data: memoryview = x.detach().view(-1).view(torch.uint8).numpy().data
    return data


def _lost(rank: int) -> RankLostError:
    return RankLostError(f"rank {rank} of the same group has ended")
