"""What tests of all packages share."""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from turns import NAMES, Mark, waiting_on

if TYPE_CHECKING:
    from ranks import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "the number of a day: leave out slow tests and cases that have their turn on other days"
    parser.addoption("--day", type=int, help=about)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is collected is garbage, which Python would look for in all of it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_report_header(config: pytest.Config) -> str | None:
    day = config.getoption("--day")
    if day is None:
        return None
    return f"day {day}: slow tests and cases of other days are left out, which make test-all runs"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --day, leave out the tests whose turn is on another day."""
    day = config.getoption("--day")
    if day is None:
        return
    waiting = waiting_on(day, [(item.nodeid, nearest_mark(item)) for item in items])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in waiting])
    items[:] = [item for item in items if item.nodeid not in waiting]


def nearest_mark(item: pytest.Item) -> Mark | None:
    """The mark that says on which days a test runs: of its case, or else of the test, or else of its file."""
    own = item.callspec.marks if isinstance(item, pytest.Function) and hasattr(item, "callspec") else []
    marks = [*own, *item.iter_markers()]
    return next(((mark.name, mark.args) for mark in marks if mark.name in NAMES), None)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets, the length of whose names is bounded; the name of `tmp_path` can be too long."""
    with tempfile.TemporaryDirectory(prefix="facet-test-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Processes that take the places of ranks, for all tests of this process."""
    from ranks import Ranks  # imports torch, which the tests of clients run without

    ranks = Ranks(4, tmp_path_factory.mktemp("rendezvous"))
    yield ranks
    ranks.stop()


@pytest.fixture(autouse=True, scope="module")
def _set_aside() -> None:  # pyright: ignore[reportUnusedFunction]
    """Keep what is imported out of later collections: each worker that a test closes asks for a whole one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _keep_threads() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """A device that a test opens sets torch's threads; tests of other modules get those that there were."""
    torch = sys.modules.get("torch")  # the tests of clients run without it
    before = torch.get_num_threads() if torch else 0
    yield
    if torch:
        torch.set_num_threads(before)
