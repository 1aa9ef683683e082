"""`facet run-batch` against the real HTTP API: every route, errors, and an output that is half done."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_frontend import FakeFrontend, vectors
from scripted_server import Reply, Request, says, scripted, whole

from server.batches.line_format import answered, body_of
from server.options.option_parsing import OptionError
from server.run.commands import BAD_USAGE, FAILED, INTERRUPTED, run
from server.terminal import run_batch as command
from server.terminal.own_server import own_server
from server.terminal.run_batch import BatchOutput, is_final, read_requests
from server.terminal.server_client import ServerClient, ServerError

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def request(name: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body or CHAT}


def write(path: Path, *requests: object) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in requests))
    return path


def results(path: Path) -> dict[str, Any]:
    return {one["custom_id"]: one for one in map(json.loads, path.read_text().splitlines())}


def batch(source: Path, out: Path, *more: str) -> int:
    return run("facet", ["run-batch", "-i", str(source), "-o", str(out), *more])


def test_every_route_can_be_asked(url: str, frontend: FakeFrontend, tmp_path: Path) -> None:
    frontend.serve("generate", "embed", "classify")
    frontend.answer_of = lambda item: vectors([1.0, 0.0])
    source = write(
        tmp_path / "in.jsonl",
        request("chat"),
        request("text", "/v1/completions", prompt="a"),
        request("vector", "/v1/embeddings", input="a"),
        request("pool", "/pooling", input="a"),
        request("tokens", "/tokenize", prompt="a"),
    )
    out = tmp_path / "out.jsonl"
    assert batch(source, out, "--url", url) == 0
    found = results(out)
    assert found.keys() == {"chat", "text", "vector", "pool", "tokens"}
    assert {one["response"]["status_code"] for one in found.values()} == {200}
    assert all(one["error"] is None and one["id"] for one in found.values())
    answer = found["chat"]["response"]["body"]
    assert answer["choices"][0]["message"]["content"] == "Hello, world."
    assert found["chat"]["response"]["request_id"] in answer["id"], "by which the server's log finds it"
    assert len({one["response"]["request_id"] for one in found.values()}) == len(found)


def test_a_refusal_is_an_answer_and_shows_in_the_exit_code(url: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", request("bad", max_tokens="many", **CHAT), request("good"))
    out = tmp_path / "out.jsonl"
    assert batch(source, out, "--url", url) == FAILED
    bad = results(out)["bad"]
    assert bad["response"]["status_code"] == 400
    assert "max_tokens" in bad["response"]["body"]["error"]["message"]


def test_a_half_done_output_is_gone_on_with(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", *(request(f"r{i}") for i in range(6)))
    out = tmp_path / "out.jsonl"
    kept = [answered("a", "r0", 200, {"mine": 1}), answered("b", "r1", 400, {})]
    again = [answered("c", "r2", 503, {}), {"custom_id": "r3", "response": None, "error": {}}]
    write(out, *kept, *again)
    with out.open("a") as file:
        file.write('{"custom_id": "r4", "respo')  # the command was killed while it wrote
    assert batch(source, out, "--url", url) == FAILED, "r1 has been refused"
    found = results(out)
    assert found.keys() == {f"r{i}" for i in range(6)}
    assert found["r0"]["response"]["body"] == {"mine": 1}
    assert found["r1"]["response"]["status_code"] == 400
    assert len(out.read_text().splitlines()) == 6
    before = out.read_bytes()
    assert batch(source, out, "--url", "http://127.0.0.1:1") == FAILED  # nothing is left to ask
    assert out.read_bytes() == before
    assert "all 6 were answered before" in capsys.readouterr().err


def test_an_output_that_is_no_file_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading /dev/stdout would wait for ever if it is a pipe or a terminal."""

    def wait_for_ever(path: Path) -> bytes:
        raise AssertionError(f"{path} is read")

    monkeypatch.setattr(Path, "read_bytes", wait_for_ever)
    output = BatchOutput(Path(os.devnull))
    output.add(answered("id", "a", 200, {}))
    output.close()
    assert output.done == {}


def test_another_file_is_not_taken_for_an_output(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nmore\n")
    with pytest.raises(OptionError, match="line 1 is not an answer of a batch"):
        BatchOutput(path)
    assert path.read_text() == "my notes\nmore\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2 is not JSON"),
        ('{"custom_id": "b", "url": "/x"}', "needs custom_id and url as strings"),
        (json.dumps(request("a")), "custom_id 'a' stands there twice"),
        (json.dumps({**request("b"), "method": "GET"}), "method must be POST"),
        (json.dumps(request("\ud800")), "line 2 is not JSON"),
        (json.dumps(request("b", "https://h/v1/x")), "url is a path"),
        (json.dumps(request("b", "/v1/\u00e9")), "has the url '/v1/\u00e9': url is a path"),
        (json.dumps(request("b", "/v1/x y")), "has the url '/v1/x y': url is a path"),
        (json.dumps(request("b", stream=True)), "cannot be streamed"),
    ],
)
def test_the_whole_input_is_checked_first(tmp_path: Path, line: str, reason: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(request("a")) + "\n" + line + "\n")
    with pytest.raises(OptionError, match=reason):
        read_requests(source)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--url", "http://h", "--max-model-len", "9"], "with --url another server answers"),
        (["--max-concurrency", "0"], "--max-concurrency must lie"),
    ],
)
def test_options_that_contradict_are_refused(
    tmp_path: Path, more: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", request("a"))
    assert batch(source, tmp_path / "out.jsonl", *more) == BAD_USAGE
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b'{"data":[0.125,1e-7],"text":"a\\nb"}', {"data": [0.125, 1e-7], "text": "a\nb"}),
        (b'{\n  "data": 1\n}', {"data": 1}),
        (b'{"data": tru', '{"data": tru'),
        ("502: Übung".encode("latin-1"), "502: \ufffdbung"),
        (b"", ""),
    ],
)
def test_a_body_stands_in_one_line_whatever_it_is(tmp_path: Path, content: bytes, kept: object) -> None:
    output = BatchOutput(tmp_path / "out.jsonl")
    output.add(answered("id", "a", 200, body_of(content)))
    output.close()
    (line,) = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line)["response"]["body"] == kept


@pytest.mark.parametrize(
    ("status", "final"),
    [(200, True), (400, True), (401, False), (404, True), (408, False), (429, False), (500, False)],
)
def test_what_is_worth_another_try(status: int, final: bool) -> None:
    assert is_final(answered("id", "a", status, {})) is final


async def answered_by(reply: Reply, folder: Path) -> tuple[int, int, Path]:
    """The exit code for a file of one request, how often that was sent, and the output."""
    source, out = write(folder / "in.jsonl", request("a")), folder / "out.jsonl"
    async with scripted(reply) as fake:
        code = await asyncio.to_thread(batch, source, out, "--url", fake.url)
    return code, len(fake.requests), out


async def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    answers = [whole({"error": {"message": "full"}}, 429), whole({"fine": 1})]

    async def busy_once(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))

    code, sent, out = await answered_by(busy_once, tmp_path)
    assert (code, sent) == (0, 2)
    assert results(out)["a"]["response"]["body"] == {"fine": 1}


async def test_a_server_that_will_not_come_back_is_asked_once(tmp_path: Path) -> None:
    gone = says(whole({"error": {"message": "gone", "type": "engine_given_up"}}, 503))
    code, sent, out = await answered_by(gone, tmp_path)
    assert (code, sent, results(out)["a"]["response"]["status_code"]) == (FAILED, 1, 503)


async def test_requests_end_when_the_command_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arrived = threading.Event()

    async def never(request: Request, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await asyncio.Event().wait()

    def interrupted(*given: object, **named: object) -> object:
        arrived.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "wait", interrupted)
    code, _, out = await answered_by(never, tmp_path)
    assert (code, out.read_text()) == (INTERRUPTED, "")


def test_a_server_of_its_own_that_cannot_start_says_why() -> None:
    with (
        pytest.raises(ServerError, match="the server ended: there is no option --zzqq"),
        own_server(["--zzqq"]) as server,
    ):
        server.wait_until_ready()


@pytest.mark.slow
def test_a_server_of_its_own_can_be_asked_and_ends() -> None:
    with (
        own_server(["demo", "--dtype", "float32", "--kv-cache-memory-bytes", "64M"]) as own,
        ServerClient(own.url) as server,
    ):
        own.wait_until_ready()
        assert server.get("/v1/models")["data"][0]["id"] == "demo"
    with ServerClient(own.url) as server, pytest.raises(ServerError, match="start the server"):
        server.get("/v1/models")
