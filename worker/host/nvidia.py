"""NVIDIA's driver and cards as the system shows them, and why a build of torch cannot use them. No torch."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The first release of the driver that runs what is built for each major version of CUDA."""
_WSL_DRIVERS = ("lib/libcuda.so*", "drivers/nv*/libcuda.so*")
"""NVIDIA's driver in `usr/lib/wsl`, where Windows' subsystem for Linux shows the drivers of Windows."""


def driver_version(root: Path = Path("/")) -> str:
    """The release of the driver that is loaded, such as "580.65.06"; "" if there is none."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\s(\d{3,}(?:\.\d+)+)\s", text)
    return found[1] if found else ""


def cards_here(root: Path = Path("/")) -> list[Path]:
    """The devices of the cards that this process can see: of a container, those that it was given.

    Windows' subsystem for Linux has one device for cards of all makers: it counts with NVIDIA's driver.
    """
    cards = sorted((root / "dev").glob("nvidia[0-9]*"))
    shared, drivers = root / "dev/dxg", root / "usr/lib/wsl"
    if shared.exists() and any(any(drivers.glob(pattern)) for pattern in _WSL_DRIVERS):
        cards.append(shared)
    return cards


def why_driver_is_too_old(driver: str, cuda: str) -> str | None:
    """Say that what is built for this version of CUDA needs a later driver; None if not, or if unknown."""
    least = _LEAST_DRIVER.get(int(cuda.partition(".")[0]))
    if not driver or least is None or int(driver.partition(".")[0]) >= least:
        return None
    return (
        f"the NVIDIA driver is {driver}, and this torch, built for CUDA {cuda}, needs {least} or newer: "
        "update the driver, or install a torch that is built for an older CUDA"
    )


def why_unusable(
    cuda: str | None, root: Path = Path("/"), load: Callable[[str], object] = ctypes.CDLL
) -> str | None:
    """Why torch finds no card, if it is built for this version of CUDA or, if it is None, for CPUs.

    None if nothing here belongs to a card, or nothing is seen to be wrong. `load` opens a shared library.
    """
    driver, cards = driver_version(root), cards_here(root)
    if cuda is None and cards:
        return "this torch is built for CPUs: install torch for CUDA to use the NVIDIA card"
    if cuda is None or not (cards or driver):
        return None
    if too_old := why_driver_is_too_old(driver, cuda):
        return too_old
    if not cards:
        return (
            "NVIDIA's driver is loaded, but no card is given to this process: start a container with "
            "--gpus all"
        )
    closed = [str(path) for path in cards if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        return f"this user may not open {closed[0]}: add it to the group that the device belongs to"
    try:
        load("libcuda.so.1")
    except OSError:
        return (
            "the driver's library libcuda.so.1 is not found: install it, or start a container with "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    return None


def cuda_of_torch() -> str | None:
    """The version of CUDA that torch is built for, read without importing it; None for CPUs."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    said = re.search(r"^cuda\b.*= '([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.M)
    return said[1] if said else None


def card_memory(load: Callable[[str], Any] = ctypes.CDLL) -> int:
    """Bytes of the smallest card that programs for CUDA may use here, as its driver says.

    Raises OSError if it does not. No process that is forked from this one afterwards can use a card.
    """
    driver, cards, sizes = load("libcuda.so.1"), ctypes.c_int(), list[int]()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(cards))
    for card in range(cards.value):
        size = ctypes.c_size_t()
        code = code or driver.cuDeviceTotalMem_v2(ctypes.byref(size), card)
        sizes.append(size.value)
    if code or not sizes:
        raise OSError(f"NVIDIA's driver does not say how much memory the card has: error {code}")
    return min(sizes)


def why_card_is_too_old(capability: tuple[int, int], architectures: Sequence[str]) -> str | None:
    """Say that torch has no kernels for a card, given the architectures that it has, such as "sm_90"."""
    known = [int(found[1]) for name in architectures if (found := re.fullmatch(r"sm_(\d+)[a-z]*", name))]
    major, minor = capability
    if not known or 10 * major + minor >= min(known):
        return None
    return (
        f"it has compute capability {major}.{minor}, and this torch is built for {min(known) / 10} and "
        "later: install a torch that is built for an older CUDA"
    )
