"""The start of a worker. Importing torch takes a second or more: what needs no torch is done meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from models.plugins import Registrations
from worker.config import WorkerConfig
from worker.host.machine import OutOfMemory, explain_shortage
from worker.host.torch_import import leave_out_rules
from worker.kernels.cpu.library import prepare
from worker.options import WorkerOptions

if TYPE_CHECKING:
    from worker.runner import Runner

_NVIDIA = Path("/dev/nvidiactl")


def prepare_import(options: WorkerOptions, registered: Registrations) -> None:
    """Make the import of torch shorter, in a process that runs nothing but a worker's own code, on a CPU."""
    others = options.logits_processors, options.worker_extension_cls, options.trust_remote_code
    if _is_cpu(options) and not any(others) and not registered.classes:
        leave_out_rules()


def _is_cpu(options: WorkerOptions) -> bool:
    return options.device == "cpu" or (options.device == "auto" and not _NVIDIA.exists())


def start(config: WorkerConfig, report: Callable[[str, float], None]) -> Runner:
    """Load a worker. Nothing before this imports torch."""
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="prepare") as meanwhile:
            if _is_cpu(config.options):
                meanwhile.submit(prepare)  # an error is met again, and reported, when kernels are opened
            from worker.runner import Runner
        return Runner(config, report)
    except Exception as error:
        if shortage := explain_shortage(error):
            raise OutOfMemory(shortage) from error
        raise
