"""The start of a worker. Importing torch takes a second or more: what needs no torch is done meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from worker.config import WorkerConfig
from worker.host.machine import OutOfMemory, explain_shortage
from worker.kernels.cpu.library import prepare

if TYPE_CHECKING:
    from worker.runner import Runner

_NVIDIA = Path("/dev/nvidiactl")


def start(config: WorkerConfig, report: Callable[[str, float], None]) -> Runner:
    """Load a worker. Nothing before this imports torch."""
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="prepare") as meanwhile:
            if config.options.device == "cpu" or (config.options.device == "auto" and not _NVIDIA.exists()):
                meanwhile.submit(prepare)  # an error is met again, and reported, when kernels are opened
            from worker.runner import Runner
        return Runner(config, report)
    except Exception as error:
        if shortage := explain_shortage(error):
            raise OutOfMemory(shortage) from error
        raise
