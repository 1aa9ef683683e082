"""The choice of device and of number type."""

import logging
import warnings
from typing import Any

import pytest
import torch
from msgspec import structs
from sizes import MODEL, worker_config

from models import ops
from models.config import ConfigError
from models.conversion.conversion_choice import Conversion, Runner
from models.ops import reference
from models.weight_coding import SavedQuantization
from worker.config import Place, WorkerConfig
from worker.devices import device_choice
from worker.devices.base import Device
from worker.devices.cpu import Cpu
from worker.devices.cuda import Cuda
from worker.devices.device_choice import open_device
from worker.devices.dtype_choice import choose_cache_dtype, choose_dtype
from worker.host import nvidia
from worker.kernels.cpu import operations
from worker.kernels.cuda.capabilities import Card


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_cuda")
def test_auto_is_the_cpu_where_there_is_no_cuda(caplog: pytest.LogCaptureFixture) -> None:
    assert open_device(worker_config(device="auto")).name == "cpu"
    assert "served on the CPU" not in caplog.text
    with pytest.raises(ValueError, match=r"no NVIDIA card is here: .* pass --device cpu"):
        open_device(worker_config(device="cuda"))


@pytest.mark.usefixtures("no_cuda")
def test_memory_of_the_host_is_for_what_a_card_forgets() -> None:
    with pytest.raises(
        ValueError, match=r"a CPU's cache .* anyway: raise --kv-cache-memory-bytes"
    ) as refused:
        open_device(worker_config(device="auto", kv_offloading_size=4.0))
    assert len(str(refused.value)) < 200, "the last line of a failed start is no longer"


TOO_OLD = "the NVIDIA driver is 550.54.14, and this torch, built for CUDA 13.0, needs 580 or newer"


@pytest.mark.usefixtures("no_cuda")
def test_a_card_that_cannot_be_used_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nvidia, "why_unusable", lambda cuda: TOO_OLD)
    with pytest.raises(ValueError, match=f"^--device cuda was asked for, but {TOO_OLD}$"):
        open_device(worker_config(device="cuda"))
    assert open_device(worker_config(device="auto")).name == "cpu"
    assert caplog.messages == [f"the model is served on the CPU: {TOO_OLD}"]
    caplog.clear()
    open_device(worker_config(device="cpu"))
    open_device(worker_config(device="auto", place=Place(tensor_size=2, local_rank=1, local_ranks=2)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    open_device(worker_config(device="auto"))
    assert caplog.messages == [], "the CPU was asked for, or the first worker says it, or cards are hidden"
    with pytest.raises(ValueError, match="but CUDA_VISIBLE_DEVICES hides all cards"):
        open_device(worker_config(device="cuda"))


def test_torch_tells_what_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is there and should work, but does not."""

    def is_available() -> bool:
        warnings.warn("CUDA initialization: Error 802: system not yet initialized", stacklevel=1)
        return False

    def init() -> None:
        raise RuntimeError("Error 802: system not yet initialized\nand more lines")

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(nvidia, "why_unusable", lambda cuda: None)
    monkeypatch.setattr(nvidia, "cards_here", lambda: ["/dev/nvidia0"])
    with pytest.raises(
        ValueError, match="torch cannot use the NVIDIA card: Error 802: system not yet initi"
    ) as told:
        open_device(worker_config(device="cuda"))
    assert "more lines" not in str(told.value)


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


@pytest.mark.parametrize(("own", "head_dim"), [(16, 16), (1, 64)])  # Mamba has no heads
def test_kernels_are_proved_with_the_width_of_the_models_heads(
    monkeypatch: pytest.MonkeyPatch, own: int, head_dim: int
) -> None:
    made: list[int] = []

    def make(config: WorkerConfig, head_dim: int, *, fp8: bool) -> Cpu:
        made.append(head_dim)
        return Cpu(1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device_choice, "Cuda", make)
    open_device(worker_config(device="cuda", model=structs.replace(MODEL, head_dim=own)))
    assert made == [head_dim]


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("method", "asked", "bits"),
    [
        ("gguf", {"dtype": "bfloat16"}, 8),
        ("gguf", {"dtype": "float32"}, None),
        ("gguf", {"dtype": "bfloat16", "quantized_inputs": "16"}, 16),
        ("gptq", {"dtype": "bfloat16"}, None),
        ("gptq", {"quantized_inputs": "8"}, 8),
    ],
)
def test_inputs_of_files_are_rounded_to_bytes(
    monkeypatch: pytest.MonkeyPatch, method: str, asked: dict[str, str], bits: int | None
) -> None:
    given: list[int | None] = []
    monkeypatch.setattr(device_choice, "Cpu", lambda *arguments: given.append(arguments[3]) or Cpu(1))
    fields = {
        "gguf": {"codings": {"model.layers.0.mlp.up_proj": "Q4_0"}},
        "gptq": {"bits": 4, "group_size": 32},
    }
    saved = SavedQuantization("config.json", {"quant_method": method, **fields[method]})
    open_device(worker_config(model=structs.replace(MODEL, quantization=saved), **asked))
    assert given == [bits]


@pytest.mark.usefixtures("no_cuda")
def test_inputs_of_plain_matrices_are_not_rounded_by_option() -> None:
    with pytest.raises(ValueError, match="leave it out, or choose --quantization int8-dynamic"):
        open_device(worker_config(quantized_inputs="8"))


@pytest.mark.usefixtures("no_cuda")
def test_fp8_is_made_on_cuda_alone() -> None:
    with pytest.raises(ValueError, match="fp8 is made on CUDA alone: choose int8"):
        open_device(worker_config(quantization="fp8"))


def test_dtype_is_the_checkpoints_unless_asked() -> None:
    device = Cpu(1)
    assert choose_dtype(worker_config(), device) == torch.float32
    assert choose_dtype(worker_config(dtype="bfloat16"), device) == torch.bfloat16
    with pytest.raises(ValueError, match="'int8': pass --dtype with one of float32, bfloat16, float16"):
        choose_dtype(worker_config(dtype="int8"), device)


def test_a_checkpoint_in_float16_is_served_in_bfloat16(caplog: pytest.LogCaptureFixture) -> None:
    model = structs.replace(MODEL, dtype="float16")
    with caplog.at_level(logging.INFO):
        assert choose_dtype(worker_config(model=model), Cpu(1)) == torch.bfloat16
    assert "is served in bfloat16, and most exactly with --dtype float32" in caplog.text
    assert choose_dtype(worker_config(model=model, dtype="float32"), Cpu(1)) == torch.float32


def test_float16_on_the_cpu_works_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_dtype(worker_config(dtype="float16"), Cpu(1)) == torch.float16
    assert "--dtype" in caplog.text


def card(capability: int) -> Cuda:
    """A card of which only the name and the capability are known."""
    device = object.__new__(Cuda)
    device.name = "cuda (a card)"
    device._card = Card(capability, 1)  # pyright: ignore[reportPrivateUsage]
    return device


@pytest.mark.parametrize(
    ("architecture", "runner", "capability", "expected"),
    [
        ("BertModel", "pooling", 90, torch.float16),
        ("Gemma3TextModel", "pooling", 90, torch.bfloat16),
        ("LlamaForCausalLM", "generate", 80, torch.bfloat16),
        ("LlamaForCausalLM", "generate", 75, torch.float16),
    ],
)
def test_a_card_computes_files_in_float32_with_16_bits(
    caplog: pytest.LogCaptureFixture,
    architecture: str,
    runner: Runner,
    capability: int,
    expected: torch.dtype,
) -> None:
    model = structs.replace(MODEL, architecture=architecture)
    served = Conversion(runner=runner, convert="none", architecture=architecture)
    config = structs.replace(worker_config(), model=model, conversion=served)
    with caplog.at_level(logging.INFO):
        assert choose_dtype(config, card(capability)) == expected
    assert "pass --dtype float32 for exact results" in caplog.text
    exact = structs.replace(config, options=structs.replace(config.options, dtype="float32"))
    assert choose_dtype(exact, card(capability)) == torch.float32


def test_a_card_without_bfloat16_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match=r"capability 7\.5 and bfloat16 needs 8\.0: pass --dtype float16"):
        choose_dtype(worker_config(dtype="bfloat16"), card(75))


def test_the_cache_has_the_type_of_the_model_unless_asked() -> None:
    def choose(device: Device, asked: str) -> torch.dtype:
        return choose_cache_dtype(worker_config(kv_cache_dtype=asked), device, torch.bfloat16)

    assert choose(Cpu(1), "auto") == torch.bfloat16
    assert choose(card(90), "fp8") == choose(card(89), "fp8_e4m3") == torch.float8_e4m3fn
    assert choose(card(80), "fp8_e5m2") == torch.float8_e5m2
    assert choose(Cpu(1), "int8") == choose(Cpu(1), "int8_per_token_head") == torch.int8
    with pytest.raises(ValueError, match=r"is for CUDA devices .* on the CPU pass int8, which is as small"):
        choose(Cpu(1), "fp8")
    with pytest.raises(ValueError, match="int8 is for the CPU: fp8 is a cache of 8 bits on CUDA"):
        choose(card(90), "int8")
    with pytest.raises(
        ValueError, match=r"needs compute capability 8\.9, and .* has 8\.6: pass fp8_e5m2, or"
    ):
        choose(card(86), "fp8")
    with pytest.raises(ValueError, match=r"needs compute capability 8\.0, and .* has 7\.5: leave it out"):
        choose(card(75), "fp8_e5m2")
    latent = structs.replace(MODEL, raw={"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    with pytest.raises(ValueError, match=r"caches latents, .* leave it out"):
        choose_cache_dtype(worker_config(model=latent, kv_cache_dtype="fp8"), card(90), torch.bfloat16)
    with pytest.raises(ValueError, match=r"caches latents, .* leave it out"):
        choose_cache_dtype(worker_config(model=latent, kv_cache_dtype="int8"), Cpu(1), torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"'int4': choose auto, int8, fp8, fp8_e4m3, fp8_e5m2, or .* bfloat16"
    ):
        choose(card(90), "int4")
    assert choose(card(90), "bfloat16") == torch.bfloat16
    with pytest.raises(ValueError, match="unknown --kv-cache-dtype 'float16'"):
        choose(card(90), "float16")


def test_a_checkpoint_may_ask_for_a_small_cache(caplog: pytest.LogCaptureFixture) -> None:
    """The cache follows the scheme of compressed-tensors with "auto", as in vLLM, if there is fp8."""
    caplog.set_level(logging.INFO)

    def choose(
        device: Device, asked: str = "auto", raw: dict[str, Any] | None = None, **scheme: object
    ) -> torch.dtype:
        fields = {"config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float", **scheme}}
        saved = SavedQuantization("config.json: quantization_config", fields)
        model = structs.replace(MODEL, quantization=saved, raw=raw or {})
        return choose_cache_dtype(worker_config(model=model, kv_cache_dtype=asked), device, torch.bfloat16)

    small = torch.float8_e4m3fn
    assert choose(card(89)) == choose(card(90), strategy="tensor") == choose(card(90), "fp8") == small
    assert "the KV cache is in fp8, as the checkpoint asks: --kv-cache-dtype bfloat16 keeps" in caplog.text
    assert choose(card(90), "bfloat16") == torch.bfloat16
    cases: list[tuple[Device, dict[str, Any], str]] = [
        (Cpu(1), {}, "fp8, which caches on a CPU do not have"),
        (card(86), {}, "fp8, which needs compute capability 8.9"),
        (card(90), {"strategy": "attn_head"}, "a scale for each head, and one for each layer alone is known"),
        (card(90), {"type": "int"}, "numbers of 8 bits of the type 'int', and fp8 alone is known"),
        (card(90), {"raw": {"kv_lora_rank": 512, "qk_rope_head_dim": 64}}, "and this model caches latents"),
    ]
    for device, scheme, said in cases:
        assert choose(device, **scheme) == torch.bfloat16
        assert said in caplog.text
    with pytest.raises(
        ValueError, match=r"'kv_cache_scheme' has a scale for each head, .*: leave the option"
    ):
        choose(card(90), "fp8", strategy="attn_head")
    with pytest.raises(ConfigError, match="'kv_cache_scheme': Expected `int`, got `str`"):
        choose(card(90), num_bits="8")
