"""Choice of device, dtype and sizes."""

from __future__ import annotations

import logging

import pytest
import torch
from sizes import MODEL, worker_config

from models import ops
from models.ops import reference
from worker.device import Cpu, choose_dtype, open_device
from worker.kernels import cpu
from worker.limits import Limits, resolve_limits


@pytest.fixture(autouse=True)
def _keep_threads():  # pyright: ignore[reportUnusedFunction]
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_cuda")
def test_auto_is_the_cpu_where_there_is_no_cuda() -> None:
    assert open_device(worker_config(device="auto")).name == "cpu"
    with pytest.raises(ValueError, match="--device cpu"):
        open_device(worker_config(device="cuda"))


def test_unknown_device_names_the_known() -> None:
    with pytest.raises(ValueError, match="'tpu': choose auto, cpu or cuda"):
        open_device(worker_config(device="tpu"))


def test_its_kernels_are_bound() -> None:
    ops.use({})
    open_device(worker_config(device="cpu"))
    assert (ops.linear, ops.gated) == (cpu.linear, cpu.gated)
    assert ops.rms_norm is reference.rms_norm


def test_threads_are_as_asked() -> None:
    open_device(worker_config(cpu_threads=2))
    assert torch.get_num_threads() == 2


def test_dtype_is_the_checkpoints_unless_asked() -> None:
    device = Cpu(1)
    assert choose_dtype(worker_config(), device) == torch.float32
    assert choose_dtype(worker_config(dtype="bfloat16"), device) == torch.bfloat16
    with pytest.raises(ValueError, match="'int8': pass --dtype with one of float32, bfloat16, float16"):
        choose_dtype(worker_config(dtype="int8"), device)


def test_float16_on_the_cpu_works_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_dtype(worker_config(dtype="float16"), Cpu(1)) == torch.float16
    assert "--dtype" in caplog.text


def test_arena_is_zeroed_writable_memory_of_the_asked_size() -> None:
    arena = Cpu(1).arena(3 << 20)
    assert arena.nbytes == 3 << 20
    assert not arena.any()
    arena[-1] = 1


def test_sizes_by_default() -> None:
    limits = resolve_limits(worker_config(), Cpu(1))
    assert limits == Limits(
        block_size=32, max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=MODEL.max_len
    )


@pytest.mark.parametrize(
    ("given", "seqs", "tokens"),
    [
        ({"max_num_seqs": 4000}, 4000, 4000),
        ({"max_num_batched_tokens": 100}, 100, 100),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 3}, 3, 3),
    ],
)
def test_a_step_holds_a_token_of_every_sequence(given: dict[str, int], seqs: int, tokens: int) -> None:
    limits = resolve_limits(worker_config(**given), Cpu(1))
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (seqs, tokens)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seqs": 5, "max_num_batched_tokens": 4}, "--max-num-batched-tokens 4 is less than"),
        ({"max_model_len": 513}, "more than the 512 positions"),
        ({"max_model_len": 1}, "--max-model-len must be at least 2, not 1"),
        ({"block_size": 0}, "--block-size must be at least 1, not 0"),
    ],
)
def test_sizes_that_cannot_be(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_limits(worker_config(**given), Cpu(1))
