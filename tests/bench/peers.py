"""The servers that are compared, each as a command that serves a folder."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import work
from installs import INFINITY, LLAMA, LLAMA_SERVER, VLLM
from servers import NAME, DidNotStart, Side

_CORES = os.cpu_count() or 1
_SLOTS, _ROOM, _TEXT = 32, 384, 512
"""Limits given to llama.cpp: requests at once, and tokens of one that generates and of one that embeds."""
_LLAMA_TYPES = {"bfloat16": "bf16", "float32": "f32"}


def ours(options: Sequence[str] = ()) -> list[Side]:
    """Facet as it is, and with eight bits for a weight, to be compared with others that have as many."""

    def side(name: str, about: str, parts: tuple[str, ...], *more: str) -> Side:
        program = (sys.executable, "-P", "-m", "server.main")
        return Side(name, about, lambda *where: [*program, *_vllm_words(*where), *options, *more], parts)

    number = version("facet-serve")
    eight = f"{number}, `--quantization int8`"
    return [
        side("facet", number, work.PARTS),
        side("facet int8", eight, ("generation",), "--quantization", "int8"),
    ]


def vllm(venv: Path) -> list[Side]:
    """vLLM as installed, and with threads bound and allocators preloaded, as its documentation advises."""
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    program = (str(venv / "bin" / "vllm"), "serve")
    preloads = [
        found
        for name in ("iomp5", "tcmalloc_minimal")
        if (found := next(map(str, venv.glob(f"lib/lib{name}.so*")), ctypes.util.find_library(name)))
    ]
    bound = f"0-{_CORES - 1}"
    tuned = {**env, "VLLM_CPU_OMP_THREADS_BIND": bound, "LD_PRELOAD": ":".join(preloads)}
    number = VLLM.partition("==")[2]
    about = f"{number} as installed; it computes on all cores but one, which it keeps for its scheduler"
    shown = ", ".join(Path(found).name for found in preloads) or "nothing"

    def side(name: str, about: str, env: dict[str, str], *parts: str, more: Sequence[str] = ()) -> Side:
        return Side(name, about, lambda *where: [*program, *_vllm_words(*where), *more], parts, env)

    return [
        side("vLLM", about, env, *work.PARTS),
        side(
            "vLLM tuned",
            f"{number}, threads bound to all cores (`VLLM_CPU_OMP_THREADS_BIND={bound}`), preloaded: {shown}",
            tuned,
            *work.CASES,
        ),
        side("vLLM eager", f"{number} without compilation", env, "startup", more=("--enforce-eager",)),
    ]


def llama(tree: Path) -> list[Side]:
    """llama.cpp's server, with 16 bits for a weight or as many as it is given, and with eight."""
    number = LLAMA.replace("==", " ")
    about = (
        f"`llama-server` out of {number}, built for this processor; {_CORES} threads, {_SLOTS} slots of "
        f"{_ROOM} tokens: its fastest of all that was tried when 32 ask at once, and too short for 1,024"
    )

    def command(folder: Path, model: work.Model, port: int, kind: str) -> list[str]:
        file = _gguf(tree, folder, kind)
        server = [str(tree / LLAMA_SERVER), "--model", str(file), "--alias", NAME, "--port", str(port)]
        room = _SLOTS * (_TEXT if model.embeds else _ROOM)
        slots = ["--parallel", str(_SLOTS), "--no-kv-unified", "--ctx-size", str(room), "--cache-ram", "0"]
        return [*server, *slots, "--threads", str(_CORES), *(("--embeddings",) if model.embeds else ())]

    def as_given(folder: Path, model: work.Model, port: int) -> list[str]:
        return command(folder, model, port, _LLAMA_TYPES[model.dtype])

    def in_eight(folder: Path, model: work.Model, port: int) -> list[str]:
        return command(folder, model, port, "q8_0")

    return [
        Side("llama.cpp", about, as_given, ("generation", "embeddings"), room=_ROOM),
        Side("llama.cpp Q8_0", "the same, weights in Q8_0", in_eight, ("generation",), room=_ROOM),
    ]


def _gguf(tree: Path, folder: Path, kind: str) -> Path:
    """The GGUF file beside a checkpoint, which is made when it is first asked for."""
    file = folder.parent / f"{folder.name}.{kind}.gguf"
    if not file.exists():
        half = file.with_suffix(".part")
        script = str(Path(__file__).with_name("gguf_of.py"))
        command = [sys.executable, script, str(tree), str(folder), str(half), kind]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DidNotStart("its converter failed", done.stderr)
        half.rename(file)
    return file


def infinity(venv: Path) -> list[Side]:
    def command(folder: Path, model: work.Model, port: int) -> list[str]:
        program = [str(venv / "bin" / "infinity_emb"), "v2", "--device", "cpu", "--engine", "torch"]
        where = ["--model-id", str(folder), "--served-model-name", NAME, "--port", str(port)]
        return [*program, *where, "--url-prefix", "/v1", "--dtype", model.dtype]

    env = {"HF_HUB_OFFLINE": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    return [Side("Infinity", INFINITY.partition("==")[2], command, ("embeddings",), env)]


def _vllm_words(folder: Path, model: work.Model, port: int) -> list[str]:
    """The words of vLLM's command line, which are Facet's too."""
    names = ["--port", str(port), "--served-model-name", NAME, "--dtype", model.dtype]
    limit = [] if model.embeds else ["--max-model-len", "2048"]
    return [str(folder), *names, "--kv-cache-memory-bytes", f"{model.cache_mib}M", *limit]
