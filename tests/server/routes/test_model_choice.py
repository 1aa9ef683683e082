"""Requests go to the model that they name, wait until it is loaded, and are told meanwhile if they stream."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_api import post_scope

from server.access.client_identity import Caller
from server.access.key_file import Key
from server.access.keyring import Access
from server.access.request_state import state_of
from server.batches.app_call import OwnerCalls
from server.errors import ApiError, NotFound, Unavailable
from server.frontend.many_models import ManyModels, Named
from server.options.parse_server_options import parse
from server.routes import model_choice
from server.routes.model_choice import ModelChoice, may_unload

RECORDING = "/v1/audio/transcriptions"
NAMED, FILE = b'name="model"\r\n\r\nsecond', b'name="file"; filename="a"\r\n\r\nsound'
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class FakeModels:
    """Models that are loaded after a while, and what becomes of their requests."""

    def __init__(self, seconds: float = 0.0, error: ApiError | None = None) -> None:
        self.config, self.media = parse([], {}), None
        self.seconds, self.error = seconds, error
        self.used: list[str] = []
        self.unloaded: list[str] = []
        self.inside = 0
        self.background = False
        self.states = [self._state(name) for name in ("first", "second")]

    def _state(self, name: str) -> Any:
        entry = SimpleNamespace(name=name, config=self.config)
        slot = SimpleNamespace(name=name, served=None, state="loaded")
        labels = 6 * (name == "second")
        return SimpleNamespace(entry=entry, slot=slot, progress="weights 43%", labels=labels, shown=None)

    def require_ready(self) -> None:
        pass

    def find(self, name: str | None, caller: Any = None) -> Any:
        found = [state for state in self.states if name in (None, state.entry.name)]
        if not found:
            raise NotFound(f"no {name}")
        return found[0]

    def find_named(self, name: str | None, caller: Any = None) -> Named:
        return Named(self.find(name, caller))

    def named(self, caller: Any = None) -> list[Any]:
        return [(state.entry.name, state) for state in self.states]

    def names_of(self, state: Any) -> list[str]:
        return [state.entry.name]

    async def unload(self, state: Any) -> bool:
        assert self.inside == 0  # the request is over
        self.unloaded.append(state.entry.name)
        return True

    @asynccontextmanager
    async def using(self, state: Any, *, background: bool) -> AsyncIterator[str]:
        self.background = background
        self.inside += 1
        try:
            await asyncio.sleep(self.seconds)
            if self.error is not None:
                raise self.error
            self.used.append(state.entry.name)
            yield f"frontend of {state.entry.name}"
        finally:
            self.inside -= 1


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Tell what has come; or fail, if that is asked for."""
    body = json.loads((await receive())["body"] or b"{}")
    status = body.get("fails", 200)
    told = {"frontend": state_of(scope).frontend, "body": body}
    await send({"type": "http.response.start", "status": status, "headers": [(b"x-own", b"1")]})
    await send(
        {"type": "http.response.body", "body": b"data: " * (status == 200) + json.dumps(told).encode()}
    )


async def ask(
    models: FakeModels,
    body: Any,
    path: str = CHAT,
    leaves_after: float | None = None,
    endpoint: Any = application,
    **headers: str,
) -> tuple[int, str, list[Any]]:
    """The status, the body and the headers of an answer; a client that leaves gets what it got until then."""
    sent: list[Any] = []
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    pending = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Any:
        if pending:
            return pending.pop()
        await asyncio.sleep(600 if leaves_after is None else leaves_after)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = post_scope(path)
    given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    scope["headers"] = [*{**dict(scope["headers"]), **given}.items()]
    await ModelChoice(endpoint, cast("ManyModels", models))(scope, receive, send)
    assert sum(message["type"] == "http.response.start" for message in sent) == 1
    assert models.inside == 0
    data = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], data.decode(), sent[0]["headers"]


async def test_what_was_told_of_a_model_is_told_again_without_a_load() -> None:
    models = FakeModels()
    await ask(models, {"model": "second"}, "/api/show")
    models.states[0].shown = {"capabilities": ["completion"]}
    status, body, _ = await ask(models, {"model": "first"}, "/api/show")
    assert (status, json.loads(body), models.used) == (200, models.states[0].shown, ["second"])


@pytest.mark.parametrize(
    ("body", "headers", "name"),
    [
        ({"model": "second"}, {}, "second"),
        ({"model": "second"}, {"x_model": "first"}, "second"),
        ({"prompt": "x"}, {"x_model": "second"}, "second"),
        ({"prompt": "x"}, {}, "first"),
        ({"model": 7}, {}, "first"),  # which the endpoint refuses
    ],
)
async def test_a_request_goes_to_the_model_that_it_names(body: Any, headers: Any, name: str) -> None:
    models = FakeModels()
    status, text, _ = await ask(models, body, **headers)
    assert (status, json.loads(text.removeprefix("data: "))) == (
        200,
        {"frontend": f"frontend of {name}", "body": body},
    )


async def served_by(parts: list[bytes], headers: Any) -> str:
    """The frontend that gets a form with a recording, which comes whole."""
    whole = b"".join(b"--x\r\nContent-Disposition: form-data; %s\r\n" % part for part in parts) + b"--x--\r\n"

    async def endpoint(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == whole
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": state_of(scope).frontend.encode()})

    kind: Any = {"content_type": "multipart/form-data; boundary=x"}
    _, text, _ = await ask(FakeModels(), whole, RECORDING, endpoint=endpoint, **kind, **headers)
    return text


@pytest.mark.parametrize(
    ("parts", "headers", "name"),
    [
        ([NAMED, FILE], {}, "second"),
        ([FILE, NAMED], {}, "second"),
        ([FILE], {"x_model": "second"}, "second"),
        ([FILE], {}, "first"),
    ],
)
async def test_a_recording_goes_to_the_model_that_its_form_names(
    parts: list[bytes], headers: dict[str, str], name: str
) -> None:
    assert await served_by(parts, headers) == f"frontend of {name}"


async def test_a_form_of_another_kind_is_refused_and_nothing_is_loaded() -> None:
    models = FakeModels()
    status, _, _ = await ask(models, b"{}", RECORDING)
    assert (status, models.used) == (415, [])


@pytest.mark.parametrize(
    ("body", "name"),
    [({}, "second"), ({"model": "omni-moderation-latest"}, "second"), ({"model": "first"}, "first")],
)
async def test_texts_to_moderate_go_to_a_classifier_unless_a_model_is_named(body: Any, name: str) -> None:
    _, text, _ = await ask(FakeModels(), body, "/v1/moderations")
    assert json.loads(text.removeprefix("data: "))["frontend"] == f"frontend of {name}"


async def test_lines_of_batches_have_no_model_loaded_in_place_of_others() -> None:
    models = FakeModels()
    await ask(models, {"model": "second"})
    assert not models.background
    app = ModelChoice(application, cast("ManyModels", models))
    answer = await OwnerCalls(app, cast("Access", None)).answer("", CHAT, b'{"model": "second"}', "an-id")
    assert answer.status == 200 and models.background


async def test_an_unknown_model_is_refused_and_nothing_is_loaded() -> None:
    models = FakeModels()
    status, text, _ = await ask(models, {"model": "third"})
    assert (status, json.loads(text)["error"]["message"], models.used) == (404, "no third", [])


async def test_other_paths_are_nobodys() -> None:
    models = FakeModels()
    _, text, _ = await ask(models, {"model": "second"}, "/v1/files")
    assert json.loads(text.removeprefix("data: "))["frontend"] is None
    status, text, _ = await ask(models, {}, "/sleep")
    assert (status, models.used) == (404, [])
    assert "/models/unload" in json.loads(text)["error"]["message"]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_choice, "OPEN_AFTER", 0.02)
    monkeypatch.setattr(model_choice, "COMMENT_SECONDS", 0.02)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(("path", "stream"), [(CHAT, True), (COMPLETIONS, False), ("/api/chat", True)])
async def test_a_stream_is_told_how_far_a_load_is(path: str, stream: bool) -> None:
    status, text, headers = await ask(FakeModels(0.1), {"model": "second", "stream": stream}, path)
    *comments, data = text.split("\n\n")
    told = stream and path == CHAT
    assert status == 200
    assert set(comments) == ({": loading second: weights 43%"} if told else set())
    assert data.startswith("data: ")
    assert ((b"x-own", b"1") in headers) is not told


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(("path", "event"), [(CHAT, "data: "), ("/v1/messages", "event: error\ndata: ")])
async def test_a_stream_that_has_begun_ends_with_the_error(path: str, event: str) -> None:
    """Whether the load fails, or the endpoint refuses the request."""
    error = Unavailable("it is broken")
    for models, fails in ((FakeModels(0.1, error), 200), (FakeModels(0.1), 400)):
        status, text, _ = await ask(models, {"model": "second", "stream": True, "fails": fails}, path)
        *comments, data, empty = text.split("\n\n")
        assert (status, empty) == (200, "")
        assert comments
        assert data.startswith(event)
        assert json.loads(data.removeprefix(event))


async def test_a_load_that_fails_is_an_error_with_a_status_of_its_own() -> None:
    status, text, _ = await ask(FakeModels(error=Unavailable("it is broken")), {"model": "second"})
    assert (status, json.loads(text)["error"]["message"]) == (503, "it is broken")


async def test_a_client_that_leaves_waits_for_nothing() -> None:
    models = FakeModels(600)
    status, _, _ = await ask(models, {"model": "second"}, leaves_after=0.05)
    assert status == 499


async def test_a_request_waits_no_longer_than_it_may() -> None:
    models = FakeModels(600)
    status, text, _ = await ask(models, {"model": "second"}, x_request_timeout="0.05")
    assert status == 503
    assert "time limit" in text


@pytest.mark.parametrize("keep_alive", [0, "0", "0s", 0.0])
async def test_a_client_of_ollama_has_a_model_unloaded_behind_its_answer(keep_alive: object) -> None:
    models = FakeModels()
    body = {"model": "second", "prompt": "x", "keep_alive": keep_alive}
    status, _, _ = await ask(models, body, path="/api/generate")
    assert (status, models.used, models.unloaded) == (200, ["second"], ["second"])


@pytest.mark.parametrize(
    ("path", "keep_alive"), [("/api/chat", -1), ("/api/chat", "10s"), ("/api/chat", None), (CHAT, 0)]
)
async def test_other_times_and_other_apis_leave_a_model_loaded(path: str, keep_alive: object) -> None:
    models = FakeModels()
    await ask(models, {"model": "second", "keep_alive": keep_alive}, path=path)
    assert (models.used, models.unloaded) == (["second"], [])


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
@pytest.mark.parametrize("state", ["unloaded", "loaded"])
async def test_a_model_is_neither_loaded_nor_asked_to_be_unloaded(path: str, state: str) -> None:
    models = FakeModels()
    models.states[1].slot.state = state
    status, answer, _ = await ask(models, {"model": "second", "keep_alive": 0}, path=path)
    told = json.loads(answer)
    assert (status, told["model"], told["done"], told["done_reason"]) == (200, "second", True, "unload")
    assert (models.used, models.unloaded) == ([], ["second"])


def test_only_an_administrators_key_has_a_model_unloaded() -> None:
    keys = [Key(name="a", sha256="", admin=is_admin) for is_admin in (False, True)]
    assert [may_unload(0, Caller(key=key)) for key in keys] == [False, True]
