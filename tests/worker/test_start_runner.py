"""The start of a worker prepares kernels, and imports nothing that it does not need."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from sizes import worker_config
from tiny import tiny_checkpoint

from models.config import read_config
from worker import runner, start_runner
from worker.config import WorkerConfig

_START = """
import sys, msgspec
from worker.config import WorkerConfig
from worker.start_runner import start
assert "torch" not in sys.modules
start(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WorkerConfig), lambda stage, fraction: None)
print(*sys.modules)
"""


def test_nothing_is_imported_that_takes_long_and_is_not_needed(tmp_path: Path) -> None:
    """Each of these imports takes a second. Some plain calls of torch import its compiler, and so sympy."""
    tiny_checkpoint("LlamaForCausalLM", tmp_path)
    config = worker_config(folder=str(tmp_path), model=read_config(tmp_path), device="cpu", cpu_threads=1)
    told = msgspec.msgpack.encode(config)
    done = subprocess.run([sys.executable, "-c", _START], input=told, capture_output=True, check=True)
    imported = set(done.stdout.decode().split())
    assert "torch" in imported
    assert imported.isdisjoint({"torch._dynamo", "torch._inductor", "sympy", "transformers"})


@pytest.mark.parametrize(
    ("device", "nvidia", "prepared"),
    [("cpu", True, 1), ("auto", False, 1), ("auto", True, 0), ("cuda", False, 0)],
)
def test_kernels_are_prepared_where_they_will_be_used(
    device: str, nvidia: bool, prepared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def prepare() -> None:
        calls.append("prepare")
        raise OSError("no place for it")

    def load(config: WorkerConfig, report: object) -> str:
        return f"a runner on {config.options.device}"

    monkeypatch.setattr(start_runner, "prepare", prepare)
    monkeypatch.setattr(start_runner, "_NVIDIA", tmp_path if nvidia else tmp_path / "none")
    monkeypatch.setattr(runner, "Runner", load)
    tiny_checkpoint("LlamaForCausalLM", tmp_path)
    config = worker_config(folder=str(tmp_path), model=read_config(tmp_path), device=device)
    assert start_runner.start(config, lambda stage, fraction: None) == f"a runner on {device}"
    assert len(calls) == prepared


def test_a_start_that_runs_out_of_memory_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(config: WorkerConfig, report: object) -> str:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(runner, "Runner", load)
    monkeypatch.setattr(start_runner, "prepare", lambda: None)
    with pytest.raises(OSError, match=r"memory ran out, with \d+\.\d GiB available now: take a smaller"):
        start_runner.start(worker_config(device="cpu"), lambda stage, fraction: None)
