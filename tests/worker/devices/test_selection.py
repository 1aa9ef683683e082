"""The choice of device and of number type."""

from __future__ import annotations

import logging

import pytest
import torch
from msgspec import structs
from sizes import MODEL, worker_config

from models import ops
from models.ops import reference
from models.quantization.saved import SavedQuantization
from worker.devices.cpu import Cpu
from worker.devices.selection import choose_dtype, open_device
from worker.kernels.cpu import operations


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


def test_a_quantized_checkpoint_in_float16_is_served_in_bfloat16(caplog: pytest.LogCaptureFixture) -> None:
    saved = SavedQuantization("config.json", {"quant_method": "gptq"})
    model = structs.replace(MODEL, dtype="float16", quantization=saved)
    with caplog.at_level(logging.INFO):
        assert choose_dtype(worker_config(model=model), Cpu(1)) == torch.bfloat16
    assert "is served in bfloat16, and most exactly with --dtype float32" in caplog.text
    assert choose_dtype(worker_config(model=model, dtype="float32"), Cpu(1)) == torch.float32


def test_float16_on_the_cpu_works_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_dtype(worker_config(dtype="float16"), Cpu(1)) == torch.float16
    assert "--dtype" in caplog.text
