"""Two models behind one port on the card: what they take of it, beside what their workers say, and a load."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from results import Result
from servers import Server
from serving import ask, need_modules, ours_of_several, serving
from workbench import Part, Workbench

NAMES = ("demo", "small")
_FILE = """
[[models]]
model = "demo"

[[models]]
model = "./small"
name = "small"
load-format = "dummy"
max-model-len = 16384
"""
_PROMPT = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
_MIB = 1 << 20


def serve_two(bench: Workbench) -> Iterator[Result]:
    """Load both, use them at once, have one go and come back, and give them room for one alone."""
    need_modules()
    with TemporaryDirectory(dir=bench.folder) as place:
        folder = Path(place) / "models"
        bench.shape("0.6B").write(folder / "small")
        (folder / "models.toml").write_text(_FILE)
        with serving(ours_of_several(bench, "50%"), folder) as server:
            sizes: list[int] = []
            yield from _load(bench, server, sizes)
            yield from _use(bench, server)
        beside = 0 if bench.on_card else 220 * _MIB  # the rest of the server, which is in the same memory
        most = max(sizes) + min(sizes) // 2 + beside
        with serving(ours_of_several(bench, str(most)), folder) as server:
            texts = [complete(server, name) for name in (*NAMES, *NAMES)]
            states = {card["id"]: card["state"] for card in cards(server)}
            wrong = int(texts[:2] != texts[2:] or states != {"demo": "unloaded", "small": "loaded"})
            yield Result("models, room for one", f"{states}", wrong=wrong)


def _load(bench: Workbench, server: Server, sizes: list[int]) -> Iterator[Result]:
    """Load each, and compare what it takes of the card with what it says."""
    for name in NAMES:
        _, before = bench.memory()
        began = time.monotonic()
        complete(server, name)
        yield Result(f"models, {name} loaded", "with a first answer", time.monotonic() - began, "s")
        sizes.append(next(card["memory"] for card in cards(server) if card["id"] == name))
        _, after = bench.memory()
        said = f"of {sizes[-1] / _MIB:,.0f} that its worker says"
        wrong = int(after - before > sizes[-1])
        yield Result(f"models, {name} takes", said, (after - before) / _MIB, "MiB", wrong=wrong)


def _use(bench: Workbench, server: Server) -> Iterator[Result]:
    """Ask both at once, and unload one."""
    alone = [complete(server, name) for name in NAMES]
    names = [*NAMES] * bench.size(16, 2)
    with ThreadPoolExecutor(len(names)) as pool:
        others = sum(
            text != alone[NAMES.index(name)]
            for name, text in zip(names, pool.map(lambda name: complete(server, name), names), strict=True)
        )
    yield Result("models, both at once", f"{others} of {len(names)} texts differ", wrong=int(alone[0] == ""))
    _, before = bench.memory()
    ask(server, "/models/unload", {"model": "demo"})
    _, after = bench.memory()
    wrong = int(bench.on_card and after >= before)
    yield Result("models, demo gives back", "", (before - after) / _MIB, "MiB", wrong=wrong)
    began = time.monotonic()
    differs = complete(server, "demo") != alone[0]
    told = "other tokens than before" if differs else "the same tokens"
    yield Result("models, demo again", told, time.monotonic() - began, "s", wrong=int(differs))


def complete(server: Server, name: str) -> str:
    return json.loads(ask(server, "/v1/completions", {**_PROMPT, "model": name}))["choices"][0]["text"]


def cards(server: Server) -> list[dict[str, Any]]:
    return json.loads(ask(server, "/v1/models"))["data"]


PARTS = (Part("several models", serve_two, 180),)
