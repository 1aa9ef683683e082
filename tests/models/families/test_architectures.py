"""Every architecture that transformers knows runs as it does there, or is refused, as docs/models.md says."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from architectures import RUNS, names, outcome
from models_page import OWN, PAGE, VERSION_LINE, own_rows, row
from shape_files import read_shapes

from models import ops
from models.composites import COMPOSITES
from worker.kernels.cpu import operations

PAGE_LINES = PAGE.read_text().splitlines()


@pytest.fixture(autouse=True)
def one_thread(reference: None) -> Iterator[None]:
    """The kernels of a worker on a CPU. The models are so small that to share them would take longer."""
    ops.use(operations.open_kernels(1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "architecture",
    # Composites have test_composites.py, and decoders of ours decoders/test_families.py.
    [name for name in names() if name not in COMPOSITES and name not in read_shapes("variants")],
)
def test_it_runs_as_in_transformers_or_is_refused(architecture: str, tmp_path: Path) -> None:
    found = outcome(architecture, tmp_path)
    if architecture in OWN:
        assert found == RUNS
    elif VERSION_LINE in PAGE_LINES:  # with another transformers it may do otherwise than the page says
        assert row(architecture, found) in PAGE_LINES, "run `make docs`"


def test_the_page_lists_nothing_else() -> None:
    own = [line for line in PAGE_LINES if line.startswith("| [")]
    assert own == list(own_rows()), "run `make docs`"
    if VERSION_LINE in PAGE_LINES:
        others = [found[1] for line in PAGE_LINES if (found := re.match(r"(?:-|\|) `(\w+)`", line))]
        assert sorted(others) == sorted(set(names()) - OWN.keys()), "run `make docs`"
