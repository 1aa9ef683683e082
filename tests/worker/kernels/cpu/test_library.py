"""Builds of the C kernels: how they are made, found and refused."""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_levels import BY_TURNS, NAMES, table_of, use_threads

from models.ops import SPECIFIED
from worker.host import private_folder
from worker.kernels.compare_with_reference import wrong
from worker.kernels.cpu import library, operations, torch_operations
from worker.kernels.cpu.library import BuildError, Level, levels_here, open_library

FAKE = Level("fake", (), ())


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of two files that offers one function, without a folder of the wheel."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "two.c").write_text("int two(void) { return 2; }")
    (folder / "three.c").write_text(
        '#define EXPORT __attribute__((visibility("default")))\n'
        "int two(void);\nEXPORT int three(void) { return two() + 1; }"
    )
    monkeypatch.setattr(library, "SOURCES", folder)
    monkeypatch.setattr(library, "BUILT", tmp_path / "built")
    return folder


def three(found: library.Library) -> int:
    return found.function("three")()


def test_it_is_built_once_and_then_found(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_library(FAKE, tmp_path / "cache")
    assert three(first) == 3
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.path.name]
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    assert open_library(FAKE, tmp_path / "cache").path == first.path


def test_a_prepared_library_is_found(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "levels_here", lambda: [FAKE, Level("worse", (), ())])
    with caplog.at_level(logging.INFO):
        library.prepare(tmp_path / "cache")
        library.prepare(tmp_path / "cache")
    (prepared,) = (tmp_path / "cache").iterdir()
    before, after = caplog.messages
    assert before.startswith("compiling the C kernels")
    assert after.startswith("compiled the C kernels") and str(prepared) in after
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    assert open_library(FAKE, tmp_path / "cache").path == prepared


def test_another_source_or_flag_makes_another_library(sources: Path, tmp_path: Path) -> None:
    paths = {open_library(FAKE, tmp_path).path, open_library(Level("fake", (), ("-DX",)), tmp_path).path}
    (sources / "three.h").write_text("// changed")
    paths.add(open_library(FAKE, tmp_path).path)
    assert len(paths) == 3


def test_what_a_killed_build_left_is_removed(sources: Path, tmp_path: Path) -> None:
    abandoned, under_way = tmp_path / "build-abandoned", tmp_path / "build-under-way"
    for folder in (abandoned, under_way):
        folder.mkdir()
        (folder / "one.o").touch()
    os.utime(abandoned, (0, 0))
    built = library.build(FAKE, tmp_path)
    assert not abandoned.exists()
    assert under_way.exists() and built.exists()


def test_a_library_of_the_wheel_is_used_as_it_is(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought = library.build(FAKE, tmp_path / "built")
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    assert open_library(FAKE, tmp_path / "cache").path == brought


def test_a_library_of_the_wheel_for_another_system_is_skipped(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = library.build(FAKE, tmp_path / "elsewhere").name
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / name).write_bytes(b"not for this one")
    assert three(open_library(FAKE, tmp_path / "cache")) == 3
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    (tmp_path / "cache" / name).unlink()
    with pytest.raises(BuildError, match="no C compiler"):
        open_library(FAKE, tmp_path / "cache")


def test_a_folder_that_cannot_be_written_is_replaced(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = open_library(FAKE, tmp_path / "file")
    assert three(found) == 3
    assert not found.path.exists()


def test_starts_at_the_same_time_compile_once(
    sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(3) as starts:
        found = list(starts.map(lambda _: open_library(FAKE, tmp_path / "cache"), range(3)))
    assert [three(each) for each in found] == [3, 3, 3]
    assert len([line for line in caplog.messages if line.startswith("compiled the C kernels")]) == 1


def test_a_cache_on_a_full_disk_is_replaced(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(folder: Path, nbytes: int) -> None:
        if folder.is_relative_to(tmp_path / "cache"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(library, "check_room", full)
    found = open_library(FAKE, tmp_path / "cache")
    assert three(found) == 3 and not found.path.exists()
    assert "No space left on device): each start compiles them" in caplog.text


def test_a_disk_that_is_full_by_the_end_is_told_from_an_error_of_the_compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "wrong.c").write_text("#error this is wrong")
    room = iter([None, OSError(errno.ENOSPC, "No space left on device")])

    def full_later(folder: Path, nbytes: int) -> None:
        if error := next(room):
            raise error

    monkeypatch.setattr(library, "check_room", full_later)
    with pytest.raises(OSError, match="No space left"):
        library.build(FAKE, tmp_path / "cache")


def test_without_room_anywhere_it_is_an_error_that_comes_at_once(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(library, "check_room", full)
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("there is no room to compile"))
    with pytest.raises(BuildError, match=r"cannot be used: .*No space left"):
        open_library(FAKE, tmp_path / "cache")


class TestFilesOfOthers:
    """Whoever could write a file that is loaded could do anything in this process."""

    def test_a_folder_of_another_user_is_not_used(
        self, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        kept = open_library(FAKE, tmp_path / "cache").path
        kept.unlink()  # this process has it mapped
        kept.write_bytes(b"whatever others wrote")
        monkeypatch.setattr(private_folder, "_ROOT", -1)
        monkeypatch.setattr(private_folder.os, "geteuid", lambda: 4242)
        found = open_library(FAKE, tmp_path / "cache")
        assert three(found) == 3 and found.path != kept
        assert "belongs to user" in caplog.text

    def test_a_folder_that_others_can_write_is_closed(self, sources: Path, tmp_path: Path) -> None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache").chmod(0o777)
        kept = open_library(FAKE, tmp_path / "cache").path
        assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
        assert kept.stat().st_mode & 0o022 == 0

    @pytest.mark.parametrize("mode", [0o775, 0o757])
    def test_a_file_that_others_could_write_is_made_again(
        self, mode: int, sources: Path, tmp_path: Path
    ) -> None:
        kept = open_library(FAKE, tmp_path / "cache").path
        kept.unlink()
        kept.write_bytes(b"whatever others wrote")
        kept.chmod(mode)
        again = open_library(FAKE, tmp_path / "cache")
        assert three(again) == 3 and again.path == kept

    @pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.write_bytes(b"half of it")])
    def test_what_cannot_be_loaded_is_made_again(
        self, make: Callable[[Path], object], sources: Path, tmp_path: Path
    ) -> None:
        """A folder in the place of the library, or a part of its file."""
        kept = open_library(FAKE, tmp_path / "cache").path
        kept.unlink()
        make(kept)
        assert three(open_library(FAKE, tmp_path / "cache")) == 3


def test_the_error_has_the_compilers_message(sources: Path, tmp_path: Path) -> None:
    (sources / "wrong.c").write_text("#error this is wrong")
    with pytest.raises(BuildError, match=r"could not compile the kernels: .*this is wrong"):
        open_library(FAKE, tmp_path)
    assert not list(tmp_path.glob("build-*"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse2", []),
        ("avx2 fma f16c bmi2", ["avx2"]),
        ("avx2 fma f16c bmi2 avx512f avx512bw avx512vl avx512dq", ["avx512", "avx2"]),
        (
            "avx2 fma f16c bmi2 avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni "
            "amx_tile amx_bf16 amx_int8",
            ["amx", "avx512bf16", "avx512", "avx2"],
        ),
    ],
)
def test_levels_are_what_the_processor_lists(tmp_path: Path, flags: str, expected: list[str]) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t:\n")
    assert [level.name for level in levels_here(cpuinfo)] == expected
    assert levels_here(tmp_path / "absent") == []


def test_processors_of_arm_have_a_level_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd evtstrm aes\nCPU part\t: 0xd40\n")
    assert levels_here(cpuinfo) == []
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert [level.name for level in levels_here(cpuinfo)] == ["neon"]
    monkeypatch.setattr(library, "build", lambda level, folder: folder / level.name)
    assert library.build_all(tmp_path) == [tmp_path / "neon"], "which is all that a wheel for ARM has"


# The choice


@pytest.fixture
def fresh() -> Iterator[None]:
    """Kernels are chosen once for a process."""
    operations.choose_kernels.cache_clear()
    yield
    operations.choose_kernels.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_the_best_level_is_taken() -> None:
    found, table = operations.choose_kernels()
    assert found is not None
    assert found.level.name == NAMES[0]
    assert table.keys() > torch_operations.TABLE.keys()


@pytest.mark.usefixtures("fresh")
def test_without_kernels_torch_computes_and_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(level: Level) -> library.Library:
        raise BuildError("there is no C compiler (cc)")

    monkeypatch.setattr(operations, "open_library", refuse)
    with caplog.at_level(logging.WARNING):
        table = operations.open_kernels(2)
    assert table.keys() == torch_operations.TABLE.keys()
    assert (table["linear"], table["gated"]) == (torch_operations.linear, torch_operations.gated)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "takes 2 to 3 times as long: there is no C compiler" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_a_level_that_computes_wrongly_is_skipped_and_one_that_does_not_is_remembered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    if len(NAMES) < 2:
        pytest.skip("this processor knows one level only")
    monkeypatch.setattr(operations, "cache_folder", lambda: tmp_path / "cache")
    answers = iter([["linear"], [], ["linear"]])
    monkeypatch.setattr(operations, "wrong", lambda table: next(answers))
    for _ in range(2):
        operations.choose_kernels.cache_clear()
        found, _ = operations.choose_kernels()
        assert found is not None
        assert found.level.name == NAMES[1]
    assert next(answers, None) is None
    assert f"the {NAMES[0]} kernels are not used" in caplog.text


@pytest.mark.parametrize("name", BY_TURNS)
def test_the_check_finds_nothing_wrong(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It says nothing of the matrices that it makes up, as packing does of a checkpoint's."""
    caplog.set_level(logging.INFO)
    table = table_of(name)
    caplog.clear()
    assert wrong(table) == []
    assert caplog.messages == []


@pytest.mark.skipif(not NAMES, reason="there are no kernels for this processor")
def test_the_check_finds_what_is_wrong() -> None:
    table = table_of(NAMES[-1])
    for each in (
        *("linear", "gated_linear", "rms_norm", "add_layer_norm", "activation"),
        *("rotary_and_cache", "attention", "encoder_attention", "disentangled_attention"),
    ):

        def off(*args: object, good: Callable[..., Any] = table[each], **options: object) -> object:
            out = good(*args, **options)
            (out[0] if isinstance(out, tuple) else out)[-1].view(-1)[-1] += 1
            return out

        compared = {name: SPECIFIED[name] for name in (each, "pack")}
        assert wrong({**table, each: off}, compared) == [each]


@pytest.mark.parametrize("name", BY_TURNS)
def test_threads_can_be_changed_at_any_time(name: str) -> None:
    table, x = table_of(name), torch.randn(64, 300)
    packed = table["pack"](torch.randn(200, 300))
    expected = table["linear"](x, packed)
    for count in (2, 5, 1, 3, 3, 1):
        use_threads(name, count)
        assert all(torch.equal(table["linear"](x, packed), expected) for _ in range(20))
