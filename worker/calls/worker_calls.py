"""Calls of methods in a worker: those of the operator's own class, and those of torch's profiler."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from models.model import ServedModel
from models.plugins import load_plugin
from worker import logs
from worker.calls.messages import APPLY_MODEL, WorkerCall, WorkerReturn
from worker.config import WorkerConfig
from worker.options import ProfilerOptions, read_profiler

_FLAG = "--worker-extension-cls"

_log = logging.getLogger(__name__)


class WorkerCalls:
    """Runs the methods that can be called: between steps, in the thread of these, but for BESIDE_STEPS."""

    def __init__(
        self,
        config: WorkerConfig,
        model: ServedModel,
        device: torch.device,
        methods: Mapping[str, Callable[..., Any]],
    ) -> None:
        """`methods`: those of features, by name. Raises ValueError if the operator's class cannot be used."""
        self._own: dict[str, Callable[..., Any]] = {APPLY_MODEL: self._apply_model, **methods}
        options = read_profiler(config.options.profiler_config)
        self._profiler = None if options is None else Profiler(options, config.place.rank, device)
        self._model = model
        name = config.options.worker_extension_cls
        self._extension = None if name is None else _extend(name, config, model, device)

    @torch.inference_mode()
    def __call__(self, call: WorkerCall) -> WorkerReturn:
        """Run a method. An error of its own is the answer, and harms nothing else."""
        try:
            result = self._find(call.method)(*call.args, **call.kwargs)
            if not any(map(callable, call.args)):  # those come from this very process only
                msgspec.msgpack.encode(result)  # or it could not be sent
        except Exception as error:
            _log.warning("%s failed", call.method, exc_info=error)
            return WorkerReturn(call.number, error=logs.one_line(error))
        return WorkerReturn(call.number, result)

    def _apply_model(self, function: Callable[[ServedModel], Any] | str) -> Any:
        """Call a function, given itself or as "module:name", with the model."""
        found = load_plugin("apply_model", function) if isinstance(function, str) else function
        return found(self._model)

    def _find(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        if name == "profile" and self._profiler is not None:
            return self._profiler.profile
        if self._extension is None:
            raise ValueError(f"workers have no method {name}: start the server with {_FLAG}")
        found = None if name.startswith("_") else getattr(self._extension, name, None)
        if not callable(found):
            raise ValueError(f"{type(self._extension).__name__} has no method {name}")
        return found


def _extend(name: str, config: WorkerConfig, model: ServedModel, device: torch.device) -> Any:
    """An object of the operator's class that has what a worker has, under vLLM's names."""
    found = load_plugin(_FLAG, name)
    if not isinstance(found, type):
        raise ValueError(f"{_FLAG} {name}: it is not a class")
    extension = object.__new__(found)  # its methods are those of a worker, which is made already
    place = config.place
    own = {"model": model, "device": device, "rank": place.rank, "local_rank": place.local_rank}
    for attribute, value in {**own, "vllm_config": config, "model_runner": extension}.items():
        try:
            setattr(extension, attribute, value)
        except AttributeError:
            raise ValueError(f"{_FLAG} {name}: its {attribute} would be that of the worker") from None
    return extension


class Profiler:
    """Records what the worker's thread does with torch's profiler, in files that Perfetto opens."""

    def __init__(self, options: ProfilerOptions, rank: int, device: torch.device) -> None:
        self._options, self._rank = options, rank
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._running: profile | None = None
        self._prefix = ""

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> str | None:
        """Begin a recording, or end it -> the path of its file, which begins with the prefix."""
        if is_start == (self._running is not None):
            raise ValueError(f"the profiler {'runs already' if is_start else 'does not run'}")
        if self._running is None:
            options = self._options
            self._prefix = "".join(
                char if char.isalnum() or char in "-_." else "_" for char in profile_prefix or ""
            )
            self._running = profile(
                activities=self._activities,
                record_shapes=options.torch_profiler_record_shapes,
                profile_memory=options.torch_profiler_with_memory,
                with_stack=options.torch_profiler_with_stack,
                with_flops=options.torch_profiler_with_flops,
            )
            self._running.start()
            return None
        running, self._running = self._running, None
        running.stop()
        folder = os.path.abspath(os.path.expanduser(self._options.torch_profiler_dir))
        os.makedirs(folder, exist_ok=True)
        ending = ".gz" if self._options.torch_profiler_use_gzip else ""
        name = f"{self._prefix or 'trace'}.rank{self._rank}.{time.time_ns()}.pt.trace.json{ending}"
        running.export_chrome_trace(os.path.join(folder, name))
        return os.path.join(folder, name)
