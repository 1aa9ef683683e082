"""A browser for all tests of the page, and a scripted model that writes and embeds."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from chromium import PROGRAM, Tab, browser
from fake_frontend import FakeFrontend, vectors


@pytest.fixture(scope="package")
def one_browser() -> Iterator[Tab]:
    if PROGRAM is None:
        pytest.skip("no Chromium here")
    with browser() as opened:
        yield opened


@pytest.fixture
def tab(one_browser: Tab) -> Iterator[Tab]:
    """A tab, of which the browser has nothing to complain."""
    one_browser.complaints.clear()
    yield one_browser
    assert one_browser.complaints == []


@pytest.fixture
def model() -> FakeFrontend:
    frontend = FakeFrontend()
    frontend.serve("generate", "embed", score_type="bi-encoder")
    frontend.facts = msgspec.structs.replace(frontend.facts, max_model_len=4096)
    frontend.answer_of = lambda item: vectors(np.sin(np.arange(1, 9) * sum(item.tokens)))
    return frontend
