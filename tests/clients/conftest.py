"""A server for clients that cannot be installed beside the tests' own: run them with `make clients`."""

import os
from collections.abc import Iterator

import pytest
from live import COMMAND, LiveServer, serving


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The built-in model, served by the command that the variable FACET names."""
    named = os.environ.get("FACET")
    command = [named, "serve"] if named else COMMAND
    flags = ["--dtype", "float32", "--kv-cache-memory-bytes", "256M"]
    waiting = ["--batch-dir", str(tmp_path_factory.mktemp("waiting"))]
    with serving("demo", *flags, *waiting, command=command) as server:
        yield server
