"""The process of one rank, `python -m worker.rank_process FD`: it reads steps and sends outputs.

One thread launches steps as they come, another waits for their outputs: with a device that works on its own
the next step is under way when the output of the last one is sent. The process exits with 0 if the channel
ended, with 2 if it could not load, and with 1 if a step failed that other ranks take part in.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, NoReturn

import msgspec

from models.plugins import use_registrations
from worker import child, logs
from worker.buffers import Decoder
from worker.calls.messages import BESIDE_STEPS, WorkerCall
from worker.child import BROKE, CANNOT_START, STOPPED
from worker.config import Place, WorkerConfig
from worker.host.progress_page import ProgressWriter, StepProgress
from worker.protocol import StepBounds, StepInput
from worker.ranks.channel import (
    DiskOrder,
    Order,
    Prepare,
    RankEnd,
    RankFailed,
    RankMessage,
    RankPrepared,
    RankProgress,
    RankReady,
    RankStart,
    StepFailed,
)
from worker.ranks.rank_disk import RankDisk
from worker.start_runner import start

if TYPE_CHECKING:
    from worker.runner import Runner
    from worker.steps.batch import Launched

_log = logging.getLogger(__name__)


Load = Callable[[WorkerConfig, Callable[[str, float], None]], "Runner"]


def main(load: Load = start) -> int:
    gc.disable()  # until all is loaded: nothing that is imported is garbage, and looking takes a while
    rank_start = msgspec.msgpack.decode(child.adopt(int(sys.argv[1])), type=RankStart)
    place = rank_start.config.place
    use_registrations(rank_start.config.registrations)
    logs.setup(place.name, rank_start.log_level)
    channel = RankEnd(rank_start.descriptor)
    progress = StepProgress(ProgressWriter(rank_start.progress_page, rank_start.progress_entry))
    rank = Rank(channel, place, progress)
    rank.send(RankProgress("import", 0.0))
    try:
        worker = load(rank_start.config, lambda phase, fraction: rank.send(RankProgress(phase, fraction)))
    except Exception as error:
        _log.debug("the rank cannot start", exc_info=True)
        rank.send(RankFailed(logs.one_line(error), time.time()))
        return CANNOT_START
    gc.freeze()  # loaded objects live as long as the process: never look through them again
    gc.enable()
    disk = None if worker.store is None else RankDisk(worker.store, rank.send)
    rank.send(RankReady(worker.facts))
    rank.serve(worker, disk)
    worker.close()
    channel.close()
    return STOPPED


class _ChannelEnded(BaseException):
    """No message will come any more. It passes through a step that waits for one, which has not failed."""


class Rank:
    def __init__(self, channel: RankEnd, place: Place, progress: StepProgress) -> None:
        self._channel = channel
        self._progress = progress
        self._returns_outputs = place.returns_outputs
        self._alone = place.alone
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = Decoder[Order](Order)
        self._steps: deque[StepInput | Prepare | DiskOrder | WorkerCall] = deque()
        self._bounds: deque[StepBounds] = deque()
        self._sending = threading.Lock()
        self._launched: SimpleQueue[tuple[int, Launched] | None] = SimpleQueue()

    def send(self, message: RankMessage) -> None:
        """Send a message to the engine, from any thread."""
        with self._sending:
            self._channel.write(self._encoder.encode(message))

    def serve(self, worker: Runner, disk: RankDisk | None = None) -> None:
        """Run steps until the channel ends. `disk`: what obeys orders for blocks there, if some are kept."""
        sender = threading.Thread(target=self._send_outputs, args=(worker,), name="outputs", daemon=True)
        sender.start()
        self._progress.rest()
        with suppress(_ChannelEnded), ThreadPoolExecutor(1, "beside") as beside:
            while True:
                step = self._next_step()
                if isinstance(step, Prepare):
                    self._prepare(worker)
                    continue
                if isinstance(step, WorkerCall) and step.method in BESIDE_STEPS:
                    beside.submit(self._call, worker, step)
                    continue
                if isinstance(step, WorkerCall):
                    self._call(worker, step)
                    continue
                if isinstance(step, DiskOrder):
                    if disk is not None:
                        disk.obey(step)
                    continue
                self._progress.begin(step.number, sum([row.tokens for row in step.seqs]))
                try:
                    self._launched.put((step.number, worker.launch(step, self._next_bounds)))
                except Exception as error:
                    self._step_failed(step.number, error, worker)
                    self._progress.end()
        self._launched.put(None)
        sender.join()

    def _call(self, worker: Runner, call: WorkerCall) -> None:
        self.send(worker.call(call))

    def _prepare(self, worker: Runner) -> None:
        try:
            left = worker.prepare()
        except Exception as error:
            _log.error("preparing failed", exc_info=error)
            self._end(error)
        if self._returns_outputs:
            self.send(RankPrepared(left))

    def _next_step(self) -> StepInput | Prepare | DiskOrder | WorkerCall:
        while not self._steps:
            self._read()
        step = self._steps.popleft()
        if not isinstance(step, StepInput):
            return step
        while self._bounds and self._bounds[0].number < step.number:
            self._bounds.popleft()  # of a step that is over: only ranks of the last stage have used them
        return step

    def _next_bounds(self) -> StepBounds:
        while not self._bounds:
            self._read()
        return self._bounds.popleft()

    def _read(self) -> None:
        """Wait for the next message and keep it."""
        frames = self._channel.read()
        if frames is None:
            raise _ChannelEnded
        order = self._decoder.decode(frames[0], frames[1:])
        if isinstance(order, StepBounds):
            self._bounds.append(order)
        else:
            self._steps.append(order)

    def _send_outputs(self, worker: Runner) -> None:
        """Wait for each launched step, in order, and send its output if this is the rank that returns it."""
        while launched := self._launched.get():
            number, step = launched
            try:
                output = step.result()
            except Exception as error:
                self._step_failed(number, error, worker)
                continue
            finally:
                self._progress.end()
            if self._returns_outputs:
                self.send(output)

    def _step_failed(self, number: int, error: Exception, worker: Runner) -> None:
        """Go on if this rank is alone and its device works; else end, or others would wait for it."""
        _log.error("step %d failed", number, exc_info=error)
        if self._alone and not worker.lost(error):
            self.send(StepFailed(number, logs.one_line(error)))
        else:
            self._end(error)

    def _end(self, error: Exception) -> NoReturn:
        """Say why, and end this process, or other ranks would wait for it."""
        self.send(RankFailed(logs.one_line(error), time.time()))
        logs.flush()
        os._exit(BROKE)


if __name__ == "__main__":
    sys.exit(main())
