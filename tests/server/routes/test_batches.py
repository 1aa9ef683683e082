"""/v1/files and /v1/batches by their HTTP, and by the way of a line through the application."""

import asyncio
import errno
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from fake_api import make_app, make_client, post, refusal
from fake_frontend import FakeFrontend
from full_disk import full_disk
from starlette.types import ASGIApp

from server.access.client_identity import ANYONE
from server.batches.database import Database
from server.batches.folder import Upload
from server.batches.line_store import BatchLines
from server.options.server_flags import AccessOptions, BatchOptions
from server.routes import batches

KEYS = {"Authorization": "Bearer a-key-of-alice"}, {"Authorization": "Bearer a-key-of-bob"}


def line(name: str, path: str = "/v1/completions", **body: Any) -> bytes:
    return json.dumps({"custom_id": name, "method": "POST", "url": path, "body": body}).encode() + b"\n"


@pytest.fixture
def app(frontend: FakeFrontend, tmp_path: Path) -> ASGIApp:
    keys = tmp_path / "keys.toml"
    digests = {name: hashlib.sha256(f"a-key-of-{name}".encode()).hexdigest() for name in ("alice", "bob")}
    keys.write_text(
        "".join(f'[[keys]]\nname = "{name}"\nsha256 = "{digest}"\n' for name, digest in digests.items())
    )
    options = BatchOptions(batch_dir=str(tmp_path / "work"))
    return make_app(frontend, batches=options, access=AccessOptions(api_key_file=str(keys)))


@asynccontextmanager
async def working(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client with alice's key, while the work that waits is done."""
    task = asyncio.create_task(app.state.runner.run())
    try:
        async with make_client(app) as client:
            client.headers.update(KEYS[0])
            yield client
    finally:
        task.cancel()
        await asyncio.wait([task])


async def upload(client: httpx.AsyncClient, content: bytes, **more: Any) -> httpx.Response:
    return await client.post(
        "/v1/files",
        data={"purpose": "batch", **more.pop("data", {})},
        files={"file": ("in.jsonl", content)},
        **more,
    )


async def finished(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    created = await client.post("/v1/batches", json=body)
    assert created.status_code == 200, created.text
    found = created.json()
    for _ in range(500):
        if found["status"] in ("completed", "failed"):
            return found
        await asyncio.sleep(0.01)
        found = (await client.get(f"/v1/batches/{found['id']}")).json()
    raise AssertionError(found)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "a"}, "text_completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "chat.completion"),
        ("/v1/embeddings", {"input": "a"}, "list"),
        ("/v1/responses", {"input": "a"}, "response"),
    ],
)
async def test_a_line_is_answered_as_a_request_is(
    app: ASGIApp, frontend: FakeFrontend, path: str, body: dict[str, Any], kind: str
) -> None:
    frontend.serve("generate", "embed")
    async with working(app) as client:
        file = (await upload(client, line("good", path, **body) + line("bad", path, model=5, **body))).json()
        batch = await finished(client, input_file_id=file["id"], endpoint=path, metadata={"a": "b"})
        assert batch["status"] == "completed" and batch["metadata"] == {"a": "b"}
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        good = json.loads((await client.get(f"/v1/files/{batch['output_file_id']}/content")).content)
        assert good["custom_id"] == "good" and good["response"]["status_code"] == 200
        assert good["response"]["body"]["object"] == kind
        bad = json.loads((await client.get(f"/v1/files/{batch['error_file_id']}/content")).content)
        assert bad["custom_id"] == "bad" and bad["response"]["status_code"] == 400
        assert "model" in bad["response"]["body"]["error"]["message"]
    options = frontend.pooled[-1][1] if path == "/v1/embeddings" else frontend.asked[-1][2]
    assert options["priority"] == 1_000_000_000 and options["owner"] == "alice (waiting)"
    assert options["weight"] == 0.001 and frontend.live == 0


async def test_a_busy_server_is_asked_again(app: ASGIApp, frontend: FakeFrontend) -> None:
    frontend.with_places(1, queue=0)
    async with working(app) as client:
        with patch("server.batches.app_call.pause_of", lambda after: 0.01):
            file = (await upload(client, b"".join(line(f"r{n}", prompt="a") for n in range(20)))).json()
            taken = frontend.admissions.admit(ANYONE, 1)
            asyncio.get_running_loop().call_later(0.1, taken.release)
            batch = await finished(client, input_file_id=file["id"], endpoint="/v1/completions")
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert frontend.most_running == 1


async def test_another_key_sees_nothing_of_it(app: ASGIApp) -> None:
    async with working(app) as client:
        file = (await upload(client, line("a", prompt="a"))).json()
        batch = await finished(client, input_file_id=file["id"], endpoint="/v1/completions")
        paths = [
            ("GET", f"/v1/files/{file['id']}"),
            ("GET", f"/v1/files/{batch['output_file_id']}/content"),
            ("DELETE", f"/v1/files/{file['id']}"),
            ("GET", f"/v1/batches/{batch['id']}"),
            ("POST", f"/v1/batches/{batch['id']}/cancel"),
        ]
        for method, path in paths:
            assert (await client.request(method, path, headers=KEYS[1])).status_code == 404
            assert (await client.request(method, path, headers={"Authorization": ""})).status_code == 401
        for path in ("/v1/files", "/v1/batches"):
            assert (await client.get(path, headers=KEYS[1])).json()["data"] == []
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        assert (await client.post("/v1/batches", json=body, headers=KEYS[1])).status_code == 404
        assert len((await client.get("/v1/files")).json()["data"]) == 2


async def test_lists_have_pages(app: ASGIApp) -> None:
    async with make_client(app) as client:
        client.headers.update(KEYS[0])
        ids = [(await upload(client, b"%d" % n)).json()["id"] for n in range(5)]
        seen, after = list[str](), ""
        while True:
            page = (await client.get("/v1/files", params={"limit": 2, "after": after, "order": "asc"})).json()
            seen += [each["id"] for each in page["data"]]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            after = page["last_id"]
        assert seen == ids
        assert (await client.get("/v1/files", params={"purpose": "batch_output"})).json()["data"] == []
        for query in ("limit=0", "limit=x", "order=up"):
            assert (await client.get(f"/v1/files?{query}")).status_code == 400
        assert (await client.get("/v1/files?after=file-0")).status_code == 404
        assert (await client.delete(f"/v1/files/{ids[0]}")).json() == {
            "id": ids[0],
            "deleted": True,
            "object": "file",
        }
        assert (await client.get(f"/v1/files/{ids[0]}")).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_file_id": "file-x", "endpoint": "/v1/nothing"}, "body.endpoint"),
        (
            {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "1w"},
            "completion_window",
        ),
        ({"input_file_id": "file-x", "endpoint": "/v1/completions", "metadat": {}}, "metadat"),
        (
            {"input_file_id": "file-x", "endpoint": "/v1/completions", "metadata": {"a": "b" * 513}},
            "metadata",
        ),
    ],
)
async def test_a_wrong_batch_is_refused_by_name(app: ASGIApp, body: dict[str, Any], param: str) -> None:
    async with make_client(app) as client:
        client.headers.update(KEYS[0])
        assert (await refusal(client, "/v1/batches", **body))["param"] == param


async def test_ids_are_no_paths(app: ASGIApp) -> None:
    async with make_client(app) as client:
        client.headers.update(KEYS[0])
        for id in ("..%2F..%2Fkeys.toml", "file-..", "%00", "file-" + "0" * 400):
            assert (await client.get(f"/v1/files/{id}/content")).status_code == 404


async def test_uploads_have_bounds(app: Any, tmp_path: Path) -> None:
    async with make_client(app) as client:
        client.headers.update(KEYS[0])
        claimed = await client.post(
            "/v1/files",
            content=b"",
            headers={"content-type": "multipart/form-data; boundary=x", "content-length": str(2 << 30)},
        )
        assert claimed.status_code == 413

        async def endless() -> AsyncIterator[bytes]:
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            while True:
                yield b"a" * 65536

        kind = {"content-type": "multipart/form-data; boundary=x"}
        with patch.object(batches, "MOST_FILE", 1 << 20):
            assert (await client.post("/v1/files", content=endless(), headers=kind)).status_code == 413
            kind["content-type"] += "y"  # what stands before the first boundary counts, too
            assert (await client.post("/v1/files", content=endless(), headers=kind)).status_code == 413
        app.state.runner.folder.most_bytes = 100
        full = await upload(client, b"a" * 200)
        assert full.status_code == 507 and "--batch-gib" in full.json()["error"]["message"]
        app.state.runner.uploads = batches.MOST_UPLOADS
        assert (await upload(client, b"a")).status_code == 429
    assert list((tmp_path / "work" / "files").iterdir()) == []


async def test_what_a_full_disk_does_not_take_is_refused(app: Any, tmp_path: Path) -> None:
    async with make_client(app) as client:
        client.headers.update(KEYS[0])
        file = (await upload(client, line("a", prompt="a"))).json()
        with full_disk(tmp_path):
            full = await upload(client, b"a" * 200)
            batch = await client.post(
                "/v1/batches",
                json={
                    "input_file_id": file["id"],
                    "endpoint": "/v1/completions",
                    "completion_window": "24h",
                },
            )
        for answer in (full, batch):
            assert (
                answer.status_code == 507 and "Delete what is not needed" in answer.json()["error"]["message"]
            )
    work = tmp_path / "work"
    assert {path.stem for path in (work / "files").iterdir()} == {file["id"]}
    assert app.state.runner.batches.to_do() == []


async def test_a_file_can_be_deleted_from_a_full_disk(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, real = app.state.runner.folder, Database.write

    @contextmanager
    def write(database: Database, *, durable: bool = True) -> Iterator[Any]:
        if any(folder.files.iterdir()):
            raise OSError(errno.ENOSPC, "No space left on device")
        with real(database, durable=durable) as writer:
            yield writer

    async with make_client(app) as client:
        client.headers.update(KEYS[0])
        file = (await upload(client, line("a", prompt="a"))).json()
        monkeypatch.setattr(Database, "write", write)
        assert (await client.delete(f"/v1/files/{file['id']}")).json()["deleted"] is True
        assert (await client.get(f"/v1/files/{file['id']}")).status_code == 404


async def test_a_content_that_is_damaged_is_not_sent(app: Any) -> None:
    async with make_client(app) as client:
        client.headers.update(KEYS[0])
        file = (await upload(client, line("a", prompt="a"))).json()
        os.truncate(app.state.runner.folder.content(file["id"]), 3)
        found = await client.get(f"/v1/files/{file['id']}/content")
        assert found.status_code == 500 and f"files/{file['id']}.data" in found.json()["error"]["message"]


async def test_an_upload_that_breaks_off_leaves_nothing(app: Any, tmp_path: Path) -> None:
    written: list[bytes] = []
    sent = [
        {
            "type": "http.request",
            "body": b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n',
            "more_body": True,
        },
        {"type": "http.request", "body": b"a" * (2 << 20), "more_body": True},
        {"type": "http.disconnect"},
    ]
    scope = {
        "type": "http", "method": "POST", "path": "/v1/files", "query_string": b"", "http_version": "1.1",
        "headers": [(b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=x"),
                    (b"authorization", b"Bearer a-key-of-alice")],
    }  # fmt: skip

    async def receive() -> Any:
        return sent.pop(0)

    async def send(message: Any) -> None:
        return None

    def note(self: Upload, data: bytes) -> None:
        written.append(data)

    with patch.object(Upload, "write", note):
        await app(scope, receive, send)
    assert len(written) == 1 and list((tmp_path / "work" / "files").iterdir()) == []


async def test_a_file_says_how_long_it_is_kept(app: ASGIApp) -> None:
    async with make_client(app) as client:
        client.headers.update(KEYS[0])
        expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        file = (await upload(client, b"a", data=expiry)).json()
        assert 3599 <= file["expires_at"] - file["created_at"] <= 3601
        wrong = await upload(client, b"a", data={**expiry, "expires_after[seconds]": "1"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "expires_after"
        assert (await upload(client, b"a", data={"purpose": "vision"})).status_code == 400


async def test_without_a_folder_one_of_the_run_is_used_and_the_log_says_so(
    frontend: FakeFrontend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app: Any = make_app(frontend, work_folder=tmp_path / "work")
    async with working(app) as client:
        assert not (tmp_path / "work").exists()
        file = (await upload(client, line("a", prompt="a"))).json()
        batch = await finished(client, input_file_id=file["id"], endpoint="/v1/completions")
        assert batch["request_counts"]["completed"] == 1
    told = [each.getMessage() for each in caplog.records if "--batch-dir" in each.getMessage()]
    assert len(told) == 1 and f"{tmp_path / 'work'} until the server ends" in told[0]
    assert all(
        path.stat().st_mode & 0o77 == 0 for path in [tmp_path / "work", *(tmp_path / "work").rglob("*")]
    )


async def test_a_conversation_belongs_to_the_key_by_which_it_was_made(app: ASGIApp) -> None:
    conversation = {"conversation": ""}
    async with working(app) as client:
        conversation["conversation"] = (await post(client, "/v1/conversations"))["id"]
        items = f"/v1/conversations/{conversation['conversation']}/items"
        await post(client, "/v1/responses", input="a", background=True, **conversation)
        async with asyncio.timeout(20):  # the server adds to it in the name of the key
            while len((await client.get(items)).json()["data"]) < 2:
                await asyncio.sleep(0.01)
        client.headers.update(KEYS[1])
        assert (await client.get(items)).status_code == 404
        await refusal(client, "/v1/responses", status=404, input="a", **conversation)


async def _answered(client: httpx.AsyncClient, *lines: bytes) -> list[Any]:
    """The bodies of the answers to lines that ask for responses."""
    file = (await upload(client, b"".join(lines))).json()
    batch = await finished(client, input_file_id=file["id"], endpoint="/v1/responses")
    content = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).content
    return [json.loads(each)["response"]["body"] for each in content.splitlines()]


async def test_a_line_whose_process_is_killed_before_its_result_is_written_is_added_once(app: Any) -> None:
    add, calls = BatchLines.add, list[str]()

    def fails_once(lines: BatchLines, results: Any) -> None:
        calls.append("add")
        if len(calls) == 1:
            raise OSError
        add(lines, results)

    with patch.object(BatchLines, "add", fails_once), patch("server.batches.runner.AGAIN_SECONDS", 0.01):
        async with working(app) as client:
            id = (await post(client, "/v1/conversations"))["id"]
            [found] = await _answered(client, line("a", "/v1/responses", input="hi", conversation=id))
            items = (await client.get(f"/v1/conversations/{id}/items")).json()["data"]
    assert found["conversation"] == {"id": id} and [item["role"] for item in items] == ["assistant", "user"]
    assert len(calls) == 2


async def test_a_line_says_when_its_conversation_is_gone_by_then(app: Any) -> None:
    add = BatchLines.add

    def add_late(lines: BatchLines, results: Any) -> None:
        app.state.runner.kept.conversations.delete("alice", id)
        add(lines, results)

    with patch.object(BatchLines, "add", add_late):
        async with working(app) as client:
            id = (await post(client, "/v1/conversations"))["id"]
            [found] = await _answered(client, line("a", "/v1/responses", input="hi", conversation=id))
    assert found["status"] == "completed" and found["conversation"] is None
