"""The process of a rank, as the engine sees it through the channel; and the channel itself."""

import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from fake_worker import BREAKS_STEP, reference
from live import PATIENCE, alive
from sizes import worker_config

from worker import child
from worker.config import Place
from worker.protocol import NewSeq, Sampling, SeqStep, StepInput, StepOutput
from worker.ranks.channel import (
    EngineEnd,
    Prepare,
    RankEnd,
    RankFailed,
    RankMessage,
    RankProgress,
    RankReady,
    RankStart,
    StepFailed,
)

SUPPORT = Path(__file__).parents[1] / "support"

decoder = msgspec.msgpack.Decoder(RankMessage)


class Rank:
    def __init__(self, folder: Path, module: str = "fake_rank", place: Place | None = None) -> None:
        ours, theirs = socket.socketpair()
        config = worker_config(folder=str(folder), place=place or Place())
        with theirs:
            start = RankStart(config, theirs.fileno(), "critical")
            payload = msgspec.msgpack.encode(start)
            self.process = child.start("rank", module, payload, inherit=[theirs.fileno()])
        self.end = EngineEnd(ours)

    def send(self, step: StepInput) -> None:
        self.end.write([msgspec.msgpack.encode(step)])

    def receive(self) -> list[RankMessage]:
        """Messages until the rank is ready, has returned an output, or has ended."""
        received: list[RankMessage] = []
        while not self.end.ended and not any(
            isinstance(message, (RankReady, StepOutput)) for message in received
        ):
            assert select.select([self.end], [], [], 10)[0], "it sends nothing"
            received += [decoder.decode(frame) for frame in self.end.read()]
        return received


@pytest.fixture(autouse=True)
def reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)


def read(number: int, token: int) -> StepInput:
    new = NewSeq(0, [token], 1, Sampling(max_tokens=4))
    return StepInput(number, [new], [SeqStep(0, 0, 1, [0], samples=True)])


def test_a_life_without_accidents(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    *progress, ready = rank.receive()
    assert isinstance(ready, RankReady)
    assert progress[0] == RankProgress("import", 0.0) and progress[-1] == RankProgress("warmup", 1.0)
    rank.send(read(1, 5))
    (output,) = rank.receive()
    assert isinstance(output, StepOutput) and output.tokens == reference([5], 1)
    rank.end.close()
    assert rank.process.ended_within(5) and rank.process.wait() == 0
    assert (tmp_path / "closed-0").exists()


def test_a_rank_that_does_not_return_outputs_sends_none(tmp_path: Path) -> None:
    rank = Rank(tmp_path, place=Place(tensor_rank=1, tensor_size=2))
    rank.receive()
    rank.send(read(1, 5))
    assert not select.select([rank.end], [], [], 0.2)[0]
    rank.end.close()
    assert rank.process.stop(5) <= 0


def test_a_failed_step_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.receive()
    rank.send(read(1, BREAKS_STEP))
    rank.send(read(2, 5))
    failed, output = rank.receive()
    assert failed == StepFailed(1, "RuntimeError: odd input")
    assert isinstance(output, StepOutput) and output.number == 2
    rank.end.close()
    rank.process.stop(5)


def test_a_rank_that_fails_while_it_prepares_says_so_and_ends(tmp_path: Path) -> None:
    (tmp_path / "cannot-prepare").touch()
    rank = Rank(tmp_path, place=Place(tensor_rank=1, tensor_size=2))
    rank.receive()
    rank.end.write([msgspec.msgpack.encode(Prepare())])
    failed = rank.receive()[0]
    assert isinstance(failed, RankFailed) and failed.message == "RuntimeError: NCCL is broken"
    assert rank.process.ended_within(5) and rank.process.wait() == 1
    rank.end.close()


def test_an_error_of_the_load_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "no-weights").touch()
    rank = Rank(tmp_path)
    failed = rank.receive()[-1]
    assert isinstance(failed, RankFailed) and not failed.unreported
    assert failed.message == "model.safetensors: tensor 'lm_head.weight' is missing"
    assert rank.process.ended_within(5) and rank.process.wait() == 2
    rank.end.close()


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_rank_process import Rank
rank = Rank(Path(sys.argv[1]))
rank.receive()
print(rank.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("waiting", ["loaded", "loading"])
def test_no_rank_outlives_its_engine(tmp_path: Path, waiting: str) -> None:
    if waiting == "loading":
        (tmp_path / "hangs").touch()
    code = PARENT if waiting == "loaded" else PARENT.replace("rank.receive()", "")
    command = [sys.executable, "-P", "-c", code, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 2 * PATIENCE
    while alive(pid):
        assert time.monotonic() < deadline, "the rank outlived its engine"
        time.sleep(0.01)


def test_torch_is_loaded_with_the_model_only() -> None:
    code = "import sys, worker.rank_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0


# The channel.


def pair() -> tuple[EngineEnd, RankEnd]:
    ours, theirs = socket.socketpair()
    return EngineEnd(ours), RankEnd(theirs.detach())


def test_frames_arrive_whole_whatever_their_size() -> None:
    engine, rank = pair()
    large = os.urandom(3_000_000)
    messages = [[b""], [b"x"], [b"head", large, b"", memoryview(large)[:9]], [large], [b"last"]]
    for message in messages:
        engine.write(message)
    assert engine.has_unsent, "the large one does not fit into the pipe"
    received: list[list[bytearray] | None] = []
    reader = threading.Thread(target=lambda: received.extend(rank.read() for _ in messages))
    reader.start()
    while engine.has_unsent:
        select.select([], [engine], [])
        engine.flush()
    reader.join()
    assert received == messages
    engine.close()
    assert rank.read() is None
    rank.write(b"to nobody")
    rank.close()


def test_frames_that_come_in_pieces_are_put_together() -> None:
    engine, rank = pair()
    frames = [os.urandom(size) for size in (10, 1_000_000, 0, 5)]
    writer = threading.Thread(target=lambda: [rank.write(frame) for frame in frames])
    writer.start()
    received: list[bytes] = []
    while len(received) < len(frames):
        select.select([engine], [], [])
        received += engine.read()
    writer.join()
    assert received == frames
    rank.close()
    assert engine.read() == [] and engine.ended
    engine.write([b"to nobody"])
    assert not engine.has_unsent
    engine.close()
