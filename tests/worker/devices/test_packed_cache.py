"""Packed weights in the cache folder: mapped ones are the packed ones bit by bit, or are not used at all."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf_pairs
import pytest
import torch
from drive import Driver, run_in_chunks
from packed import Recipe, write_pair
from packed_floats import write_floats
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint
from torch import Tensor

from models import ops
from models.checkpoint.weights import Reading
from models.config import read_config
from models.gguf.folder import make_folder
from models.loader import EarlierLoad, LoadOptions
from models.parallel.parallel import Parallel
from worker.cache_tiers import block_folder
from worker.cache_tiers.block_folder import BlockFolder
from worker.devices import packed_cache
from worker.devices.cpu import Cpu
from worker.devices.packed_cache import PackedCache, PackedMatrices, find_packed, write_packed
from worker.kernels.cpu.packing import Packed
from worker.model_loading import load_weights

FORMS = [b"first", b"second"]
PROMPT = list(range(5, 28))
Q4_K_M = gguf_pairs.Recipe("Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output.": "Q6_K"})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 1)


def options_of(folder: Path) -> LoadOptions:
    return LoadOptions(read_config(folder), folder, dtype=torch.float32)


def matrices() -> PackedMatrices:
    packed = PackedMatrices()
    for form in FORMS:
        packed.add(form, torch.arange(5000).to(torch.uint8))
    return packed


def kept_in(tmp_path: Path, identity: str = "one", budget: int = 1 << 30) -> BlockFolder:
    folder = BlockFolder(tmp_path, identity, budget, "packed")
    assert write_packed(folder, matrices())
    return folder


def files(tmp_path: Path, ending: str = "*.blocks") -> list[Path]:
    return sorted(tmp_path.rglob(ending))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_mapped_weights_are_the_packed_ones(
    checkpoint: Path, tmp_path: Path, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "cache_folder", lambda: tmp_path)
    first, second = load_twice(checkpoint, quantization)
    assert first[0] == second[0] and len(first[0]) > 4 and len(files(tmp_path)) == 1


def load_twice(checkpoint: Path, quantization: str | None = None) -> list[tuple[list[bytes], Tensor, bool]]:
    """Load a model, keep its weights, load it again.

    Returns its matrices, logits, and whether what has to be converted was read.
    """
    found: list[tuple[list[bytes], Tensor, bool]] = []
    for mapped in (False, True):
        device = Cpu(1, quantization=quantization, packed_gib=1.0)
        ops.use(device.kernels)
        with noted_reads() as read:
            model = load_weights(options_of(checkpoint), device, lambda *_: None)
        assert bool(device.mapped_bytes) is mapped
        writer = device._packed.save() if device._packed else None  # pyright: ignore[reportPrivateUsage]
        if writer:
            writer.join(30)
        packed = [each for each in model.parameters() if isinstance(each, Packed)]
        bits = [each.detach().numpy().tobytes() for each in packed]
        found.append((bits, run_in_chunks(Driver([model]), 0, PROMPT, 7), any(read)))
    return found


@contextmanager
def noted_reads() -> Iterator[list[bool]]:
    """Note of each tensor that is taken whether it was read to be converted and packed."""
    read, take = list[bool](), Reading.take

    def noting(reading: Reading, *given: Any, to_pack: bool = False) -> Tensor:
        tensor, (name, _, _, dtype, *_) = take(reading, *given, to_pack=to_pack), given
        changes = dtype is None or f"torch.{reading.stored_type(name)}" != str(dtype)
        read.append(to_pack and changes and not tensor.is_meta)
        return tensor

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Reading, "take", noting)
        yield read


def write_gguf_file(folder: Path) -> Path:
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    pair = gguf_pairs.write_pair(folder, "LlamaForCausalLM", Q4_K_M, num_hidden_layers=2, **shape)
    return make_folder(pair.file, pair.file.parent)


def write_fp8(folder: Path) -> Path:
    return write_floats(tiny_checkpoint("LlamaForCausalLM", folder / "llama"), folder, "blocks")[0]


def write_halves(folder: Path) -> Path:
    written = tiny_checkpoint("LlamaForCausalLM", folder / "llama")
    file = written / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
    return written


def write_packed_checkpoint(recipe: Recipe, folder: Path) -> Path:
    return write_pair(folder, recipe, vocab_size=304, hidden_size=128, intermediate_size=192).packed


@pytest.mark.parametrize(
    "write",
    [
        write_gguf_file,
        write_fp8,
        write_halves,
        partial(write_packed_checkpoint, Recipe(method="gptq", group=32, version=2, act_order=True)),
        partial(write_packed_checkpoint, Recipe(method="awq", group=32, symmetric=False, version=2)),
        partial(write_packed_checkpoint, Recipe(method="pack-quantized", group=32)),
        partial(write_packed_checkpoint, Recipe(method="int-quantized", bits=8)),
    ],
)
def test_codes_and_numbers_to_convert_are_not_read_where_packed_matrices_hold_them(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "cache_folder", lambda: tmp_path / "cache")
    first, second = load_twice(write(tmp_path))
    assert first[2] and not second[2]
    assert first[0] == second[0] and len(first[0]) > 4
    assert torch.equal(first[1], second[1])


def test_codes_are_read_where_others_are_made_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "cache_folder", lambda: tmp_path / "cache")
    first, second = load_twice(
        write_packed_checkpoint(Recipe(method="int-quantized", bits=8), tmp_path), "int4"
    )
    assert first[2] and second[2]
    assert first[0] == second[0] and torch.equal(first[1], second[1])


def test_another_model_a_share_or_kernels_are_others(checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy", copy_function=shutil.copy2)
    options = options_of(copy)
    cache = PackedCache(1.0, ("amx",), tmp_path)

    def folder(of: LoadOptions = options, cache: PackedCache = cache) -> str:
        opened = cache._open_folder(of)  # pyright: ignore[reportPrivateUsage]
        return "" if opened is None else opened.identity

    known = {folder()}
    assert folder() in known
    for other in (
        replace(options, dtype=torch.bfloat16),
        replace(options, parallel=Parallel(0, 2)),
        replace(options, parallel=Parallel(1, 2)),
        replace(options, max_len=7),
    ):
        assert folder(other) not in known
        known.add(folder(other))
    assert folder(cache=PackedCache(1.0, ("avx2",), tmp_path)) not in known
    os.utime(copy / "model.safetensors", (1, 1))
    assert folder() not in known
    assert folder(replace(options, trust_remote_code=True)) == ""


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def change(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")


def empty(path: Path) -> None:
    os.truncate(path, 0)


def open_to_others(path: Path) -> None:
    path.chmod(0o622)


@pytest.mark.parametrize("damage", [cut, change, empty, open_to_others])
def test_a_damaged_file_is_not_used_and_made_anew(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = kept_in(tmp_path)
    assert find_packed(folder).is_found
    damage(files(tmp_path)[0])
    assert not find_packed(folder).is_found
    assert write_packed(folder, matrices())
    assert find_packed(folder).is_found and len(files(tmp_path)) == 1


def test_what_a_killed_writer_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kept_in(tmp_path)
    part = files(tmp_path)[0].rename(files(tmp_path)[0].with_suffix(".part"))
    assert not find_packed(folder).is_found
    assert write_packed(folder, matrices())
    assert find_packed(folder).is_found and not part.exists()


def test_of_two_that_pack_at_once_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, other = (BlockFolder(tmp_path, "one", 1 << 30, "packed") for _ in range(2))
    begun, go_on = threading.Event(), threading.Event()
    write_all = block_folder.write_all

    def slowly(file: int, pieces: list[bytes | memoryview]) -> None:
        begun.set()
        assert go_on.wait(30)
        write_all(file, pieces)

    monkeypatch.setattr(block_folder, "write_all", slowly)
    writer = threading.Thread(target=write_packed, args=(folder, matrices()))
    writer.start()
    assert begun.wait(30)
    assert not write_packed(other, matrices())
    go_on.set()
    writer.join(30)
    assert find_packed(other).is_found and len(files(tmp_path)) == 1


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    folders = [kept_in(tmp_path, name, 40_000) for name in ("a", "b")]
    for place, path in enumerate(sorted(files(tmp_path), key=lambda path: path.parent.name)):
        os.utime(path, (place, place))
    assert find_packed(folders[0]).is_found  # it is used, so that the other one goes
    kept_in(tmp_path, "c", 40_000)
    assert [path.parent.name for path in files(tmp_path)] == ["a", "c"]


def test_a_full_disk_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_folder, "write_all", fail)
    folder = BlockFolder(tmp_path, "one", 1 << 30, "packed")
    write = packed_cache._write_all  # pyright: ignore[reportPrivateUsage]
    with caplog.at_level(logging.INFO):
        writer = threading.Thread(target=write, args=([(folder, matrices())],))  # it lowers its own priority
        writer.start()
        writer.join()
    assert "the next start packs again: [Errno 28] No space left on device" in caplog.text
    assert not files(tmp_path) and not files(tmp_path, "*.part")


def test_a_folder_that_cannot_be_made_is_no_error(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with (
        caplog.at_level(logging.INFO),
        PackedCache(1.0, (), tmp_path / "file").loading(options_of(checkpoint)) as earlier,
    ):
        assert not earlier.is_checked
    assert "packed weights are not kept" in caplog.text


def test_a_file_of_other_matrices_is_given_up(checkpoint: Path, tmp_path: Path) -> None:
    cache, options = PackedCache(1.0, (), tmp_path), options_of(checkpoint)
    folder = cache._open_folder(options)  # pyright: ignore[reportPrivateUsage]
    assert folder is not None and write_packed(folder, matrices())
    for spared in (True, False):
        with pytest.raises(packed_cache.Misfit), cache.loading(options) as earlier:
            assert earlier == EarlierLoad(is_checked=True, has_packed=spared)
    assert not files(tmp_path)
    with cache.loading(options) as earlier:
        assert earlier == EarlierLoad()


def test_matrices_come_in_their_order_or_not_at_all(tmp_path: Path) -> None:
    found = find_packed(kept_in(tmp_path))
    assert found.find(FORMS[0], 5000) is not None
    with pytest.raises(packed_cache.Misfit, match="matrix 1 has another form"):
        found.find(FORMS[0], 5000)
    assert found.find(FORMS[1], 5000) is not None
    with pytest.raises(packed_cache.Misfit, match="more"):
        found.find(FORMS[1], 5000)
