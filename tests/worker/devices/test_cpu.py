"""The host as a device: its threads, its share of the machine, and weights that are quantized."""

import logging

import pytest
import torch
from sizes import worker_config

from models import ops
from models.ops import reference
from worker.capacity import GIB, CacheBudget
from worker.config import Place
from worker.devices import cpu as cpu_module
from worker.devices.cpu import Cpu
from worker.devices.device_choice import open_device
from worker.host import cpu_threads
from worker.kernels.cpu import operations, torch_operations


def test_threads_are_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device(worker_config(cpu_threads=2))
    assert isinstance(device, Cpu)
    assert (device.threads, torch.get_num_threads()) == (2, 1)  # those that compute are the kernels'
    monkeypatch.setattr(operations, "choose_kernels", lambda: (None, torch_operations.TABLE))
    open_device(worker_config(cpu_threads=2))
    assert torch.get_num_threads() == 2


def test_workers_on_one_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 12)
    monkeypatch.setattr(cpu_module, "available_memory", lambda: 5 * GIB)
    monkeypatch.setattr(cpu_threads, "_TORCH_THREADS", 12)
    for ranks, threads in ((1, 12), (2, 6), (5, 2), (16, 1)):
        device = open_device(worker_config(place=Place(local_ranks=ranks)))
        assert isinstance(device, Cpu)
        assert device.threads == threads
        assert device.cache_budget(None, 0).nbytes == 2 * GIB // ranks


@pytest.mark.parametrize(
    ("share", "ranks", "gib"),
    [
        (0.5, 1, 50 - 2),  # less the weights
        (0.5, 2, 25 - 2),
        (0.9, 1, 60 - 3),  # no more than is available and a step leaves
        (0.9, 2, 30 - 3),
        (0.01, 1, 0),
    ],
)
def test_a_chosen_share_of_memory_is_for_weights_and_cache(
    share: float, ranks: int, gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_module, "total_memory", lambda: 100 * GIB)
    monkeypatch.setattr(cpu_module, "available_memory", lambda: 60 * GIB)
    device = Cpu(1, ranks)
    device.after_loading([torch.empty(GIB, dtype=torch.uint8)] * 2)
    budget = device.cache_budget(share, reserve=3 * GIB)
    beside_the_weights = (100 // ranks - 2) * GIB
    assert budget == CacheBudget(gib * GIB, "--gpu-memory-utilization", beside_the_weights)


def test_torch_has_all_threads_where_nothing_was_packed() -> None:
    device = Cpu(2)
    packed = device.kernels["pack"](torch.randn(4, 4))
    half = device.kernels["pack"](torch.randn(4, 4).half())
    device.after_loading([half, packed])
    assert torch.get_num_threads() == 1
    device.after_loading([half])
    assert torch.get_num_threads() == 2


def test_quantization_is_what_pack_does(caplog: pytest.LogCaptureFixture) -> None:
    device = open_device(worker_config(quantization="int8"))
    weight = torch.randn(64, 1024)
    packed = ops.pack(weight)
    assert packed.nbytes == weight.nbytes / 4 + 64 * 1024 / 128 * 2
    with caplog.at_level(logging.INFO):
        device.after_loading([packed, torch.empty(1 << 20)])
    assert "quantization int8: 4 MiB of weights became 4 MiB" in caplog.text
    with pytest.raises(ValueError, match="runs on that of transformers: leave the option out"):
        device.after_loading([weight])
    open_device(worker_config())
    assert ops.pack(weight).nbytes == weight.nbytes


def test_quantization_without_the_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operations, "choose_kernels", lambda: (None, torch_operations.TABLE))
    open_device(worker_config(quantization="int4"))
    torch.manual_seed(0)  # some numbers are rounded a little worse than these
    weight, x = torch.randn(64, 128), torch.randn(3, 128)
    packed = ops.pack(weight)
    assert packed.nbytes == weight.nbytes / 8 + 64 * 4 * 2
    off = ops.linear(x, packed) - reference.linear(x, weight)
    assert off.norm() < 0.1 * reference.linear(x, weight).norm()
    assert "save memory here, but cost time" in caplog.text


def test_kernels_that_quantize_wrongly_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    operations.choose_kernels()  # that the others are right
    monkeypatch.setattr(operations, "wrong", lambda table, specified: ["linear"])
    monkeypatch.setattr(operations, "check_quantizing", operations.check_quantizing.__wrapped__)  # once more
    assert operations.open_kernels(1, "int8")["linear"] is torch_operations.linear


def test_a_cache_gets_zeroed_writable_memory_of_the_asked_size() -> None:
    memory = Cpu(1).allocate(3 << 20)
    assert memory.nbytes == 3 << 20
    assert not memory.any()
    memory[-1] = 1
