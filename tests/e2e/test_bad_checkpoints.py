"""A checkpoint that cannot work never becomes ready: exit code 2, and a last line that says why."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from broken import EMBEDDINGS, GATE, NORM, WEIGHTS, Case, case, config, cut, replaced, tensor, with_number
from live import LiveServer
from tiny import tiny_checkpoint

SECONDS = 30
"""A start that is refused takes three seconds; machines that run tests may be busy."""

BROKEN = [
    case("a NaN", with_number(GATE, float("nan")), WEIGHTS, GATE, "1 of 1536 numbers"),
    case("half of a file", cut(lambda size: size // 2), WEIGHTS, "lies up to byte"),
    case("a pipe", replaced(os.mkfifo), WEIGHTS, "is a pipe"),
    case("layers that are not there", config(num_hidden_layers=10**9), "config.json", "'num_hidden_layers'"),
    case("another width", config(hidden_size=64), EMBEDDINGS, "[320, 32], not [320, 64]", "more"),
    case("overflow", tensor(NORM, lambda old: torch.full_like(old, 3e38)), "at warm-up", "non-finite"),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


PHASE = re.compile(r"(Loading|Allocating|Warming) .*\(\d+\.\d s\)")


@pytest.mark.parametrize("broken", BROKEN, ids=lambda each: each.name)
def test_it_is_refused_with_one_line(broken: Case, llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    broken.breaks(folder)
    server = LiveServer(str(folder), "--kv-cache-memory-bytes", "16M")
    try:
        assert server.process.wait(SECONDS) == 2
        output = server.output()
    finally:
        server.close()
    # What the start has come to, and what was found out, is written by other processes, which may be late.
    lines = [line for line in output.splitlines() if not PHASE.fullmatch(line)]
    *_, last = [line for line in lines if " INFO " not in line]
    assert last.startswith("error: ") and len(last) <= 200
    assert [text for text in broken.told if text not in last] == [], last
    assert "Traceback" not in output
