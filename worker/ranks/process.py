"""A rank's process, `python -m worker.ranks.process FD`: steps from the channel, outputs to it.

One thread launches steps as they come, another waits for their outputs: with a device that works on its own
the next step is under way when the last one's output is told. It exits with 0 if the channel ended, with 2 if
it could not load, and with 1 if it broke.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import msgspec

from worker import child, logs
from worker.child import BROKE, CANNOT_START, STOPPED
from worker.config import Place, WorkerConfig
from worker.protocol import DEVICE_LOST, StepInput, StepOutput, WorkerFacts
from worker.ranks.channel import Channel, RankFailed, RankProgress, RankReady, RankSays, RankStart, StepFailed
from worker.start import start

_log = logging.getLogger(__name__)


class Launched(Protocol):
    """A step under way."""

    def result(self) -> StepOutput: ...


class Worker(Protocol):
    """The Runner, as far as it is used here."""

    facts: WorkerFacts

    def launch(self, step: StepInput) -> Launched: ...

    def close(self) -> None: ...


Load = Callable[[WorkerConfig, Callable[[str, float], None]], Worker]


def main(load: Load = start) -> int:
    gc.disable()  # until all is loaded: of what is imported nothing is garbage, and looking takes a while
    told = msgspec.msgpack.decode(child.adopt(int(sys.argv[1])), type=RankStart)
    place = told.config.place
    logs.setup(place.name, told.log_level)
    channel = Channel(told.channel)
    rank = Rank(channel, place)
    rank.say(RankProgress("import", 0.0))
    try:
        worker = load(told.config, lambda stage, fraction: rank.say(RankProgress(stage, fraction)))
    except Exception as error:
        _log.debug("the rank cannot start", exc_info=True)
        rank.say(RankFailed(logs.one_line(error), time.time()))
        return CANNOT_START
    gc.freeze()  # what loading has left behind is here to stay: never look through it again
    gc.enable()
    rank.say(RankReady(worker.facts))
    rank.serve(worker)
    worker.close()
    channel.close()
    return STOPPED


class Rank:
    def __init__(self, channel: Channel, place: Place) -> None:
        self._channel = channel
        self._answers = place.answers
        self._alone = place.size == 1
        self._encoder = msgspec.msgpack.Encoder()
        self._speaking = threading.Lock()
        self._launched: SimpleQueue[tuple[int, Launched] | None] = SimpleQueue()

    def say(self, what: RankSays) -> None:
        with self._speaking:
            self._channel.write(self._encoder.encode(what))

    def serve(self, worker: Worker) -> None:
        """Until the channel ends."""
        teller = threading.Thread(target=self._tell, name="teller", daemon=True)
        teller.start()
        decoder = msgspec.msgpack.Decoder(StepInput)
        while (frame := self._channel.read()) is not None:
            step = decoder.decode(frame)
            try:
                self._launched.put((step.number, worker.launch(step)))
            except Exception as error:
                self._broke(step.number, error)
        self._launched.put(None)
        teller.join()

    def _tell(self) -> None:
        while launched := self._launched.get():
            number, pending = launched
            try:
                output = pending.result()
            except Exception as error:
                self._broke(number, error)
                continue
            if self._answers:
                self.say(output)

    def _broke(self, number: int, error: Exception) -> None:
        """A rank that is alone goes on. Others would wait for this one in the middle of a step, for ever."""
        failed = RankFailed(logs.one_line(error), time.time())
        _log.error("step %d failed", number, exc_info=error)
        if self._alone and type(error).__name__ != DEVICE_LOST:
            self.say(StepFailed(number, failed.message))
            return
        self.say(failed)
        os._exit(BROKE)


if __name__ == "__main__":
    sys.exit(main())
