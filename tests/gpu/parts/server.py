"""A server with random weights, and the load that `facet bench serve` puts on it."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from results import Result
from serving import CLIENTS, compilations, need_modules, ours, put_load, serving
from workbench import Part, Workbench


def serve_small_model(bench: Workbench) -> Iterator[Result]:
    """Random prompts of 512 tokens, answers of 128: tokens per second, and the wait for the first."""
    need_modules()
    with TemporaryDirectory(dir=bench.folder) as place:
        folder = bench.shape("0.6B").write(Path(place) / "model")
        with serving(ours(bench), folder) as server:
            yield Result("0.6B served, ready", "weights are drawn", server.ready_s, "s")
            put_load(bench, server.url, 1, seed=9)
            compiled = compilations(server)
            for number, clients in enumerate(CLIENTS):
                found = put_load(bench, server.url, clients, seed=10 + number)
                failed = f"{found.failed} requests failed" if found.failed else ""
                name = f"0.6B served, {clients} clients"
                yield Result(name, failed, found.tokens, "tok/s", wrong=found.failed)
                yield Result(f"{name}, first token", "median", found.first_token, "ms")
            fresh = int(compilations(server) - compiled)
            yield Result("0.6B served, kernels compiled meanwhile", str(fresh), wrong=int(fresh > 0))


PARTS = (Part("serving", serve_small_model, 60),)
