"""The process that reads recordings, one at a time: `python -m server.media.audio.recording_process FD`."""

from __future__ import annotations

import logging
import socket
import sys
import warnings
from pathlib import Path

import msgspec

from server.errors import ApiError, BadRequest, Internal
from server.media.audio.decoding import decode_audio
from server.media.audio.recordings import (
    Answer,
    RecordingOrder,
    RecordingSetup,
    open_file,
    write_features,
)
from server.offload.messages import answer_questions, sent_error
from worker import child, logs

_MUCH, _MOST_LEFT = 64 << 20, 512 << 20
"""Bytes left of a recording that are given back, and at which the process ends after its answer."""

_log = logging.getLogger(__name__)


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
        except ApiError as error:
            answer = sent_error(error)
        except MemoryError:
            answer = sent_error(BadRequest("Decoding the recording took more memory than it may.", "file"))
        except Exception:
            _log.exception("a recording could not be read")
            answer = sent_error(Internal("Internal server error"))
        return msgspec.msgpack.encode(answer)

    with socket.socket(fileno=setup.socket) as connection:
        answer_questions(connection, 1, read, memory=limits.memory, much=_MUCH, most=_MOST_LEFT)
    return child.STOPPED


if __name__ == "__main__":
    sys.exit(main())
