"""A server with a model of random weights, ours or another, and the load of `facet bench serve` on it."""

import http.client
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from servers import NAME, Server, Side
from work import Model
from workbench import Workbench

CLIENTS = (1, 32, 256)
_LONGEST = 2048
_PATIENCE = 120.0
_COMPILATIONS = r"^facet:kernel_compilations_total(?:\{[^}]*\})? (\S+)$"
_MODULES = ("zmq", "uvloop", "httptools", "uvicorn", "fastapi", "pydantic", "jinja2", "tokenizers")


def need_modules() -> None:
    """Raise ModuleNotFoundError by the name of a package that a server of ours needs and that is not here."""
    for name in (*_MODULES, "prometheus_client", "llguidance", "yaml"):
        import_module(name)


def ours(bench: Workbench) -> Side:
    """Facet, by the Python that runs this."""
    few = ["--num-gpu-blocks-override", "100", "--max-num-seqs", "8", "--cpu-threads", "1"]
    sizes = [] if bench.on_card else few
    program = [sys.executable, "-P", "-m", "server.main"]

    def command(folder: Path, model: Model, port: int) -> list[str]:
        return [*program, *_words(str(folder), port), "--device", bench.target.type, *sizes]

    return Side("facet", "", command, env=_distribution(bench))


def ours_of_several(bench: Workbench, memory: str) -> Side:
    """Facet with the models of the file models.toml in a folder, and so much memory for them."""
    program = [sys.executable, "-P", "-m", "server.main", "--memory", memory]
    sizes = ["--kv-cache-memory-bytes", f"{bench.size(2048, 300)}M"]
    if not bench.on_card:
        sizes += ["--cpu-threads", "1"]

    def command(folder: Path, model: Model, port: int) -> list[str]:
        words = ["--models", str(folder / "models.toml"), "--port", str(port)]
        return [*program, *words, "--device", bench.target.type, *sizes]

    return Side("facet", "", command, env=_distribution(bench))


def peer(python: str) -> Side:
    """Another server with vLLM's command line."""
    program = [python, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    return Side("peer", "", lambda folder, _, port: [*program, *_words(str(folder), port)], env=env)


def _words(folder: str, port: int) -> list[str]:
    """Words that both command lines know."""
    names = ["--port", str(port), "--served-model-name", NAME]
    return [folder, *names, "--load-format", "dummy", "--max-model-len", str(_LONGEST)]


def _distribution(bench: Workbench) -> dict[str, str]:
    """A place where the server finds its own version, where it is not installed."""
    try:
        version("facet-serve")
    except PackageNotFoundError:
        place = bench.folder / "installed"
        facts = place / "facet_serve-0.dist-info"
        facts.mkdir(parents=True, exist_ok=True)
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: facet-serve\nVersion: 0\n")
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""), str(place)]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {}


@contextmanager
def serving(side: Side, folder: Path) -> Iterator[Server]:
    """A server of the model in a folder, which is ready."""
    server = Server(side, folder, Model("dummy"))
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


@dataclass(frozen=True)
class Measured:
    """What came of a load."""

    tokens: float
    """Tokens in a second."""
    first_token: float
    """The median of milliseconds to the first token."""
    failed: int


def put_load(bench: Workbench, url: str, clients: int, seed: int) -> Measured:
    """Send requests of random tokens, so many at a time."""
    import uvloop

    from server.bench.serve_benchmark import measure
    from server.bench.serve_options import LoadOptions

    count = bench.rows(clients)
    options = LoadOptions(
        base_url=url,
        model=NAME,
        max_concurrency=(count,),
        num_prompts=bench.size(max(4, 2 * clients), count),
        random_input_len=bench.tokens(512),
        random_output_len=bench.size(128, 8),
        ignore_eos=True,
        temperature=0.0,
        seed=seed,
    )
    (point,) = uvloop.run(measure(options)).points
    first = 0.0 if point.ttft is None else point.ttft.median
    return Measured(point.output_tokens_per_second, first, point.failed)


def ask(server: Server, path: str, body: object = None) -> str:
    """What a server answers to a request; with a body, it is posted."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_PATIENCE)
    try:
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, content, headers)
        response = connection.getresponse()
        answer = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"{path}: {response.status} {answer[:300]}")
    return answer


def compilations(server: Server) -> float:
    """The kernels that a server of ours has compiled, as `/metrics` tells."""
    found = re.findall(_COMPILATIONS, ask(server, "/metrics"), re.MULTILINE)
    return sum(map(float, found))
