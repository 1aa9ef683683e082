"""Choice of device, dtype and sizes."""

from __future__ import annotations

import logging

import pytest
import torch
from sizes import MODEL, worker_config

from models import ops
from models.ops import reference
from worker.config import Place
from worker.devices import device as device_module
from worker.devices.device import GIB, Cpu, choose_dtype, open_device
from worker.kernels import check
from worker.kernels.cpu import operations, portable, quantized
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
    table = operations.open_kernels(1)
    assert (ops.linear, ops.rms_norm) == (table["linear"], table["rms_norm"])
    assert ops.linear is not reference.linear


def test_threads_are_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device(worker_config(cpu_threads=2))
    assert isinstance(device, Cpu)
    assert (device.threads, torch.get_num_threads()) == (2, 1)  # those that compute are the kernels'
    monkeypatch.setattr(operations, "choose", lambda: (None, portable.TABLE))
    open_device(worker_config(cpu_threads=2))
    assert torch.get_num_threads() == 2


def test_workers_on_one_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "usable_cores", lambda: 12)
    monkeypatch.setattr(device_module, "available_memory", lambda: 5 * GIB)
    monkeypatch.setattr(device_module, "_TORCH_THREADS", 12)
    for ranks, threads in ((1, 12), (2, 6), (5, 2), (16, 1)):
        device = open_device(worker_config(place=Place(local_ranks=ranks)))
        assert isinstance(device, Cpu)
        assert device.threads == threads
        assert device.cache_budget(0.9, 0) == 2 * GIB // ranks


def test_torch_has_all_threads_where_nothing_was_packed() -> None:
    device = Cpu(2)
    packed = device.kernels["pack"](torch.randn(4, 4))
    half = device.kernels["pack"](torch.randn(4, 4).half())
    device.settle([half, packed])
    assert torch.get_num_threads() == 1
    device.settle([half])
    assert torch.get_num_threads() == 2


def test_quantization_is_what_pack_does(caplog: pytest.LogCaptureFixture) -> None:
    device = open_device(worker_config(quantization="int8"))
    weight = torch.randn(64, 1024)
    packed = ops.pack(weight)
    assert packed.nbytes == weight.nbytes / 4 + 64 * 1024 / 128 * 2
    with caplog.at_level(logging.INFO):
        device.settle([packed, torch.empty(1 << 20)])
    assert "quantization int8: 4 MiB of weights became 4 MiB" in caplog.text
    with pytest.raises(ValueError, match="runs on that of transformers: leave the option out"):
        device.settle([weight])
    open_device(worker_config())
    assert ops.pack(weight).nbytes == weight.nbytes


def test_quantization_without_the_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operations, "choose", lambda: (None, portable.TABLE))
    open_device(worker_config(quantization="int4"))
    weight, x = torch.randn(64, 128), torch.randn(3, 128)
    packed = ops.pack(weight)
    assert packed.nbytes == weight.nbytes / 8 + 64 * 4 * 2
    off = ops.linear(x, packed) - reference.linear(x, weight)
    assert off.norm() < 0.1 * reference.linear(x, weight).norm()
    assert "save memory here, but cost time" in caplog.text


def test_kernels_that_quantize_wrongly_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    operations.choose()  # that the others are right
    monkeypatch.setattr(check, "wrong", lambda table, specified: ["linear"])
    assert operations.open_kernels(1, "int8")["linear"] is quantized.linear


def test_an_unknown_quantization_names_the_known() -> None:
    with pytest.raises(ValueError, match="--quantization 'fp8': choose one of int8, int8-dynamic, int4"):
        open_device(worker_config(quantization="fp8"))


def test_quantization_is_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        ValueError, match="--quantization int8 is for the CPU: pass --device cpu, or leave it"
    ):
        open_device(worker_config(quantization="int8", device="cuda"))
    assert open_device(worker_config(quantization="int8", device="cpu")).name == "cpu"


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
