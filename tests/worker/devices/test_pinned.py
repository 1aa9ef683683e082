"""Weights through pinned buffers, to a card that is the host's memory and copies as late as it may."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from drive import Driver, RankGroup, ThreadGroup
from gguf_pairs import Recipe as GgufRecipe
from gguf_pairs import write_pair as write_gguf_pair
from packed import Recipe, write_pair
from tiny import tiny_checkpoint
from torch import Tensor

from models import ops
from models.checkpoint.files import Upload
from models.config import read_config
from models.gguf.folder import make_folder
from models.loader import LoadOptions, load_model
from models.model import ServedModel
from models.parallel.parallel import Parallel
from worker.devices import pinned
from worker.devices.pinned import PinnedUpload, pinned_upload

HOST = torch.device("cpu")


class LateCopies:
    """A stream of copies, in their order. What becomes of the buffers is noted in `log`."""

    def __init__(self, *, late: bool = True) -> None:
        """`late`: False makes a copy when it is started, and spoils its buffer when it is waited for."""
        self.log: list[str] = []
        self.buffers = 0
        self._late = late
        self._left: deque[tuple[Tensor, Tensor]] = deque()
        self._started = self._made = 0

    def make_buffer(self, nbytes: int) -> Tensor:
        self.buffers += 1
        return torch.full([nbytes], 255, dtype=torch.uint8)

    def start(self, held: Tensor, place: Tensor) -> LateCopy:
        self._started += 1
        self.log.append(f"start {self._started}")
        self._left.append((held, place))
        if not self._late:
            place.copy_(held)
        return LateCopy(self, self._started)

    def wait(self, number: int) -> None:
        """Make all copies up to that of this number."""
        self.log.append(f"wait {number}")
        while self._made < number:
            held, place = self._left.popleft()
            if self._late:
                place.copy_(held)
            held.view(-1).view(torch.uint8).fill_(255)
            self._made += 1

    def finish(self) -> None:
        self.wait(self._started)


class LateCopy:
    def __init__(self, copies: LateCopies, number: int) -> None:
        self._copies, self._number = copies, number

    def synchronize(self) -> None:
        self._copies.wait(self._number)


@contextmanager
def late_upload(copies: LateCopies, buffer_bytes: int) -> Iterator[PinnedUpload]:
    with ThreadPoolExecutor(2, thread_name_prefix="read-weights") as threads:
        yield PinnedUpload(HOST, threads, copies.start, copies.make_buffer, buffer_bytes)


PROMPT = [7, 30, 299, 4, 18, 18, 120]

CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "rows": lambda x: x[3:31],
    "columns": lambda x: x[:, 5:18],
    "one column": lambda x: x[:, 7:8],
    "turned": lambda x: x.t(),
    "columns of it turned": lambda x: x[:, 5:18].t(),
    "of a stack": lambda x: x.view(4, 10, 24)[2, :, 3:9],
    "a vector": lambda x: x[1],
    "a vector with gaps": lambda x: x[:, 1],
    "a number": lambda x: x[1, 1],
    "nothing": lambda x: x[5:5],
    "the same row": lambda x: x[1].expand(40, 24),
}

TYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float64, torch.float32),
    (torch.int64, torch.int64),
    (torch.int32, torch.int32),
    (torch.uint8, torch.uint8),
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.float8_e8m0fnu, torch.float8_e8m0fnu),
    (torch.float8_e4m3fn, torch.bfloat16),
]


@pytest.fixture(autouse=True)
def _by_the_reference() -> None:  # pyright: ignore[reportUnusedFunction]
    ops.use({})


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize(("stored", "wanted"), TYPES, ids=lambda kind: str(kind).removeprefix("torch."))
@pytest.mark.parametrize("cut", CUTS)
def test_every_piece_has_the_bits_of_the_file(
    cut: str, stored: torch.dtype, wanted: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers of 104 bytes hold less than a row, and threads take 16 bytes at a time."""
    monkeypatch.setattr(pinned, "_AT_ONCE", 16)
    numbers = torch.randn(40, 24, generator=torch.Generator().manual_seed(1)) * 9
    file = numbers.to(stored) if stored.is_floating_point else numbers.int().to(stored)
    reads = [CUTS[cut](file), CUTS[cut](file.flip(0))]
    copies = LateCopies()
    with late_upload(copies, 104) as upload:
        brought = [upload(read, wanted, lambda done: None) for read in reads]
    copies.finish()
    for read, tensor in zip(reads, brought, strict=True):
        assert (tensor.shape, tensor.dtype) == (read.shape, wanted)
        assert tensor.is_contiguous()
        assert bits(tensor) == bits(read.to(wanted))


def test_a_buffer_is_filled_while_the_other_is_copied() -> None:
    copies = LateCopies()
    with late_upload(copies, 64) as upload:
        upload(torch.randn(48), torch.float32, lambda done: None)
        upload(torch.randn(20), torch.float32, lambda done: None)
    assert copies.log == ["start 1", "start 2", "wait 1", "start 3", "wait 2", "start 4", "wait 3", "start 5"]
    assert copies.buffers == 2


def test_progress_is_told_after_each_piece() -> None:
    told: list[float] = []
    with late_upload(LateCopies(), 64) as upload:
        upload(torch.randn(40), torch.float32, told.append)
    assert told == [64 / 160, 128 / 160, 1.0]


class TestThreads:
    @pytest.fixture(autouse=True)
    def _card(self, monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
        copies = LateCopies()
        monkeypatch.setattr(pinned, "_AT_ONCE", 16)
        monkeypatch.setattr(pinned, "_pinned_memory", copies.make_buffer)
        monkeypatch.setattr(pinned, "_start_copy", copies.start)

    @staticmethod
    def running() -> int:
        return sum(thread.name.startswith("read-weights") for thread in threading.enumerate())

    def test_they_end_with_loading(self) -> None:
        with pinned_upload(HOST) as upload:
            upload(torch.randn(100), torch.float32, lambda done: None)
            assert self.running() > 0
        assert self.running() == 0

    @pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
    def test_they_end_when_loading_fails(self, error: type[BaseException]) -> None:
        def fail(done: float) -> None:
            assert self.running() > 0
            raise error

        with pytest.raises(error), pinned_upload(HOST) as upload:
            upload(torch.randn(100), torch.float32, fail)
        assert self.running() == 0

    def test_there_are_none_for_dummy_weights(self, tmp_path: Path) -> None:
        folder = tiny_checkpoint("LlamaForCausalLM", tmp_path)
        with pinned_upload(HOST) as upload:
            load(folder, upload, load_format="dummy")
            assert self.running() == 0


def load(
    folder: Path,
    upload: Upload | None,
    dtype: torch.dtype = torch.float32,
    load_format: str = "auto",
    parallel: Parallel = Parallel(),
) -> ServedModel:
    options = LoadOptions(
        read_config(folder), folder, dtype=dtype, load_format=load_format, parallel=parallel
    )
    return load_model(options, upload)


@contextmanager
def small_upload() -> Iterator[Upload]:
    """An upload whose tensors can be used at once, through buffers smaller than most of them."""
    with late_upload(LateCopies(late=False), 1000) as upload:
        yield upload


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "plain": lambda folder: tiny_checkpoint("LlamaForCausalLM", folder),
    "transposed": lambda folder: tiny_checkpoint("GPT2LMHeadModel", folder),
    "experts in one tensor": lambda folder: tiny_checkpoint("GptOssForCausalLM", folder),
    "gptq": lambda folder: packed(folder, Recipe(method="gptq", group=32, act_order=True)),
    "awq": lambda folder: packed(folder, Recipe(method="awq", group=32, symmetric=False)),
    "gguf": lambda folder: gguf(folder, GgufRecipe("Q8_0", {"attn_k": "F16"})),
}


def packed(folder: Path, recipe: Recipe) -> Path:
    return write_pair(folder, recipe, hidden_size=64, intermediate_size=96).packed


def gguf(folder: Path, recipe: GgufRecipe) -> Path:
    file = write_gguf_pair(folder, "LlamaForCausalLM", recipe, hidden_size=64, intermediate_size=96).file
    return make_folder(file, file.parent)


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_models_are_the_same(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = CHECKPOINTS[kind](tmp_path)
    with small_upload() as upload:
        uploaded = load(folder, upload, dtype)
    mapped = load(folder, None, dtype)
    weights, expected = (dict(model.named_parameters()) for model in (uploaded, mapped))
    assert weights.keys() == expected.keys()
    assert all(bits(weights[name]) == bits(expected[name]) for name in weights)
    logits = [Driver([model]).step({0: PROMPT})[0] for model in (uploaded, mapped)]
    assert torch.equal(*logits)


def test_ranks_get_their_pieces(tmp_path: Path) -> None:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path, vocab_size=256)
    group = ThreadGroup(2)
    for rank in range(2):
        place = Parallel(rank, 2, RankGroup(group, rank))
        with small_upload() as upload:
            uploaded = load(folder, upload, parallel=place)
        pairs = zip(uploaded.parameters(), load(folder, None, parallel=place).parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
