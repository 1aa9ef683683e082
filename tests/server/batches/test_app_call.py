"""Requests of the server to itself: which answers it waits for, and which it takes."""

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine_core.protocol import Failed
from engine_core.reason_codes import DEADLINE, TOO_LONG
from server.access.keyring import Access
from server.batches import app_call
from server.batches.app_call import OwnerCalls
from server.errors import from_engine
from server.metrics.server_metrics import Metrics
from server.options.server_flags import AccessOptions


@pytest.mark.parametrize(
    ("kind", "message", "body", "most", "status"),
    [
        ("load_failed", "", b"{}", 5, 503),
        ("ServiceUnavailableError", "", b"{}", 9, 200),
        ("deadline_exceeded", "", b"{}", 9, 200),
        ("deadline_exceeded", "", b'{"timeout": 0.1}', 5, 503),
        ("deadline_exceeded", str(from_engine(Failed(1, 503, TOO_LONG, DEADLINE))), b"{}", 5, 503),
    ],
)
async def test_a_line_waits_for_a_busy_server_but_not_for_ever_for_what_cannot_be(
    kind: str, message: str, body: bytes, most: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot be loaded, or an answer in the time that the line itself or the server sets."""
    monkeypatch.setattr(app_call, "pause_of", lambda retry_after: 0.0)
    asked = list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])
        busy = len(asked) < 9
        told = f'{{"error":{{"message":"{message}","type":"{kind}","code":503}}}}' if busy else "{}"
        await Response(told, 503 if busy else 200)(scope, receive, send)

    calls = OwnerCalls(app, Access(AccessOptions(), Metrics("m").key_counters))
    answer = await calls.answer("", "/v1/completions", body, "batch_req_1")
    assert (answer.status, len(asked)) == (status, most)
