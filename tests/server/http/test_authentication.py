"""What the holder of a key may do, and what is noted of it on the way to the engine."""

import asyncio
import hashlib
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_api import make_app, make_client
from fake_frontend import FakeFrontend, vectors

from engine_core.config import EngineConfig
from server.errors import api_of
from server.http.middleware import AccessLog
from server.options.connection_options import ConnectionOptions
from server.options.option_parsing import options_of
from server.options.server_flags import AccessOptions, ReportOptions, ServerConfig
from server.page import api_page
from server.routes.admin import shown_options

COMPLETION = {"prompt": "hi", "max_tokens": 4}


def entry(name: str, **fields: object) -> str:
    """A key of the file. The key itself is the name with `key-` before it."""
    lines = [f"{field} = {value}" for field, value in fields.items()]
    digest = hashlib.sha256(f"key-{name}".encode()).hexdigest()
    return "\n".join(["[[keys]]", f'name = "{name}"', f'sha256 = "{digest}"', *lines]) + "\n"


class Guarded:
    """An API with a file of keys, and plain keys beside it if they are given."""

    def __init__(self, path: Path, *entries: str, plain: list[str] | None = None) -> None:
        self.path = path
        self.write(*entries)
        self.frontend = FakeFrontend(answer_of=lambda item: vectors([1.0]))
        self.frontend.serve("generate", "embed", "token_embed", score_type="bi-encoder")
        options = AccessOptions(api_key_file=str(path), api_key=plain or [])
        self.http = make_client(make_app(self.frontend, access=options))

    def write(self, *entries: str) -> None:
        self.path.write_text("".join(entries))

    def reload(self) -> None:
        """Read the file now."""
        file = self.frontend.access._file  # pyright: ignore[reportPrivateUsage]
        assert file is not None
        file.take(file.read())

    async def post(
        self, name: str, path: str = "/v1/completions", body: Any = None, **headers: str
    ) -> httpx.Response:
        headers |= {"Authorization": f"Bearer key-{name}"}
        return await self.http.post(path, json=COMPLETION if body is None else body, headers=headers)

    async def get(self, name: str, path: str) -> httpx.Response:
        return await self.http.get(path, headers={"Authorization": f"Bearer key-{name}"})

    @property
    def options(self) -> dict[str, object]:
        """What the engine was told with the last request that generates."""
        return self.frontend.asked[-1][2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    path = response.request.url.path
    return {"message": error} if api_of(path) == "tei" else error


async def test_a_key_names_its_owner_and_weight_for_the_engine(path: Path) -> None:
    guarded = Guarded(path, entry("alice", weight=3, max_running=2), entry("bob"))
    assert (await guarded.post("alice")).status_code == 200
    told = {name: guarded.options[name] for name in ("owner", "weight", "max_running", "salt")}
    assert told == {"owner": "alice", "weight": 3.0, "max_running": 2, "salt": "alice/"}
    assert (await guarded.post("bob", "/v1/embeddings", {"input": "hi"})).status_code == 200
    [(_, options)] = guarded.frontend.pooled
    assert (options["owner"], options["weight"], options["salt"]) == ("bob", 1.0, "bob/")
    assert "max_running" not in options
    assert not guarded.frontend.admissions.live


async def test_without_a_valid_key_nothing_is_served(path: Path) -> None:
    guarded = Guarded(path, entry("alice"))
    for response in (await guarded.post("mallory"), await guarded.http.post("/v1/completions", json={})):
        error = error_of(response, 401)
        assert error["type"] == "AuthenticationError" and response.headers["www-authenticate"] == "Bearer"
    for signs in ("/live", "/ready", "/health", "/ping"):
        assert (await guarded.http.get(signs)).status_code == 200
    basic = await guarded.http.get("/v1/models", headers={"Authorization": "Basic key-alice"})
    assert basic.status_code == 401
    assert (await guarded.http.get("/v1/models", headers={"x-api-key": "key-alice"})).status_code == 200


async def test_prefixes_are_shared_by_those_alone_who_want_it(path: Path) -> None:
    guarded = Guarded(path, entry("alice"), entry("bob", share_prefixes="true"), entry("carol"))
    found: dict[str, object] = {}
    for name in ("alice", "bob", "carol"):
        await guarded.post(name, body={**COMPLETION, "cache_salt": "s"})
        found[name] = guarded.options["salt"]
    assert found == {"alice": "alice/s", "bob": "s", "carol": "carol/s"}
    probe = await guarded.post("bob", body={**COMPLETION, "cache_salt": "alice/s"})
    assert error_of(probe, 400)["param"] == "cache_salt"


async def test_a_priority_is_no_lower_than_the_key_allows(path: Path) -> None:
    guarded = Guarded(path, entry("alice"), entry("bob", priority=5), entry("carol", priority=-3))
    for name, asked, given in (
        *(("alice", -1_000_000, 0), ("alice", 7, 7), ("bob", 0, 5), ("bob", 9, 9)),
        *(("carol", -1_000_000, -3), ("carol", -2, -2)),
    ):
        await guarded.post(name, body={**COMPLETION, "priority": asked})
        assert guarded.options["priority"] == given
    await guarded.post("alice", **{"X-Priority": "-9"})
    assert guarded.options["priority"] == 0


async def test_a_key_is_for_its_models(path: Path) -> None:
    guarded = Guarded(
        path,
        *(
            entry("own", models='["x", "org/tiny"]'),
            entry("other", models='["x"]'),
            entry("none", models="[]"),
        ),
        entry("counted", models='{"org/tiny" = {requests_per_minute = 1}}'),
    )
    assert (await guarded.post("own")).status_code == 200
    assert "it is for x" in error_of(await guarded.post("other"), 403)["message"]
    assert "it is for no model" in error_of(await guarded.get("none", "/v1/models"), 403)["message"]
    told = (await guarded.post("counted")).headers
    assert told["x-ratelimit-remaining-requests"] == "0"
    assert "1 requests per minute of org/tiny" in error_of(await guarded.post("counted"), 429)["message"]


async def test_a_key_is_for_its_tasks(path: Path) -> None:
    guarded = Guarded(
        path,
        *(entry("writer", tasks='["generate"]'), entry("reader", tasks='["embed"]')),
        *(entry("scorer", tasks='["score"]'), entry("nobody", tasks="[]")),
    )
    score = {"text_1": "a", "text_2": "b"}
    calls: dict[str, tuple[str, Any]] = {
        "generate": ("/v1/completions", COMPLETION),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        "embed": ("/v1/embeddings", {"input": "hi"}),
        "tei": ("/embed", {"inputs": "hi"}),
        "pool": ("/pooling", {"input": "hi", "task": "embed"}),
        "tokens": ("/pooling", {"input": "hi", "task": "token_embed"}),
        "score": ("/score", score),
    }
    allowed = {
        "writer": {"generate", "chat"},
        "reader": {"embed", "tei", "pool"},
        "scorer": {"score"},
        "nobody": set[str](),
    }
    for name, mine in allowed.items():
        for call, (route, body) in calls.items():
            response = await guarded.post(name, route, body)
            if call in mine:
                assert response.status_code == 200, (name, call, response.text)
            else:
                assert name in error_of(response, 403)["message"]
        assert (await guarded.post(name, "/tokenize", {"prompt": "hi"})).status_code == 200
    assert not guarded.frontend.admissions.live


async def test_logits_of_options_are_no_task_that_a_request_may_name_or_get_by_default(path: Path) -> None:
    guarded = Guarded(path, entry("both", tasks='["embed", "generate"]'))
    guarded.frontend.serve("generate", "decide", "embed")
    named = {"input": "hi", "task": "decide"}
    assert "'decide'" in error_of(await guarded.post("both", "/pooling", named), 400)["message"]
    assert (await guarded.post("both", "/pooling", {"input": "hi"})).status_code == 200
    [item] = guarded.frontend.pooled[-1][0]
    assert item.params.task == "embed"


async def test_operators_pages_need_an_administrator(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_page, "_describe", lambda app: b"{}")
    guarded = Guarded(path, entry("alice"), entry("root", admin="true"), plain=["key-plain\n"])
    for page in ("/metrics", "/load", "/openapi.json"):
        assert error_of(await guarded.get("alice", page), 403)["type"] == "PermissionDeniedError"
        for name in ("root", "plain"):
            assert (await guarded.get(name, page)).status_code == 200
    assert (await guarded.get("alice", "/v1/models")).status_code == 200


async def test_plain_keys_alone_may_all_as_before(path: Path) -> None:
    frontend = FakeFrontend()
    http = make_client(make_app(frontend, access=AccessOptions(api_key=["k"])))
    headers = {"Authorization": "Bearer k"}
    for page in ("/metrics", "/load"):
        assert (await http.get(page, headers=headers)).status_code == 200
    await http.post("/v1/completions", json={**COMPLETION, "cache_salt": "s"}, headers=headers)
    options = frontend.asked[-1][2]
    assert (options["owner"], options["salt"]) == ("127.0.0.1", "s")


async def test_an_expired_key_says_so(path: Path) -> None:
    past, future = datetime(2020, 1, 1, tzinfo=UTC), datetime(2999, 1, 1, tzinfo=UTC)
    guarded = Guarded(path, entry("old", expires=past.isoformat()), entry("new", expires=future.isoformat()))
    assert "has expired" in error_of(await guarded.post("old"), 401)["message"]
    assert (await guarded.post("new")).status_code == 200


async def test_quotas_are_told_and_kept(path: Path) -> None:
    guarded = Guarded(path, entry("alice", requests_per_minute=2, tokens_per_minute=1000), entry("bob"))
    first = await guarded.post("alice")
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert (await guarded.post("alice", body={"prompt": 7})).status_code == 400
    refused = await guarded.post("alice")
    error = error_of(refused, 429)
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert (await guarded.get("alice", "/v1/models")).status_code == 200, "it asks nothing of the engine"
    other = await guarded.post("bob")
    assert other.status_code == 200 and "x-ratelimit-limit-requests" not in other.headers
    assert not guarded.frontend.admissions.live


async def test_a_check_that_computes_is_one_of_the_keys_requests(path: Path) -> None:
    guarded = Guarded(path, entry("alice", requests_per_minute=1))
    assert (await guarded.http.get("/health?deep=1")).status_code == 401
    assert (await guarded.get("alice", "/health?deep=1")).status_code == 200
    assert guarded.options["owner"] == "alice"
    error_of(await guarded.get("alice", "/health?deep=1"), 429)
    assert (await guarded.get("alice", "/health")).status_code == 200


async def test_tokens_of_prompts_and_of_texts_count(path: Path) -> None:
    guarded = Guarded(path, entry("alice", tokens_per_minute=1000))
    before = 1000
    for route, body, tokens in (
        ("/v1/completions", {"prompt": [1] * 10, "max_tokens": 3, "n": 3, "seed": 1}, 10),
        ("/v1/embeddings", {"input": [[1] * 7, [2] * 8]}, 15),
    ):
        response = await guarded.post("alice", route, body)
        assert response.status_code == 200, response.text
        after = int((await guarded.get("alice", "/v1/models")).headers["x-ratelimit-remaining-tokens"])
        assert after >= before - tokens, "it fills meanwhile"
        before = after
    account = guarded.frontend.access._accounts["alice"]  # pyright: ignore[reportPrivateUsage]
    assert account.counters.prompt_tokens.value == 25  # type: ignore[attr-defined]


async def test_metrics_have_the_names_of_keys_and_of_nobody_else(path: Path) -> None:
    guarded = Guarded(path, entry("alice", requests_per_minute=1), entry("root", admin="true"))
    for _ in range(2):
        await guarded.post("alice")
    await guarded.post("mallory")
    page = (await guarded.get("root", "/metrics")).text
    assert 'facet:key_requests_total{key="alice",model_name="org/tiny"} 1.0' in page
    assert 'facet:key_refusals_total{key="alice",model_name="org/tiny"} 1.0' in page
    assert "mallory" not in page
    families = {line.partition("{")[0] for line in page.splitlines() if 'key="alice"' in line}
    assert len(families) <= 4


async def test_one_aborts_ones_own_requests_and_an_administrator_all(path: Path) -> None:
    guarded = Guarded(path, entry("alice"), entry("bob"), entry("root", admin="true"))
    asked: list[tuple[list[str], str | None]] = []

    async def abort(ids: list[str], caller: Any = None) -> int:
        asked.append((ids, caller and caller.owner))
        return 1

    guarded.frontend.abort = abort  # type: ignore[attr-defined]
    for name, owner in (("alice", "alice"), ("root", None)):
        assert (await guarded.post(name, "/abort", {"request_ids": ["a"]})).json() == {"aborted": 1}
        assert asked[-1] == (["a"], owner)


async def test_a_request_takes_no_more_places_than_its_key_may_have(path: Path) -> None:
    guarded = Guarded(path, entry("alice", max_running=1, max_queued=2))
    assert (await guarded.post("alice", body={**COMPLETION, "n": 3, "seed": 1})).status_code == 200
    error = error_of(await guarded.post("alice", body={**COMPLETION, "n": 4, "seed": 1}), 400)
    assert "your API key may have 3 at most" in error["message"]
    many = await guarded.post("alice", "/v1/embeddings", {"input": ["hi"] * 50})
    assert many.status_code == 200, "so many texts take turns"


async def test_the_access_log_names_the_key(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guarded = Guarded(path, entry("alice"))
    values = ("1.2.3.4:5", "POST", "/v1/completions", "1.1", 200)
    generate = guarded.frontend.generate

    def spying(*args: Any, **kwargs: Any) -> Any:
        AccessLog().info("%s - %s %s HTTP/%s %d", *values)
        return generate(*args, **kwargs)

    guarded.frontend.generate = spying  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, "uvicorn.access"):
        await guarded.post("alice")
    logged = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert logged == ["1.2.3.4:5 alice - POST /v1/completions HTTP/1.1 200"]
    assert not guarded.frontend.admissions.live


async def test_keys_are_rotated_under_load(path: Path) -> None:
    guarded = Guarded(path, entry("old"))
    answered: dict[str, int] = {}

    async def load(name: str) -> None:
        while True:
            answered[name] = (await guarded.post(name)).status_code
            await asyncio.sleep(0)  # others have their turn, though a refusal waits for nothing

    async def settled(**statuses: int) -> None:
        """Wait until both get these answers."""
        answered.clear()
        async with asyncio.timeout(60):
            while answered != statuses:
                assert set(answered.values()) <= {200, 401}
                await asyncio.sleep(0.001)

    tasks = [asyncio.create_task(load(name)) for name in ("old", "new") for _ in range(3)]
    await settled(old=200, new=401)
    guarded.write(entry("old"), entry("new"))
    guarded.reload()
    await settled(old=200, new=200)
    guarded.write("[[keys]]\nname = ")
    guarded.reload()
    await settled(old=200, new=200)
    guarded.write(entry("new"))
    guarded.reload()
    await settled(old=401, new=200)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not guarded.frontend.admissions.live


async def test_the_options_of_a_server_are_told_without_its_secrets(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path / "hidden.toml", entry("a"), entry("b", admin="true"), plain=["key-hidden"])
    assert (await guarded.get("a", "/server_info")).status_code == 403
    text = (await guarded.get("b", "/server_info")).json()["vllm_config"]
    whole = await guarded.get("hidden", "/server_info?config_format=json")
    assert "model='org/tiny'" in text and whole.json()["vllm_config"]["max_logprobs"] == 20
    assert "hidden" not in text + whole.text
    assert (await guarded.get("b", "/server_info?config_format=xml")).status_code == 400


def test_no_secret_is_shown() -> None:
    config = ServerConfig(
        engine=EngineConfig(model="tiny", cluster_key="hidden" * 9),
        access=AccessOptions(api_key=["hidden"], api_key_file="/hidden.toml"),
        connections=ConnectionOptions(ssl_keyfile="/hidden.pem", ssl_certfile="/cert.pem"),
        reports=ReportOptions(otlp_traces_endpoint="http://me:hidden@traces/v1"),
    )
    shown = shown_options(config)
    assert "hidden" not in str(shown) and shown["otlp_traces_endpoint"] == "http://traces/v1"
    left_out = {option.field for option in options_of(ServerConfig)} - shown.keys()
    assert left_out == {"api_key", "api_key_file", "cluster_key", "ssl_keyfile"}
