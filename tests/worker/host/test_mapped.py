"""Pages of mapped weights are given back, and what they held is still there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.checkpoint.files import open_source
from worker.host.mapped import let_go

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system has no /proc")


def resident(path: Path) -> int:
    """Bytes of a file that are in this process's memory."""
    entries = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    return sum(
        int(kilobytes) * 1024
        for entry in entries
        if str(path.resolve()) in entry
        for kilobytes in re.findall(r"^Rss:\s+(\d+) kB", entry, re.MULTILINE)
    )


@pytest.mark.parametrize("linked", [False, True])
def test_what_was_read_once_is_given_back(tmp_path: Path, linked: bool) -> None:
    values = torch.randn(1024, 1024)
    stored = tmp_path / ("blob" if linked else "model.safetensors")
    folder = tmp_path / "snapshot" if linked else tmp_path
    folder.mkdir(exist_ok=True)
    save_file({"kept": values, "packed": values + 1}, stored)
    if linked:
        (folder / "model.safetensors").symlink_to(stored)

    source = open_source(folder, "auto")
    kept = source.tensors["kept"].read(None)
    total = float(kept.sum()) + float(source.tensors["packed"].read(None).sum())
    assert total == total
    assert resident(stored) >= 2 * values.nbytes
    let_go(folder)
    assert resident(stored) < values.nbytes // 4
    assert torch.equal(kept, values)
