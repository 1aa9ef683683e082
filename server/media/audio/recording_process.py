"""The process that reads recordings, one at a time: `python -m server.media.audio.recording_process FD`."""

from __future__ import annotations

import socket
import sys
import warnings
from pathlib import Path

import msgspec

from server.errors import BadRequest
from server.media.audio.decoding import decode_audio
from server.media.audio.recordings import (
    Answer,
    RecordingOrder,
    RecordingSetup,
    open_file,
    write_features,
)
from server.media.failures import MOST_LEFT, MUCH, sent_failure
from server.offload.messages import answer_questions, sent_error
from worker import child, logs


def main() -> int:
    setup = msgspec.msgpack.decode(child.adopt(int(sys.argv[1])), type=RecordingSetup)
    logs.setup("recording", setup.log_level)
    warnings.simplefilter("ignore")
    limits = setup.limits

    def read(order: bytes) -> bytes:
        asked = msgspec.msgpack.decode(order, type=RecordingOrder)
        try:
            with open_file(Path(asked.source)) as source, open_file(Path(asked.target)) as target:
                answer: Answer = write_features(decode_audio(source, limits.seconds), setup.bands, target)
        except FileNotFoundError:  # the client has left before its turn
            answer = sent_error(BadRequest("The recording is gone.", "file"))
        except Exception as error:
            answer = sent_failure(error, "recording", "file")
        return msgspec.msgpack.encode(answer)

    with socket.socket(fileno=setup.socket) as connection:
        answer_questions(connection, 1, read, memory=limits.memory, much=MUCH, most=MOST_LEFT)
    return child.STOPPED


if __name__ == "__main__":
    sys.exit(main())
