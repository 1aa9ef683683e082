from collections.abc import Iterator

import pytest
from fake_frontend import FakeFrontend
from served_app import served


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture
def url(frontend: FakeFrontend) -> Iterator[str]:
    with served(frontend) as address:
        yield address
