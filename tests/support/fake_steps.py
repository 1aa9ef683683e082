"""Steps of a worker without tensors: computed at once, when their bounds come, or after a while."""

import socket
import threading
from dataclasses import dataclass

from worker.protocol import StepOutput

SLOW_SECONDS = 0.5


@dataclass(slots=True)
class Landed:
    """A launched step, in place of the real worker's handle."""

    output: StepOutput | Exception

    def done(self) -> bool:
        return True

    def result(self) -> StepOutput:
        if isinstance(self.output, Exception):
            raise self.output
        return self.output


class DueStep(Landed):
    """A step that is computed when the bounds of it and of those before it have come."""

    def __init__(self) -> None:
        super().__init__(ValueError("a step is awaited whose bounds nobody has told"))
        self._done = False

    def land(self, landed: Landed) -> None:
        self.output, self._done = landed.output, True

    def done(self) -> bool:
        return self._done


class SlowStep(Landed):
    """A step that is done after a while, which a byte in `notice` says."""

    def __init__(self, output: StepOutput | Exception, notice: socket.socket) -> None:
        super().__init__(output)
        self._notice = notice
        self._over = threading.Event()
        threading.Timer(SLOW_SECONDS, self._end).start()

    def done(self) -> bool:
        return self._over.is_set()

    def result(self) -> StepOutput:
        self._over.wait()
        return super().result()

    def _end(self) -> None:
        self._over.set()
        self._notice.send(b"\0")
