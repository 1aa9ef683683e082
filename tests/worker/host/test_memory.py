"""Huge pages, pages of a cache made ahead of use, and memory that is given back or kept."""

import ctypes
import mmap
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from live import wait_until
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoint.files import open_source
from models.checkpoint.weights import open_weights
from models.weight_slices import Cut
from worker.cache.kv_cache_size import Cache, CacheSize
from worker.host import memory
from worker.host.memory import Arena, PageToucher, ReadPages, huge_pages, release_after_loading

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BLOCKS, SHARE = 64, 1 << 20  # bytes of a block in each part

has_proc = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system has no /proc")
on_linux = pytest.mark.skipif(platform.system() != "Linux", reason="elsewhere no pages are made ahead of use")


def mapping_of(address: int) -> str:
    """The entry of /proc/self/smaps for the memory at this address."""
    for entry in mappings():
        start, stop = (int(end, 16) for end in entry.split(maxsplit=1)[0].split("-"))
        if start <= address < stop:
            return entry
    pytest.fail("the memory is not mapped")


def mappings() -> list[str]:
    return re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())


def kilobytes(field: str, entry: str) -> int:
    return sum(int(number) for number in re.findall(rf"^{field}:\s+(\d+) kB", entry, re.MULTILINE))


@pytest.mark.skipif(
    not _ENABLED.exists() or "[never]" in _ENABLED.read_text(), reason="this system has no huge pages"
)
def test_large_pieces_are_in_huge_pages() -> None:
    memory = huge_pages(8 << 20)
    memory.fill_(1)
    entry = mapping_of(memory.data_ptr())
    assert kilobytes("AnonHugePages", entry) >= 2048  # how many there are depends on what else runs


def test_pieces_are_apart_and_aligned() -> None:
    arena = Arena()
    pieces = [arena.take(nbytes) for nbytes in (1, 100, 5 << 20, 63, 40 << 20, 50 << 20, 64)]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece.fill_(number)
    assert [int(piece[0]) for piece in pieces] == list(range(len(pieces)))
    assert [int(piece[-1]) for piece in pieces] == list(range(len(pieces)))


_STEPS = """
import resource
from concurrent.futures import ThreadPoolExecutor
import torch
from worker.host.memory import keep_freed_memory

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(1 << 20) for _ in range(6)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
with ThreadPoolExecutor(1) as thread:
    print([thread.submit(step).result() for _ in range(10)][-1])
"""
"""The steps run in a thread, as real ones do: its heap shrinks more readily. The first few make pages."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its heap keeps what it likes to")
def test_what_a_step_frees_is_there_for_the_next_with_its_pages() -> None:
    """The steps run in another process, because this one's heap may hold enough already."""
    done = subprocess.run([sys.executable, "-c", _STEPS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100  # those of one tensor are 1,000


def untouched() -> Tensor:
    """Memory [BLOCKS + 1, SHARE] in small pages, none of which has been made."""
    pages = mmap.mmap(-1, (BLOCKS + 1) * SHARE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(BLOCKS + 1, SHARE)


def made_blocks(part: Tensor) -> list[int]:
    """Blocks all of whose pages are in memory."""
    count = SHARE // mmap.PAGESIZE
    found: list[int] = []
    for number, block in enumerate(part):
        pages = (ctypes.c_ubyte * count)()
        address = ctypes.c_void_p(block.data_ptr())
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(SHARE), pages) == 0
        if all(page & 1 for page in pages):
            found.append(number)
    return found


def wait_for(part: Tensor, blocks: range) -> None:
    wait_until(lambda: set(blocks) <= set(made_blocks(part)), 5)


@on_linux
def test_an_eighth_of_the_cache_is_made_ahead_in_every_part() -> None:
    parts = [untouched(), untouched()]
    parts[0][3] = 7
    toucher = PageToucher(parts, BLOCKS)
    toucher.follow([0, 1])
    toucher.follow([2])
    for part in parts:
        wait_for(part, range(2 + BLOCKS // 8))
        assert not set(made_blocks(part)) & set(range(BLOCKS // 2, BLOCKS + 1))
    assert bool((parts[0][3] == 7).all())
    toucher.follow([BLOCKS - 1])
    wait_for(parts[1], range(BLOCKS))
    assert made_blocks(parts[1]) == list(range(BLOCKS))
    toucher.close()


@on_linux
def test_as_much_is_made_before_the_first_step() -> None:
    part = untouched()
    toucher = PageToucher([part], BLOCKS)
    toucher.start()
    wait_for(part, range(BLOCKS // 8))
    assert made_blocks(part) == list(range(BLOCKS // 8))
    toucher.close()


@on_linux
def test_a_start_waits_a_moment_for_what_the_first_request_is_expected_to_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, part = CacheSize(BLOCKS, SHARE, 64), untouched()
    cache = Cache(size, pages=PageToucher([part], BLOCKS))
    cache.pages.start(BLOCKS)
    assert made_blocks(part) == list(range(BLOCKS // 4)), "no more than a quarter"
    cache.pages.close()
    monkeypatch.setattr("worker.host.memory._MOMENT", 0.0)
    late = untouched()
    toucher = PageToucher([late], BLOCKS)
    monkeypatch.setattr(toucher, "_want", lambda _: None)
    toucher.start(BLOCKS // 4)
    assert not made_blocks(late)
    toucher.close()


@on_linux
def test_threads_make_pages_together(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, touched = [untouched(), untouched()], list[int]()
    toucher = PageToucher(parts, BLOCKS)
    touch = toucher._touch  # pyright: ignore[reportPrivateUsage]

    def count(piece: Tensor) -> None:
        touched.append(piece.data_ptr())
        touch(piece)

    monkeypatch.setattr(toucher, "_touch", count)
    with ThreadPoolExecutor(3) as threads:
        done = [threads.submit(toucher.make, BLOCKS // 2) for _ in range(3)]
        assert all(each.result() is None for each in done)
    assert len(touched) == len(set(touched)), "each piece is made once"
    assert all(set(range(BLOCKS // 2)) <= set(made_blocks(part)) for part in parts)
    toucher.close()
    toucher.make(BLOCKS)  # by a thread that has not heard of the end


@on_linux
def test_the_spare_block_and_steps_without_new_ones_ask_for_nothing() -> None:
    part = untouched()
    toucher = PageToucher([part], BLOCKS)
    for each in ([], [BLOCKS], [0]):
        toucher.follow(each)
    wait_for(part, range(BLOCKS // 8))
    assert not set(made_blocks(part)) & set(range(BLOCKS // 2, BLOCKS + 1))
    toucher.close()


def resident(path: Path) -> int:
    """Bytes of a file that are in this process's memory."""
    return sum(kilobytes("Rss", entry) * 1024 for entry in mappings() if str(path.resolve()) in entry)


@has_proc
@pytest.mark.parametrize("linked", [False, True])
def test_what_was_read_once_is_given_back(tmp_path: Path, linked: bool) -> None:
    values = torch.randn(1024, 1024)
    stored = tmp_path / ("blob" if linked else "model.safetensors")
    folder = tmp_path / "snapshot" if linked else tmp_path
    folder.mkdir(exist_ok=True)
    save_file({"kept": values, "packed": values + 1}, stored)
    if linked:
        (folder / "model.safetensors").symlink_to(stored)

    source = open_source(folder, "auto")
    kept = source.tensors["kept"].read(None)
    total = float(kept.sum()) + float(source.tensors["packed"].read(None).sum())
    assert total == total
    assert resident(stored) >= 2 * values.nbytes
    release_after_loading(folder)
    assert resident(stored) < values.nbytes // 4
    assert torch.equal(kept, values)


@has_proc
def test_pages_are_given_back_while_others_are_read(tmp_path: Path) -> None:
    stored, values = tmp_path / "model.safetensors", torch.randn(256, 1024)
    save_file({str(number): values + number for number in range(8)}, stored)
    source, pages = open_source(tmp_path, "auto"), ReadPages(tmp_path, values.nbytes)
    read: list[Tensor] = []
    for number in range(8):
        read.append(source.tensors[str(number)].read(None))
        assert read[-1].sum().isfinite()
        pages.follow((number + 1) / 8)
        assert resident(stored) <= values.nbytes
    assert all(torch.equal(tensor, values + number) for number, tensor in enumerate(read))


@pytest.mark.parametrize(("least", "times"), [(16 << 20, 0), (1 << 20, 8), (1, 64)])
def test_small_parts_of_files_are_given_back_together(
    least: int, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(8 << 20))
    given_back: list[Path] = []
    monkeypatch.setattr(memory, "_give_back", given_back.append)
    pages = ReadPages(tmp_path, least)
    for number in range(1000):
        pages.follow((number + 1) / 1000)
    assert len(given_back) == times


@has_proc
def test_a_large_matrix_is_converted_by_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = 1 << 20
    monkeypatch.setattr("models.checkpoint.files.CONVERTED_AT_ONCE", piece)
    stored, values = tmp_path / "model.safetensors", torch.randn(8001, 1024).half()  # no whole pieces
    save_file({"head": values}, stored)
    pages, held, reports = ReadPages(tmp_path, piece), list[int](), list[float]()

    def report(fraction: float) -> None:
        reports.append(fraction)
        held.append(resident(stored))
        pages.follow(fraction)

    def take(cut: Cut | None, dtype: torch.dtype) -> Tensor:
        weights = open_weights(tmp_path, device=torch.device("cpu"), dtype=dtype, report=report)
        return weights.take("head", values.shape, cut)

    taken = take(None, torch.bfloat16)
    assert torch.equal(taken, values.bfloat16())
    assert len(reports) == 16
    assert reports == sorted(reports)
    assert reports[-1] == 1.0
    assert max(held) < values.nbytes // 2  # a piece, and what the system maps around it
    for cut in (Cut(0, 5, 4003), Cut(1, 3, 1021)):
        assert torch.equal(take(cut, torch.float32), cut.of(values).float())
