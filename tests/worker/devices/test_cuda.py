"""What a CUDA device says of itself, as far as no card is needed to ask."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from sizes import MODEL, worker_config

from models.layers.attention import Attention
from models.layers.latent_attention import LatentAttention, LatentSpec
from models.parallel.rank_shares import Span
from worker.capacity import GIB
from worker.devices.base import plain_attention_bytes
from worker.devices.cuda import Cuda, _await, most_graph_tokens
from worker.sampling.top_k_top_p import draw_fully

interpreted = pytest.importorskip("interpreted")

from worker.kernels.cuda import kernel_self_test, operations  # noqa: E402
from worker.kernels.cuda.capabilities import Card  # noqa: E402
from worker.kernels.cuda.draw_kernel import draw  # noqa: E402


@pytest.fixture
def device() -> Cuda:
    """A device whose card is the host."""
    made = Cuda.__new__(Cuda)
    made.target, made._card, made._head_dim = torch.device("cpu"), Card(90, 132), 64
    made.kernels = operations.cuda_operations(made._card)
    made._most_cache_bytes = None
    return made


ANSWERS: dict[str, Callable[..., bool]] = {
    "right": lambda: True,
    "wrong": lambda: False,
    "fails": lambda: raise_(RuntimeError("misaligned address\nat a line")),
}


def raise_(error: Exception) -> bool:
    raise error


def proving(monkeypatch: pytest.MonkeyPatch, **answers: str) -> None:
    """Let these operations be proved with such answers, and the draw be right."""
    cases = [
        SimpleNamespace(name=name, agrees=lambda *_, of=of: ANSWERS[of]()) for name, of in answers.items()
    ]
    monkeypatch.setattr(kernel_self_test, "cases_on", lambda *given: cases)
    monkeypatch.setattr(kernel_self_test, "draws_right", lambda target: True)


@pytest.mark.parametrize("draws", [True, False])
def test_what_is_wrong_or_fails_is_left_to_torch_and_stops_no_start(
    device: Cuda, draws: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proving(monkeypatch, rms_norm="wrong", attention="fails", gate="right")
    monkeypatch.setattr(kernel_self_test, "draws_right", lambda target: draws)
    monkeypatch.setattr(device, "lost", lambda error: False)
    device._prove(torch.bfloat16, None, int)
    assert {"rms_norm", "attention", "gate"}.intersection(device.kernels) == {"gate"}
    assert device.draw is (draw if draws else draw_fully)
    assert "rms_norm differs on this card" in caplog.text
    assert "attention fails on this card, so torch does it: misaligned address\n" in caplog.text


def test_a_card_that_a_proof_breaks_is_refused_in_one_sentence(
    device: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    proving(monkeypatch, rms_norm="right", attention="fails")
    monkeypatch.setattr(device, "lost", lambda error: True)
    with pytest.raises(ValueError, match="failed while the kernel for attention was being proved") as refused:
        device._prove(torch.bfloat16, None, int)
    assert "\n" not in str(refused.value)


def test_ranks_have_the_same_kernels(
    device: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another rank is asked what it has found before this one is, in the same order."""
    every = sorted([*device.kernels, kernel_self_test.DRAW])
    others: list[int] = [0, *[int(name not in ("gate", "draw")) for name in every]]
    asked = iter(others)
    proving(monkeypatch, rms_norm="wrong")
    device._prove(torch.bfloat16, None, lambda own: min(own, next(asked)))
    assert {"gate", "rms_norm", "activation"}.intersection(device.kernels) == {"activation"}
    assert device.draw is draw_fully
    assert "torch does draw, gate, too" in caplog.text
    assert next(asked, None) is None


QWEN_0_6B = {"hidden_size": 1024, "raw": {"intermediate_size": 3072}}
MINI_LM = {"hidden_size": 384, "raw": {"intermediate_size": 1536}}
QWEN_4B = {"hidden_size": 2560, "raw": {"intermediate_size": 9728}}
LLAMA_8B = {"hidden_size": 4096, "raw": {"intermediate_size": 14336}}


@pytest.mark.parametrize(
    ("model", "major", "asked", "tokens"),
    [
        (QWEN_0_6B, 9, {}, 2048),
        (QWEN_0_6B, None, {}, 512),
        (QWEN_0_6B, 9, {"max_num_batched_tokens": 700}, 700),
        (QWEN_0_6B, 9, {"max_cudagraph_capture_size": 32}, 32),
        (QWEN_0_6B, 9, {"max_cudagraph_capture_size": 0}, 0),
        (QWEN_0_6B, 9, {"max_cudagraph_capture_size": 32, "enforce_eager": True}, 0),
        (MINI_LM, 9, {}, 8192),
        (QWEN_4B, 9, {}, 1280),
        (QWEN_4B, 8, {}, 512),
        (LLAMA_8B, 9, {}, 512),
        (LLAMA_8B, 8, {}, 512),
    ],
)
def test_graphs_are_as_large_as_steps_for_which_a_host_launches_longer_than_the_card_computes(
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    major: int | None,
    asked: dict[str, Any],
    tokens: int,
) -> None:
    """`major`: the capability of a large card; None: the card is a small one."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda target: (major, 0))
    config = worker_config(model=structs.replace(MODEL, **model), **asked)
    assert most_graph_tokens(config, None if major is None else torch.device("cuda")) == tokens


def test_what_other_processes_hold_counts_only_if_it_leaves_less_than_the_share(
    device: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"free": 80 * GIB, "own": 2 * GIB}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda target: (held["free"], 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda target: held["own"])

    def budget(share: float | None) -> int:
        return device.cache_budget(share, reserve=GIB).nbytes

    alone = budget(0.25)
    assert alone == 80 * GIB // 4 - 2 * GIB - GIB - GIB, "less what torch holds, the context, and a step"
    held["free"] = 30 * GIB
    assert budget(0.25) == alone, "another server's memory is not taken from the share"
    held["free"] = 10 * GIB
    assert budget(0.25) == 9 * GIB, "no more than there is"
    held["own"] = 40 * GIB
    assert budget(0.25) == 0


def test_one_of_several_models_leaves_memory_to_the_others(
    device: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda target: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda target: 6 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda target: 5 * GIB)
    monkeypatch.setattr(device, "_most_cache_bytes", 4 * GIB)
    assert device.cache_budget(None, reserve=GIB).nbytes == 4 * GIB
    assert device.cache_budget(0.5, reserve=GIB).nbytes == (40 - 6 - 1 - 1) * GIB, "what was asked for counts"
    assert device.held_bytes(reserve=3 * GIB) == (5 + 3 + 1) * GIB, "with a step, and the context"
    assert device.held_bytes(reserve=0) == (6 + 1) * GIB, "what torch holds is taken"


def test_a_device_that_still_computes_is_not_lost(device: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda target: None)
    assert not device.lost(RuntimeError("odd input"))


@pytest.mark.parametrize(
    ("probed", "lost"),
    [
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
    ],
)
def test_the_probe_of_a_device_decides(
    device: Cuda, monkeypatch: pytest.MonkeyPatch, probed: Exception, lost: bool
) -> None:
    def synchronize(target: torch.device) -> None:
        raise probed

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert device.lost(RuntimeError("whatever the class of this one is")) == lost


def test_who_waits_names_the_device_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Done:
        def synchronize(self) -> None:
            calls.append("waits")

    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    target = torch.device("cuda", 1)
    assert _await(torch.ones(2), Done(), target).tolist() == [1, 1]  # pyright: ignore[reportArgumentType]
    assert calls == [target, "waits"]


def layer(head_dim: int) -> Attention:
    return Attention(heads=8, kv_heads=2, head_dim=head_dim, scale=1.0)


def test_masks_take_memory_only_where_torch_attends(device: Cuda) -> None:
    device._card = Card(90, 132)  # pyright: ignore[reportPrivateUsage]
    device.kernels = {"attention": lambda: None}
    sizes = (8192, 131072, torch.bfloat16)
    own = device.attention_bytes([layer(128)], *sizes)
    assert own < 512 << 20
    for layers, kernels in (([layer(128), layer(1024)], device.kernels), ([layer(128)], {})):
        device.kernels = kernels
        assert device.attention_bytes(layers, *sizes) == plain_attention_bytes(layers, *sizes) > own


def test_latents_take_the_memory_of_queries_and_sums_as_wide_as_they_are(device: Cuda) -> None:
    device._card = Card(90, 132)  # pyright: ignore[reportPrivateUsage]
    device.kernels = {"latent_attention": lambda: None}
    sizes = (8192, 131072, torch.bfloat16)
    spec = LatentSpec(query_rank=None, rank=512, nope=128, rope=64, value=128)
    layers = [LatentAttention(Span.whole(16), spec, scale=1.0)]
    own = device.attention_bytes(layers, *sizes)
    wide = 8192 * 16 * 2 * (512 + 512 + 64)
    assert wide < own < wide + (512 << 20)
    device.kernels = {}
    assert device.attention_bytes(layers, *sizes) == plain_attention_bytes(layers, *sizes)


class Stream:
    """A stream of torch that does all at once, and notes it."""

    log: list[str]

    def __init__(self, name: object = "beside") -> None:
        self.name = name if isinstance(name, str) else "beside"

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.at}")


class Event:
    def __init__(self, *, blocking: bool) -> None:
        assert blocking
        self.at = ""

    def record(self, stream: Stream) -> None:
        self.at = f"{stream.name} {len(stream.log)}"
        stream.log.append(f"mark {self.at}")

    def synchronize(self) -> None:
        Stream.log.append(f"wait for {self.at}")


@contextmanager
def on(stream: Stream) -> Generator[None]:
    stream.log.append(f"on {stream.name}")
    yield


def test_blocks_travel_on_a_stream_of_their_own(device: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: pinned.update({address: nbytes}) or flags,
        cudaHostUnregister=lambda address: pinned.pop(address),
    )
    changes: dict[str, object] = {
        "current_stream": lambda _: Stream("steps"),
        "Stream": Stream,
        "Event": Event,
        "stream": on,
        "set_device": lambda _: None,
        "cudart": lambda: runtime,
        "check_error": lambda code: None if code == 0 else raise_(RuntimeError("not pinned")),
    }
    for name, change in changes.items():
        monkeypatch.setattr(torch.cuda, name, change)
    monkeypatch.setattr(Stream, "log", [], raising=False)
    part = torch.arange(60.0).view(5, 12)
    copies = device.host_copies([part], 480)
    assert copies is not None and (copies.slots, copies.record_bytes) == (10, 48)
    while copies.ready < 10:
        time.sleep(0.001)
    assert [*pinned.values()] == [480]
    copies.save([1, 2], [0, 7]).synchronize()
    copies.bring([7], [4]).synchronize()
    copies.guard()
    assert torch.equal(part[4], part[2])
    assert Stream.log == [
        *("on steps", "mark steps 1", "beside waits for steps 1", "on beside", "mark beside 4"),
        "wait for beside 4",
        *("mark steps 6", "on beside", "beside waits for steps 6", "on beside", "mark beside 10"),
        *("wait for beside 10", "steps waits for beside 10"),
    ]
    copies.close()
    assert not pinned
