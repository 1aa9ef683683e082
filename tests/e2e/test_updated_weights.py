"""A server whose weights are replaced while it runs: its replicas, ranks and API processes."""

import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest
from live import SMALL, LiveServer, serving, wait_until
from safetensors.torch import load_file, save_file

from models.checkpoint.hub import DEMO

FILE = "model.safetensors"


def answers(server: LiveServer) -> set[str]:
    """The answers of each replica, whichever API process is asked."""
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    found = set[str]()
    for number in (0, 1) * 3:
        headers = {"X-data-parallel-rank": str(number)}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        found.add(answer.json()["choices"][0]["text"])
    return found


@pytest.mark.slow(7)
def test_weights_are_replaced_everywhere_and_come_back_with_an_engine(tmp_path: Path) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)  # and no tokenizer, which trainers may leave out
    tensors = load_file(DEMO / FILE)
    save_file({name: tensor.flip(-1).contiguous() for name, tensor in tensors.items()}, tmp_path / FILE)
    flags = ("-dp", "2", "-tp", "2", "--api-server-count", "2", "--server-dev-mode")
    with serving("demo", *SMALL, *flags) as server:
        both_work = lambda: server.numbers("facet:replicas_alive")[""] == 2  # noqa: E731
        wait_until(both_work, 60, server.output)
        before = answers(server)
        refused = server.post("/update_weights", {"path": "/nowhere"})
        assert refused.status_code == 400 and "/nowhere is not a folder" in refused.json()["error"]["message"]
        assert answers(server) == before and len(before) == 1
        updated = server.post("/update_weights", {"path": str(tmp_path)}, timeout=60)
        assert updated.status_code == 200, updated.text
        after = answers(server)
        assert len(after) == 1 and after != before
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_until(lambda: not both_work(), 20)
        wait_until(both_work, 60, server.output)
        assert answers(server) == after
        back = server.post("/update_weights_from_disk", {"model_path": str(DEMO)}, timeout=60)
        assert back.json()["success"] is True and answers(server) == before
