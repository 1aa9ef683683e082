"""What is said of drivers and cards, with files that stand for those of a machine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker.host import nvidia

PLAIN = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\nGCC\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (a builder)\n"


def machine(root: Path, driver: str = "", cards: int = 0) -> Path:
    (root / "dev").mkdir(parents=True)
    (root / "dev" / "nvidiactl").touch()
    for number in range(cards):
        (root / "dev" / f"nvidia{number}").touch()
    if driver:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text(driver)
    return root


def test_the_driver_s_release_is_read_of_both_kinds_of_modules(tmp_path: Path) -> None:
    assert nvidia.driver_version(machine(tmp_path / "a", PLAIN)) == "550.54.14"
    assert nvidia.driver_version(machine(tmp_path / "b", OPEN)) == "580.65.06"
    assert nvidia.driver_version(machine(tmp_path / "c", "odd\n")) == ""
    assert nvidia.driver_version(tmp_path / "nowhere") == ""


@pytest.mark.parametrize(
    ("driver", "cuda", "needed"),
    [
        ("550.54.14", "13.0", "580 or newer"),
        ("550.54.14", "12.6", None),
        ("515.43", "12.6", "525 or newer"),
        ("580.65.06", "13.0", None),
        ("", "13.0", None),
        ("550.54.14", "99.0", None),
    ],
)
def test_the_driver_that_a_version_of_cuda_needs(driver: str, cuda: str, needed: str | None) -> None:
    said = nvidia.why_driver_is_too_old(driver, cuda)
    assert (said is None) if needed is None else (said and needed in said and driver in said)


def found(name: str) -> object:
    return name


def not_found(name: str) -> object:
    raise OSError(name)


@pytest.mark.parametrize(
    ("cuda", "driver", "cards", "load", "said"),
    [
        (None, OPEN, 1, found, "this torch is built for CPUs"),
        (None, OPEN, 0, found, None),
        (
            "13.0",
            PLAIN,
            1,
            found,
            "driver is 550.54.14, and this torch, built for CUDA 13.0, needs 580",
        ),
        ("13.0", PLAIN, 0, found, "needs 580"),
        ("13.0", OPEN, 0, found, "start a container with --gpus all"),
        ("13.0", OPEN, 1, not_found, "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
        ("13.0", "", 1, not_found, "libcuda.so.1 is not found"),
        ("13.0", OPEN, 2, found, None),
        ("13.0", "", 0, not_found, None),
    ],
)
def test_why_torch_finds_no_card(
    tmp_path: Path, cuda: str | None, driver: str, cards: int, load: object, said: str | None
) -> None:
    why = nvidia.why_unusable(cuda, machine(tmp_path / "root", driver, cards), load)  # pyright: ignore[reportArgumentType]
    assert why is None if said is None else said in (why or "")


def test_windows_subsystem_has_a_card_only_with_nvidia_s_driver(tmp_path: Path) -> None:
    root = machine(tmp_path / "root")
    (root / "dev/dxg").touch()
    assert nvidia.why_unusable(None, root) is None, "the card may be of another maker"
    library = root / "usr/lib/wsl/lib/libcuda.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    assert nvidia.cards_here(root) == [root / "dev/dxg"]
    why = nvidia.why_unusable(None, root)
    assert why is not None and why.startswith("this torch is built for CPUs")


def test_a_card_that_its_user_may_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path / "root", OPEN, 2)
    monkeypatch.setattr("os.access", lambda path, mode: str(path).endswith("nvidia0"))
    why = nvidia.why_unusable("13.0", root, found)
    assert why is not None and "/dev/nvidia1: add it to the group" in why


def test_a_card_that_torch_has_no_kernels_for() -> None:
    built = ["sm_75", "sm_80", "sm_90a", "sm_120", "compute_120"]
    assert nvidia.why_card_is_too_old((7, 5), built) is None
    assert nvidia.why_card_is_too_old((12, 1), built) is None
    assert nvidia.why_card_is_too_old((7, 0), []) is None
    why = nvidia.why_card_is_too_old((7, 0), built)
    assert why is not None and why.startswith(
        "it has compute capability 7.0, and this torch is built for 7.5"
    )


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    assert nvidia.cuda_of_torch() == torch.version.cuda


def driver(*sizes: int, code: int = 0) -> Any:
    """A driver whose cards have these sizes, or that fails with a code."""

    def count(found: Any) -> int:
        found._obj.value = len(sizes)
        return code

    def total(found: Any, card: int) -> int:
        found._obj.value = sizes[card]
        return 0

    return SimpleNamespace(cuInit=lambda flags: 0, cuDeviceGetCount=count, cuDeviceTotalMem_v2=total)


def test_the_smallest_card_counts() -> None:
    assert nvidia.card_memory(lambda name: driver(80 << 30, 24 << 30)) == 24 << 30
    for broken in (driver(), driver(80 << 30, code=100)):
        with pytest.raises(OSError, match="does not say how much memory"):
            nvidia.card_memory(lambda name, broken=broken: broken)
