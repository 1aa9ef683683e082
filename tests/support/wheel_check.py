"""Builds the wheel as a newcomer does, and uses it where nothing else of the repository is.

`python -m build` makes a source distribution, and a wheel of it; `pip wheel` makes another one where no
compiler is on the PATH. Each is installed into a virtual environment of its own, beside the packages that it
declares, which are links to those of this environment. There the demo model is served, embeds through `LLM`,
and `facet doctor` finds nothing broken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from live import serving
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
NOWHERE = "/nowhere"
EMBEDS = """
import json, facet
llm = facet.LLM("demo", kv_cache_memory_bytes=1 << 26)
[answer] = llm.embed(["Good day"])
print(json.dumps([facet.__file__, answer.outputs.embedding]))
"""


def main() -> None:
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory(prefix="facet-wheel-") as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--outdir", str(folder / "built"), str(ROOT), at=folder)
        [source], [wheel] = folder.glob("built/*.tar.gz"), folder.glob("built/*.whl")
        # Kernels that were compiled before must not reach a wheel that is built without a compiler.
        bare = {"PATH": NOWHERE, "XDG_CACHE_HOME": str(folder / "empty")}
        pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir")
        run(*pip, str(folder / "bare"), str(source), at=folder, PIP_CACHE_DIR=str(folder / "pip"), **bare)
        [without] = folder.glob("bare/*.whl")
        use(wheel, folder / "with", "compiled", XDG_CACHE_HOME=str(folder / "empty"))
        use(without, folder / "without", "not compiled", **bare)


def use(wheel: Path, folder: Path, kernels: str, **variables: str) -> None:
    """Installs a wheel and serves with it. `kernels` begins what `facet doctor` says of the C kernels."""
    environment = folder / "env"
    venv.create(environment)
    python, packages = environment / "bin/python", folder / "packages"
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel), at=folder)
    [site] = environment.glob("lib/python*/site-packages")
    [installed] = distributions(path=[str(site)])
    link_dependencies(installed, packages)
    (site / "dependencies.pth").write_text(f"{packages}\n")
    os.chdir(folder)
    findings = json.loads(run(str(python.with_name("facet")), "doctor", "--json", at=folder, **variables))
    found = {finding["name"]: finding for finding in findings}
    assert not [name for name, finding in found.items() if finding["grade"] == "broken"], findings
    assert found["kernels"]["text"].startswith(kernels), found["kernels"]
    with serving("demo", command=[str(python.with_name("serve"))], env=variables) as server:
        answer = server.post("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] > 0, answer.text
        served = server.post("/v1/embeddings", {"input": "Good day"}).json()["data"][0]["embedding"]
    home, embedded = json.loads(run(str(python), "-c", EMBEDS, at=folder, **variables).splitlines()[-1])
    assert Path(home).is_relative_to(environment), home
    assert embedded == served
    print(f"{wheel.name}: serves, embeds; kernels: {found['kernels']['text']}")


def link_dependencies(package: Distribution, folder: Path) -> None:
    """Fills a folder with links to what a package declares that it needs, and to what that needs."""
    folder.mkdir()
    found, frontier = set[str](), needs_of(package)
    while frontier:
        name = frontier.pop()
        try:
            installed = distribution(name)
        except PackageNotFoundError:  # a package may do without it, as torch does on some systems
            continue
        if name in found:
            continue
        found.add(name)
        frontier += needs_of(installed)
        for top in {Path(file).parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(installed.locate_file(top))).resolve())


def needs_of(package: Distribution) -> list[str]:
    needed = map(Requirement, package.requires or ())
    return [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]


def run(*command: str, at: Path, **variables: str) -> str:
    """What a command prints; it runs in a folder outside of the repository."""
    result = subprocess.run(
        command, cwd=at, env={**os.environ, **variables}, text=True, capture_output=True, check=False
    )
    if result.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {result.returncode}:\n{result.stdout}{result.stderr}"
        )
    return result.stdout


if __name__ == "__main__":
    main()
