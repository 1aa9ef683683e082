"""The lines on refused connections."""

import logging

import pytest
from fake_connection import FakeClock

from server.http.connection.refusal_log import MOST_LINES, RefusalLog


def test_a_crowd_of_refusals_makes_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    log = RefusalLog(clock.call_later)
    with caplog.at_level(logging.INFO, "uvicorn.access"):
        for port in range(MOST_LINES + 440):
            log.tell(("10.0.0.1", port), 503, "full")
        assert len(caplog.messages) == MOST_LINES
        assert caplog.messages[1] == "10.0.0.1:1 - connection ended; 503: full"
        clock.advance(2)
        assert caplog.messages[MOST_LINES:] == ["440 more connections ended with refusals within a second"]
        log.tell(None, 400, "malformed")
        clock.advance(2)
    [last] = caplog.messages[
        MOST_LINES + 1 :
    ]  # a filter of the server's logs may name a socket without address
    assert last.endswith(":0 - connection ended; 400: malformed")
    assert clock.timers == []
