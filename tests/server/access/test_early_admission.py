"""Requests are let in, or refused, when their head is read: the application is not asked before."""

import json
import re
from typing import Any, cast

import pytest
from fake_api import make_app
from fake_connection import FakeClient, FakeServer, settled
from fake_frontend import that_embeds_too

from server.access.admission import Admission
from server.access.client_identity import ANYONE, Caller
from server.access.request_state import state_of
from server.errors import ApiError
from server.frontend.frontend import Frontend
from server.options.server_flags import AccessOptions
from server.run.app import early_admission

ADDRESS = "10.0.0.1"
"""The address of all fake connections."""


class Served:
    """A frontend with places for four sequences, behind connections that ask it at each head."""

    def __init__(self, **access: Any) -> None:
        self.frontend = that_embeds_too().with_places(2, queue=2)
        self.app_calls = 0
        app = make_app(self.frontend, access=AccessOptions(**access))

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            self.app_calls += 1
            await app(scope, receive, send)

        early = early_admission(cast(Frontend, self.frontend))
        self.server = FakeServer(counted, check_head=early)

    @property
    def live(self) -> int:
        return self.frontend.admissions.live

    async def post(self, path: str, headers: bytes = b"", **body: Any) -> FakeClient:
        client = self.server.connect()
        data = json.dumps(body).encode()
        head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % path.encode()
        client.send(head + headers + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        await settled()
        return client


async def test_a_full_server_refuses_at_the_head() -> None:
    served = Served()
    held = served.frontend.admissions.admit(Caller(ADDRESS), 4)
    client = await served.post("/v1/completions", prompt="hi")
    assert client.error()["type"] == "Service Unavailable"
    assert b"\r\nretry-after: 5\r\n" in client.transport.sent
    assert served.app_calls == 0 and served.server.refused == [503]
    held.shrink(3)
    client = await served.post("/v1/completions", prompt="hi", max_tokens=1)
    assert client.answers()[0][0] == 200 and served.app_calls == 1
    assert served.live == 3


async def test_a_crowd_is_refused_by_one_decision_until_something_changes() -> None:
    served = Served()
    admissions = served.frontend.admissions
    held = admissions.admit(Caller(ADDRESS), 4)
    early = early_admission(cast(Frontend, served.frontend))

    def refusal(address: str = ADDRESS) -> object:
        scope: dict[str, Any] = {"type": "http", "client": (address, 1), "headers": []}
        return early(b"POST", b"/v1/completions", scope) or state_of(scope).admission

    first = refusal()
    assert isinstance(first, ApiError) and first.__traceback__ is None
    assert refusal() is first and refusal() is first
    [counted] = re.findall(rb"admission_rejections_total{.*} (.*)", served.frontend.metrics.page())
    assert float(counted) == 3
    held.shrink(3)
    assert isinstance(refusal(), Admission)
    again = refusal()
    assert isinstance(again, ApiError) and again is not first
    assert refusal("10.0.0.9") is None  # it has a share, for which another one gives way later


async def test_a_place_is_taken_before_the_request_is_read() -> None:
    served = Served()
    client = served.server.connect()
    client.send(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n")
    assert served.live == 1
    await settled()
    client.protocol.connection_lost(None)
    await settled()
    assert served.live == 0


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "hi", "n": 3, "seed": 1, "max_tokens": 2}, 200),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, 200),
        ("/v1/completions", {"prompt": "hi", "temperature": -1}, 400),
        ("/v1/completions", {"prompt": 7.5}, 400),
        ("/v1/completions", {"prompt": "hi", "n": 5}, 400),
        ("/tokenize", {"prompt": "hi"}, 200),
    ],
)
async def test_places_are_given_back_whatever_the_answer_is(
    path: str, body: dict[str, Any], status: int
) -> None:
    served = Served()
    client = await served.post(path, **body)
    assert client.answers()[0][0] == status
    assert served.live == 0


async def test_a_request_that_is_refused_on_its_way_gives_its_place_back() -> None:
    served = Served()
    for headers in (b"Host: twice\r\n", b"Content-Encoding: gzip\r\n"):
        client = await served.post("/v1/completions", headers, prompt="hi")
        assert client.answers()[0][0] in (400, 415)
        assert served.live == 0


async def test_what_the_engine_does_not_compute_passes_a_full_server() -> None:
    served = Served()
    served.frontend.admissions.admit(Caller(ADDRESS), 4)
    assert (await served.post("/tokenize", prompt="hi")).answers()[0][0] == 200
    client = served.server.connect()
    client.send(b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await settled()
    assert client.answers()[0][0] == 405


async def test_a_line_that_turns_out_to_be_malformed_keeps_no_place() -> None:
    served = Served()
    client = served.server.connect()
    client.send(b"POST /v1/completions?\xff\xfe HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
    await settled()
    assert client.error()["code"] == 400 and served.live == 0


async def test_who_has_less_than_its_share_is_let_in() -> None:
    served = Served()
    served.frontend.admissions.admit(Caller("10.0.0.9"), 2)
    crowd = served.frontend.admissions.admit(Caller("10.0.0.9"), 2)
    client = await served.post("/v1/completions", prompt="hi", max_tokens=1)
    assert client.answers()[0][0] == 200
    assert crowd.refusal is not None


async def test_all_are_one_if_addresses_are_not_trusted() -> None:
    served = Served(fair_between="none")
    served.frontend.admissions.admit(ANYONE, 4)
    client = await served.post("/v1/completions", prompt="hi")
    assert client.error()["code"] == 503


async def test_while_the_model_loads_the_application_answers() -> None:
    served = Served()
    served.frontend.admissions.slots = 0
    await served.post("/v1/completions", prompt="hi")
    assert served.app_calls == 1


async def test_a_pipelined_request_is_decided_when_its_turn_comes() -> None:
    served = Served()
    served.frontend.admissions.admit(Caller(ADDRESS), 3)
    client = served.server.connect()
    data = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.send((head + b"Content-Length: %d\r\n\r\n" % len(data) + data) * 2)
    await settled()
    assert [status for status, _ in client.answers()] == [200, 200]
    assert served.live == 3
