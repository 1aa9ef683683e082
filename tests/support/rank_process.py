"""Processes that are ranks of a model, and later of another one, so that torch is imported once for all.

Frames on the pipe begin with a letter: `o` a WorkerConfig to open a runner with, `s` a step, `m` a call of
a method, `p` prepare, `c` close. It answers `f` with facts, `a` with an output if it is the one that answers,
`m` with what a method has returned, `p` and whether something is left to prepare, `c` when the runner is
closed, and `e` with an error.
"""

import gc
import logging
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec
import torch

from models.checkpoint.weights import Reading
from worker.buffers import Decoder
from worker.calls.messages import WorkerCall
from worker.config import WorkerConfig
from worker.protocol import StepInput
from worker.runner import Runner

_read: list[int] = []


def main(pipe: Connection) -> None:
    torch.set_num_threads(1)
    logging.disable()
    _count_bytes()
    runner: Runner | None = None
    answers = False
    while True:
        try:
            frame = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        kind, body = frame[:1], frame[1:]
        try:
            if kind == b"o":
                _read.clear()
                config = msgspec.msgpack.decode(body, type=WorkerConfig)
                answers = config.place.returns_outputs
                runner = Runner(config, lambda stage, fraction: None)
                pipe.send_bytes(b"f" + msgspec.msgpack.encode((runner.facts, sum(_read))))
            elif runner is None:
                raise RuntimeError("no runner is open")
            elif kind == b"s":
                output = runner.launch(_read_step(pipe, body)).result()
                if answers:
                    pipe.send_bytes(b"a" + msgspec.msgpack.encode(output))
            elif kind == b"m":
                returned = runner.call(msgspec.msgpack.decode(body, type=WorkerCall))
                pipe.send_bytes(b"m" + msgspec.msgpack.encode(returned))
            elif kind == b"p":
                pipe.send_bytes(b"p" + bytes([runner.prepare()]))
            else:
                runner.close()
                runner = None
                gc.freeze()  # who closes the next one looks for garbage, and not in what was imported
                pipe.send_bytes(b"c")
        except Exception as error:
            runner = None
            pipe.send_bytes(b"e" + f"{type(error).__name__}: {error}".encode())


def _read_step(pipe: Connection, head: bytes) -> StepInput:
    """A step, behind which each of its items comes in a frame of its own."""
    frames = {item["pixels"] for item in msgspec.msgpack.decode(head).get("encode", ())}
    return Decoder[StepInput](StepInput).decode(head, [pipe.recv_bytes() for _ in frames])


def _count_bytes() -> None:
    """Count the bytes of checkpoints that are read by all that is loaded here."""
    finish = Reading.finish

    def counted(self: Reading) -> None:
        _read.append(self.bytes_read)
        finish(self)

    Reading.finish = counted


def fork_ranks(descriptors: Sequence[str]) -> int:
    """Fork a rank for each of these pipes, which all have what is imported here, and wait until they end."""
    gc.freeze()
    pids: list[int] = []
    for own in map(int, descriptors):
        pid = os.fork()
        if pid == 0:
            main(Connection(own))
            return 0
        os.close(own)
        pids.append(pid)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in pids)


if __name__ == "__main__":
    sys.exit(fork_ranks(sys.argv[1:]))
