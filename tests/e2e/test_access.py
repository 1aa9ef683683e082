"""Keys, quotas, deadlines and rotation on a real server behind a Unix socket."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from live import LiveServer, keys, listens, wait_until

pytestmark = pytest.mark.turns(4)

LONG = 60.0


@dataclass
class Guarded:
    server: LiveServer
    file: Path
    http: httpx.Client
    alice: str
    root: str

    def post(self, key: str, body: object, **headers: str) -> httpx.Response:
        headers["Authorization"] = f"Bearer {key}"
        return self.http.post("/v1/completions", json=body, headers=headers)

    def status(self, key: str) -> int:
        return self.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("keys")
    file, socket = folder / "keys.toml", str(folder / "socket")
    alice = keys(file, "add", "alice", "--requests-per-minute", "1000", "--max-running", "2")
    root = keys(file, "add", "root", "--admin")
    server = LiveServer("demo", "--uds", socket, "--api-key-file", str(file), "--dtype", "float32")
    transport = httpx.HTTPTransport(uds=socket)
    try:
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=LONG) as http:
            wait_until(lambda: listens(socket), LONG, server.output)
            wait_until(lambda: http.get("/ready").status_code == 200, LONG, server.output)
            yield Guarded(server, file, http, alice, root)
    finally:
        server.close()


def test_a_key_has_its_rights_and_its_name_in_the_log(guarded: Guarded) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8}
    response = guarded.post(guarded.alice, body)
    assert response.status_code == 200, response.text
    assert response.headers["x-ratelimit-limit-requests"] == "1000"
    assert 990 <= int(response.headers["x-ratelimit-remaining-requests"]) <= 1000
    assert guarded.post("sk-unknown", body).status_code == 401
    for path, key, status in (("/metrics", guarded.alice, 403), ("/metrics", guarded.root, 200)):
        assert guarded.http.get(path, headers={"Authorization": f"Bearer {key}"}).status_code == status
    wait_until(lambda: 'alice - "POST /v1/completions' in guarded.server.output(), LONG)
    assert guarded.alice not in guarded.server.output()


def test_a_request_ends_in_time_and_the_next_one_runs(guarded: Guarded) -> None:
    body = {"prompt": "Once", "max_tokens": 400, "min_tokens": 400, "stream": True, "n": 8, "seed": 1}
    response = guarded.post(guarded.alice, body, **{"X-Request-Timeout": "0.05"})
    assert "deadline_exceeded" in response.text and "[DONE]" not in response.text
    assert guarded.post(guarded.alice, {"prompt": "Once", "max_tokens": 4}).status_code == 200


def test_keys_are_rotated_while_it_serves(guarded: Guarded) -> None:
    bob = keys(guarded.file, "add", "bob")
    assert guarded.status(guarded.alice) == 200
    wait_until(lambda: guarded.status(bob) == 200, LONG, guarded.server.output)
    whole = guarded.file.read_text()
    guarded.file.write_text(whole[: len(whole) // 2] + "\n[[")
    guarded.server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "what was valid stays valid" in guarded.server.output(), LONG)
    assert [guarded.status(key) for key in (guarded.alice, bob)] == [200, 200]
    guarded.file.write_text(whole)
    keys(guarded.file, "remove", "bob")
    guarded.server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: guarded.status(bob) == 401, LONG, guarded.server.output)
    assert guarded.status(guarded.alice) == 200
