"""Servers that `make gpu-check` measures: ours, and another one beside it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "bench"))

from parts import peer
from results import TARGETS
from servers import Side
from serving import Measured
from work import Model
from workbench import Workbench

LIMIT = ["--max-model-len", "2048"]


def workbench(folder: Path) -> Workbench:
    return Workbench(torch.device("cpu"), lambda **event: None, folder)


def test_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are measured in turns; ours answers twice as fast here."""
    asked: list[tuple[str, int]] = []

    @contextmanager
    def serving(side: Side, folder: Path) -> Iterator[Any]:
        assert (folder / "config.json").exists() and (folder / "tokenizer.json").exists()
        assert {*LIMIT, "--load-format", "dummy"} < set(side.command(folder, Model("dummy"), 5))
        yield SimpleNamespace(url=side.name, ready_s=1.0 if side.name == "facet" else 4.0)

    def put_load(bench: Workbench, url: str, clients: int, seed: int) -> Measured:
        asked.append((url, clients))
        return Measured(100.0 if url == "facet" else 50.0, 8.0, failed=0)

    monkeypatch.setattr(peer, "serving", serving)
    monkeypatch.setattr(peer, "put_load", put_load)
    bench = Workbench(torch.device("cpu"), lambda **event: None, tmp_path, peer="python")
    results = {result.name: result for result in peer.measure_beside(bench, "0.6B")}
    assert asked == [(side, clients) for side in ("facet", "peer") for clients in (1, 1, 32, 256)]
    compared = {name: results[name].value for name in TARGETS if "peer" in name and name[0] == "0"}
    assert sorted(set(compared.values())) == [0.25, 1.0, 2.0] and len(compared) == 7
    assert not any(result.wrong or result.skipped for result in results.values())
    (skipped,) = peer.measure_beside(Workbench(bench.target, bench.tell, tmp_path), "8B")
    assert skipped.skipped
