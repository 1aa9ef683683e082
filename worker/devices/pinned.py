"""Memory of the host that a device reads by itself: weights pass through it, blocks of a cache stay there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from worker.cache_tiers.host_copies import Mark
from worker.host.machine import usable_cores

BUFFER_BYTES = 64 << 20
_BUFFERS = 2
_AT_ONCE = 4 << 20
"""Bytes that a thread copies at a time: others go on meanwhile, so one without a core holds up no more."""
_MOST_THREADS = 8


class Copying(Protocol):
    """A copy out of a buffer that is under way."""

    def synchronize(self) -> None:
        """Wait until the buffer has been read."""
        ...


class PinnedUpload:
    """Brings tensors of files to a device: threads fill one buffer while the device copies the other.

    A piece keeps the number type that it is stored in until it is on the device. The host waits for buffers
    alone: a tensor that was brought is there for whatever is started on the device after it.
    """

    def __init__(
        self,
        target: torch.device,
        threads: Executor,
        start_copy: Callable[[Tensor, Tensor], Copying],
        make_buffer: Callable[[int], Tensor],
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """`start_copy` starts to copy a piece in a buffer to its place, which may have another number type.

        `make_buffer` makes memory [bytes] uint8 that the device reads by itself; called when it is needed.
        """
        self._target = target
        self._threads = threads
        self._start_copy = start_copy
        self._make_buffer = make_buffer
        self._buffer_bytes = buffer_bytes
        self._under_way: deque[tuple[Tensor, Copying]] = deque()

    def __call__(self, read: Tensor, dtype: torch.dtype, report: Callable[[float], None]) -> Tensor:
        tensor = torch.empty(read.shape, dtype=dtype, device=self._target)
        done = 0
        for piece, place in _pieces(read.detach(), tensor, self._buffer_bytes):
            buffer = self._free_buffer()
            held = buffer[: piece.nbytes].view(piece.dtype).view(piece.shape)
            self._fill(held, piece)
            self._under_way.append((buffer, self._start_copy(held, place)))
            done += piece.nbytes
            report(done / max(1, read.nbytes))
        return tensor

    def _free_buffer(self) -> Tensor:
        if len(self._under_way) < _BUFFERS:
            return self._make_buffer(self._buffer_bytes)
        buffer, copying = self._under_way.popleft()
        copying.synchronize()
        return buffer

    def _fill(self, held: Tensor, piece: Tensor) -> None:
        """Copy a piece of a file into a buffer, by all threads. Its pages are read while it is copied."""
        if piece.is_contiguous():
            held, piece = held.view(-1), piece.view(-1)
        if piece.stride(-1) != 1:
            held.copy_(piece)  # a matrix that lies the other way round: GPT-2's, in a GGUF file
            return
        parts = -(-piece.nbytes // _AT_ONCE)
        into, source = (np.array_split(x.view(torch.uint8).numpy(), max(1, parts)) for x in (held, piece))
        apply: Any = map if parts < 2 else self._threads.map
        for _ in apply(np.copyto, into, source):
            pass


@contextmanager
def pinned_upload(target: torch.device) -> Iterator[PinnedUpload]:
    """Open an upload to a CUDA device, with threads that end with it."""
    count = min(usable_cores(), _MOST_THREADS)
    with ThreadPoolExecutor(count, thread_name_prefix="read-weights") as threads:
        yield PinnedUpload(target, threads, _start_copy, _pinned_memory)


def _pinned_memory(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _start_copy(held: Tensor, place: Tensor) -> torch.cuda.Event:
    """Copy from pinned memory on the device's current stream, behind all that was started there."""
    there = place if place.dtype == held.dtype else torch.empty_like(held, device=place.device)
    there.copy_(held, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(place.device))
    if there is not place:
        place.copy_(there)
    return copied


def _pieces(read: Tensor, tensor: Tensor, most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide what was read into pieces of at most so many bytes, each with its place in the other tensor."""
    if read.nbytes <= most:
        yield read, tensor
    elif read.is_contiguous():
        count = most // read.itemsize
        yield from zip(read.view(-1).split(count), tensor.view(-1).split(count), strict=True)
    elif rows := most // read[0].nbytes:
        yield from zip(read.split(rows), tensor.split(rows), strict=True)
    else:
        for row, place in zip(read, tensor, strict=True):
            yield from _pieces(row, place, most)


class CudaLane:
    """A stream of CUDA."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # the waiting thread sleeps, it does not spin
        event.record(self._stream)
        return event

    def wait(self, mark: Mark) -> None:
        if isinstance(mark, torch.cuda.Event):
            self._stream.wait_event(mark)


def pin(memory: Tensor, device: torch.device) -> Callable[[], object]:
    """Let a card read and write memory by itself -> a function that ends that."""
    torch.cuda.set_device(device)  # of this thread
    runtime: Any = torch.cuda.cudart()
    address = memory.data_ptr()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, memory.nbytes, 0)))
    return lambda: runtime.cudaHostUnregister(address)
