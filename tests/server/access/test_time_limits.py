"""How long a request may wait and take: the operator, the client's header and its body say so."""

from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend, that_embeds_too

from engine_core.client.in_flight import AddOptions
from engine_core.protocol import Failed
from engine_core.reason_codes import DEADLINE
from server.access import client_identity
from server.access.client_identity import TimeLimits, of_later_texts
from server.errors import BadRequest, DeadlineExceeded, TooLate, from_engine, status_at
from server.options.server_flags import AccessOptions

CALLS: dict[str, Any] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 20},
    "/v1/embeddings": {"input": "hi"},
    "/embed": {"inputs": "hi"},
}


def api(**access: float) -> tuple[FakeFrontend, httpx.AsyncClient]:
    frontend = that_embeds_too()
    return frontend, make_client(make_app(frontend, access=AccessOptions(**access)))  # type: ignore[arg-type]


def told(frontend: FakeFrontend) -> dict[str, object]:
    """The times that the engine was told of the last request."""
    options = frontend.asked[-1][2] if frontend.asked else frontend.pooled[-1][1]
    return {name: options[name] for name in ("wait", "budget") if name in options}


@pytest.mark.parametrize("path", CALLS)
async def test_the_least_counts(path: str) -> None:
    body = CALLS[path]
    has_field = path != "/embed"
    for operator, header, field, least in (
        (0.0, None, None, None),
        (5000.0, None, None, 5000.0),
        (5000.0, "4000", None, 4000.0),
        (5000.0, "6000.5", None, 5000.0),
        (0.0, "1e", None, "refused"),
        *(((5000.0, "4000", 3000, 3000.0), (0.0, "4000", 6000.0, 4000.0)) if has_field else ()),
    ):
        frontend, http = api(request_timeout=operator)
        headers = {} if header is None else {"X-Request-Timeout": header}
        sent = body if field is None else {**body, "timeout": field}
        response = await http.post(path, json=sent, headers=headers)
        if least == "refused":
            assert response.status_code == status_at(BadRequest(""), path)
            assert "X-Request-Timeout" in response.text
            continue
        assert response.status_code == 200, response.text
        if least is None:
            assert told(frontend) == {}
        else:
            [(name, budget)] = told(frontend).items()
            assert name == "budget" and isinstance(budget, float) and isinstance(least, float)
            assert 0 < budget < least, "what the server has spent is taken off"


async def test_waiting_has_a_limit_of_its_own() -> None:
    for path, body in CALLS.items():
        frontend, http = api(max_queue_wait=2000.0)
        await http.post(path, json=body)
        [(name, wait)] = told(frontend).items()
        assert name == "wait" and isinstance(wait, float) and 0 < wait < 2000


async def test_time_that_the_server_has_spent_ends_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that takes long to read leaves nothing for the engine."""
    frontend, http = api()
    began = TimeLimits.add_to

    def late(self: TimeLimits, options: AddOptions, *, begun: bool = False) -> None:
        began(TimeLimits(self.begins - 100, self.ends - 100), options, begun=begun)

    monkeypatch.setattr(client_identity.TimeLimits, "add_to", late)
    for path, body in CALLS.items():
        response = await http.post(path, json=body, headers={"X-Request-Timeout": "50"})
        assert response.status_code == 503
        assert path == "/embed" or response.json()["error"]["type"] == DEADLINE
        assert int(response.headers["retry-after"]) >= 1
    assert not frontend.asked and not frontend.pooled and not frontend.admissions.live


def test_a_request_that_has_begun_has_504() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        TimeLimits(0.0, 0.0).add_to({}, begun=True)
    assert caught.value.status == 504 and "Retry-After" not in caught.value.headers()
    options: AddOptions = {}
    TimeLimits(0.0, 1e12).add_to(options, begun=True)
    assert list(options) == ["budget"], "it waits no more"


def test_the_engines_answers() -> None:
    refused = from_engine(Failed(1, 503, "the request has waited", DEADLINE), 7)
    assert isinstance(refused, TooLate) and refused.headers() == {"Retry-After": "7"}
    assert refused.body()["error"] == {
        "message": "The request has waited.",
        "type": "deadline_exceeded",
        "param": None,
        "code": 503,
    }
    ended = from_engine(Failed(1, 504, "the request has taken", DEADLINE), 7)
    assert isinstance(ended, DeadlineExceeded) and ended.status == 504


def test_later_texts_have_what_is_left() -> None:
    options: AddOptions = {"salt": "s"}
    assert of_later_texts(options, 5.0) is options
    assert of_later_texts({"wait": 1.0, "budget": 9.0}, 5.0) == {"budget": 4.0}
    assert of_later_texts({"wait": 1.0}, 5.0) == {}
    with pytest.raises(DeadlineExceeded):
        of_later_texts({"budget": 4.0}, 5.0)
