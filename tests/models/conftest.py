import shutil
from pathlib import Path

import pytest
from kernel_levels import NAMES, only_level
from tiny import tiny_checkpoint

from models import ops
from models.checkpoint.weights import Reading
from worker.kernels.cpu import operations, torch_operations


@pytest.fixture(autouse=True)
def reference() -> None:
    """Bind the reference operations, whatever a worker of other tests in this process has bound."""
    ops.use({})


@pytest.fixture
def portable_kernels(reference: None) -> None:
    """The operations that a worker binds on a CPU for which there are no C kernels."""
    ops.use(torch_operations.TABLE)


@pytest.fixture(params=[NAMES[0], "portable"])
def cpu_kernels(reference: None, request: pytest.FixtureRequest) -> None:
    """The operations that a worker binds here, and those where there are no kernels.

    tests/worker/kernels/cpu compares the kernels of all levels.
    """
    if request.param == "portable":
        ops.use(torch_operations.TABLE)
        return
    with only_level(request.param):
        ops.use(operations.open_kernels(2))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that each rank or stage has read."""
    seen: list[int] = []
    finish = Reading.finish

    def counted(self: Reading) -> None:
        if not self.headers_only:
            seen.append(self.bytes_read)
        finish(self)

    monkeypatch.setattr(Reading, "finish", counted)
    return seen


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy of `llama` that a test may change."""
    return shutil.copytree(llama, tmp_path / "model")
