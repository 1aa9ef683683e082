"""Requests of the server to itself: which answers it waits for, and which it takes."""

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.access.keyring import Access
from server.batches import app_call
from server.batches.app_call import OwnerCalls
from server.metrics.server_metrics import Metrics
from server.options.server_flags import AccessOptions


@pytest.mark.parametrize(
    ("kind", "most", "status"), [("load_failed", 5, 503), ("ServiceUnavailableError", 9, 200)]
)
async def test_a_line_waits_for_a_busy_server_but_not_for_ever_for_a_model_that_cannot_be_loaded(
    kind: str, most: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_call, "pause_of", lambda retry_after: 0.0)
    asked = list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])
        busy = len(asked) < 9
        body = f'{{"error":{{"message":"","type":"{kind}","code":503}}}}' if busy else "{}"
        await Response(body, 503 if busy else 200)(scope, receive, send)

    calls = OwnerCalls(app, Access(AccessOptions(), Metrics("m").key_counters))
    answer = await calls.answer("", "/v1/completions", b"{}", "batch_req_1")
    assert (answer.status, len(asked)) == (status, most)
