"""What ends an API process, apart from what it serves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.run.api_server import ApiServer
from server.run.messages import NOTHING_LEFT
from worker.child import BROKE


@pytest.mark.parametrize(("broke", "code"), [(True, BROKE), (False, NOTHING_LEFT)])
async def test_an_error_in_its_client_ends_it_so_that_it_is_started_again(broke: bool, code: int) -> None:
    died = asyncio.Event()
    died.set()
    server = SimpleNamespace(
        _stop=asyncio.Event(),
        client=SimpleNamespace(died=died, broke=broke),
        _process=SimpleNamespace(first=False),
        _config=SimpleNamespace(exit_on_failure=True),
        _explain_death=lambda served: None,
    )
    forever = asyncio.ensure_future(asyncio.Event().wait())
    assert await ApiServer._serve(cast("Any", server), cast("Any", forever), cast("Any", forever)) == code
    forever.cancel()
