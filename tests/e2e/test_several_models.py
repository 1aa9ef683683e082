"""One server of several models: loads, evictions, names that move, and engines that are killed."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from chromium import PROGRAM, browser
from live import LONG, LiveServer, events, serving, wait_until
from written_adapters import write_adapter

from models.checkpoint.hub import DEMO
from server.run.commands import run
from worker.host.machine import own_memory

pytestmark = pytest.mark.turns(6)

FILE = """
[[models]]
model = "demo"
name = "story"
aliases = ["prod"]
lora-modules = ["told=./adapters/told"]

[[models]]
model = "./copy"
name = "copy"
lora-modules = [{name = "early", path = "./adapters/early"}]
lora-resolver = true
allow-runtime-lora = true
lora-dir = ["./adapters"]

[[models]]
model = "./broken"
name = "broken"

[[models]]
model = "demo"
name = "ranks"
tensor-parallel-size = 2

[[models]]
model = "demo"
name = "twins"
data-parallel-size = 2
"""
FLAGS = ("--kv-cache-memory-bytes", "64M", "--dtype", "float32", "--restart-wait", "60")
PROMPT = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    for name in ("copy", "broken", "third", "fourth"):
        shutil.copytree(DEMO, found / name)
    for seed, name in enumerate(("told", "early", "late")):
        write_adapter(found / "adapters" / name, DEMO, seed)
    for path in (found / "broken").glob("*.safetensors"):
        os.truncate(path, 1000)
    (found / "models.toml").write_text(FILE)
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with serving("--models", str(folder / "models.toml"), *FLAGS) as found:
        yield found


def cards(server: LiveServer) -> dict[str, dict[str, Any]]:
    return {card["id"]: card for card in server.get("/v1/models").json()["data"]}


def complete(server: LiveServer, model: str, **more: object) -> str:
    answer = server.post("/v1/completions", {**PROMPT, "model": model, **more}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def pid_of(server: LiveServer, name: str) -> int:
    """The process id of a model's engine, which its name in lists tells."""
    found = list[int]()
    for pid in server.children():
        with suppress(OSError):
            if f"facet:engine {name}".startswith(Path(f"/proc/{pid}/comm").read_text().strip()):
                found.append(pid)
    engines = [pid for pid in found if f"engine {name}"[:8] in Path(f"/proc/{pid}/comm").read_text()]
    assert engines, server.output()
    return engines[0]


def workers(server: LiveServer) -> list[int]:
    """The processes of ranks, and of all engines."""
    found = list[int]()
    for pid in server.children():
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith(("facet:engine", "facet: rank")):
                found.append(pid)
    return found


class Stream:
    """A stream that is read by a thread."""

    def __init__(self, server: LiveServer, model: str, **more: object) -> None:
        self._body = {**LONG, "model": model, **more}
        self.begun = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self.end = self._thread.submit(self._read, server)
        assert self.begun.wait(120)

    def _read(self, server: LiveServer) -> str:
        last = ""
        with server.stream("/v1/completions", self._body, timeout=120) as response:
            for data in events(response):
                self.begun.set()
                last = data
        return last


def test_a_model_is_loaded_when_it_is_asked_for(server: LiveServer) -> None:
    before = cards(server)
    assert {card["state"] for card in before.values()} == {"unloaded"} and before["prod"]["model"] == "story"
    assert before["copy"]["tasks"] == ["generate"]
    assert complete(server, "copy") == complete(server, "story") == complete(server, "prod")
    after = cards(server)["copy"]
    assert after["state"] == "loaded"
    assert after["memory"] > 10 << 20
    metrics = server.get("/metrics").text
    assert metrics.count("# TYPE vllm:prompt_tokens_total counter") == 1
    assert 'vllm:prompt_tokens_total{engine="0",model_name="copy"}' in metrics


def test_adapters_are_reached_by_their_names_and_loaded_with_their_models(server: LiveServer) -> None:
    before = cards(server)
    assert {name: before[name]["parent"] for name in ("told", "early")} == {"told": "story", "early": "copy"}
    plain, told, early = (complete(server, name) for name in ("story", "told", "early"))
    assert len({plain, told, early}) == 3
    assert complete(server, "copy:early") == early
    assert complete(server, "copy:late") not in (plain, told, early)
    after = cards(server)
    assert (after["copy:late"]["parent"], after["early"]["state"]) == ("copy", "loaded")
    assert server.get("/v1/models/copy:late").json()["id"] == "copy:late"
    for name in ("late", "story:late", "copy:none"):
        assert server.post("/v1/completions", {**PROMPT, "model": name}).status_code == 404, name
    metrics = server.get("/metrics").text
    assert metrics.count("# TYPE vllm:lora_requests_info gauge") == 1
    lines = [line.rpartition(" ")[0] for line in metrics.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    assert server.post("/models/unload", {"model": "early"}).is_success  # the model that has it
    assert complete(server, "early") == early


def test_an_adapter_that_was_ordered_is_loaded_again_with_its_model(server: LiveServer) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    order = {"lora_name": "ordered", "lora_path": "late"}
    assert server.post(load, order).text == "Success: LoRA adapter 'ordered' added successfully."
    late = complete(server, "copy:late")
    assert server.post("/models/unload", {"model": "copy"}).is_success
    assert cards(server)["ordered"]["parent"] == "copy"
    assert complete(server, "ordered") == late
    for wrong, status in (({"model": "story"}, 400), ({"lora_name": "early"}, 400), ({"model": "no"}, 404)):
        assert server.post(load, {**order, **wrong}).status_code == status, wrong
    assert server.post(unload, {"lora_name": "ordered"}).is_success
    assert server.post("/v1/completions", {**PROMPT, "model": "ordered"}).status_code == 404


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")
def test_the_page_chooses_among_models(server: LiveServer) -> None:
    server.post("/models/unload", {"model": "copy"})
    with browser() as tab:
        tab.open(f"{server.url}/")
        tab.wait("document.body?.dataset.ready")
        listed = tab.run("[...document.getElementById('model').options].map(one => one.value).join()")
        assert listed.split(",")[0] == "story" and {"copy", "broken", "prod"} <= {*listed.split(",")}
        tab.run(
            "(list => { list.value = 'copy'; list.dispatchEvent(new Event('change')) })"
            "(document.getElementById('model'))"
        )
        tab.run("document.getElementById('input').value = 'Hi'; document.getElementById('input').focus()")
        tab.press("Enter")
        tab.wait(
            "document.getElementById('stop').hidden && "
            "document.querySelector('#messages li:not(.user) .text')?.textContent"
        )
        assert cards(server)["copy"]["state"] == "loaded"
        assert tab.complaints == []


def test_a_name_that_nobody_has_is_refused_with_those_there_are(server: LiveServer) -> None:
    answer = server.post("/v1/completions", {**PROMPT, "model": "gpt-5"})
    assert answer.status_code == 404
    assert "This server has: story, prod, copy, broken" in answer.json()["error"]["message"]


def test_one_that_cannot_be_loaded_harms_no_other(server: LiveServer) -> None:
    answer = server.post("/v1/completions", {**PROMPT, "model": "broken"}, timeout=120)
    assert answer.status_code == 503
    assert "broken cannot be loaded" in answer.json()["error"]["message"]
    assert answer.json()["error"]["type"] == "load_failed"
    assert complete(server, "story")


def test_an_alias_moves_without_one_failed_request(server: LiveServer) -> None:
    failed, stop = list[object](), threading.Event()

    def ask() -> int:
        count = 0
        while not stop.is_set():
            answer = server.post("/v1/completions", {**PROMPT, "model": "prod"}, timeout=120)
            if answer.status_code != 200:
                failed.append(answer.text)
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        for name in ("copy", "story", "copy"):
            answer = server.post("/models/load", {"model": name, "alias": "prod"}, timeout=120)
            assert answer.json()["state"] == "loaded", answer.text
            assert cards(server)["prod"]["model"] == name
            time.sleep(0.2)
        stop.set()
        assert all(one.result() for one in asking)
    assert failed == []
    assert server.post("/models/load", {"model": "copy", "alias": "story"}).status_code == 400


def test_memory_is_given_back_unless_a_model_is_in_use(server: LiveServer) -> None:
    stream = Stream(server, "copy", max_tokens=2000)  # which it goes on for while a busy machine asks
    answer = server.post("/models/unload", {"model": "copy"})
    assert answer.status_code == 503, answer.text
    assert stream.end.result() == "[DONE]"
    pid = pid_of(server, "copy")
    assert server.post("/models/unload", {"model": "copy"}).json()["state"] == "unloaded"
    assert not Path(f"/proc/{pid}").exists()


def test_commands_load_unload_and_list(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    def facet(*words: str) -> str:
        assert run("facet", [*words, "--url", server.url]) == 0
        return capsys.readouterr().out

    assert facet("load", "copy", "--alias", "prod").startswith("copy is loaded, up to ")
    rows = [line.split() for line in facet("models").splitlines()]
    assert ["copy", "2048", "generate,", "embed", "loaded"] in [row[:5] for row in rows]
    assert any(row[0] == "prod" and row[-3:] == ["alias", "of", "copy"] for row in rows)
    assert facet("unload", "copy") == "copy is unloaded\n"


def test_an_engine_that_is_killed_harms_no_other_and_its_own_streams_go_on(server: LiveServer) -> None:
    complete(server, "copy")
    streams = [Stream(server, name) for name in ("story", "copy")]
    os.kill(pid_of(server, "copy"), signal.SIGKILL)
    assert [stream.end.result() for stream in streams] == ["[DONE]", "[DONE]"]
    assert complete(server, "copy")


def test_models_outlive_the_api_process(server: LiveServer) -> None:
    for name in ("copy", "story"):
        complete(server, name)
    pids = {name: pid_of(server, name) for name in ("story", "copy")}
    [api] = server.api_pids()
    os.kill(api, signal.SIGKILL)
    wait_until(lambda: server.api_pids() not in ([], [api]), 10)
    server.wait_ready()
    assert complete(server, "copy") == complete(server, "story")
    assert {name: pid_of(server, name) for name in pids} == pids


def test_a_file_that_is_read_again_brings_models_and_takes_others_away(
    server: LiveServer, folder: Path
) -> None:
    path = folder / "models.toml"
    path.write_text("[[models]]\nmodel = ")
    os.kill(server.process.pid, signal.SIGHUP)
    wait_until(lambda: "the models stay as they were" in server.output(), 10)
    third = '[[models]]\nmodel = "./third"\nname = "third"\n'
    path.write_text(FILE.replace('name = "copy"', 'name = "copy"\nmax-model-len = 256') + third)
    os.kill(server.process.pid, signal.SIGHUP)
    wait_until(lambda: "third" in cards(server), 10)
    assert complete(server, "third")
    assert complete(server, "copy")
    assert cards(server)["copy"]["max_model_len"] == 256
    path.write_text(FILE)
    os.kill(server.process.pid, signal.SIGHUP)
    wait_until(lambda: "third" not in cards(server), 10)
    assert server.post("/v1/completions", {**PROMPT, "model": "third"}).status_code == 404
    assert complete(server, "copy")
    assert cards(server)["copy"]["max_model_len"] == 2048


def test_models_may_have_ranks_and_replicas(server: LiveServer) -> None:
    texts = [complete(server, "story")]
    before = {*workers(server)}
    texts += [complete(server, name) for name in ("ranks", "twins")]
    assert texts == texts[:1] * 3
    wait_until(lambda: server.output().count(" twins: ready on cpu") == 2, 60)
    rank = next(pid for pid in workers(server) if "rank 1" in Path(f"/proc/{pid}/comm").read_text())
    twin = next(pid for pid in workers(server) if "engine 1" in Path(f"/proc/{pid}/comm").read_text())
    assert cards(server)["ranks"]["memory"] > cards(server)["story"]["memory"]
    streams = [Stream(server, name) for name in ("ranks", "twins", "twins")]
    os.kill(rank, signal.SIGKILL)
    os.kill(twin, signal.SIGKILL)
    assert [stream.end.result() for stream in streams] == ["[DONE]"] * 3
    for name in ("ranks", "twins"):
        assert server.post("/models/unload", {"model": name}, timeout=60).json()["state"] == "unloaded"
    assert {*workers(server)} <= before
    assert complete(server, "twins") == complete(server, "ranks") == texts[0]


def test_models_go_when_others_need_their_room(folder: Path) -> None:
    names = ["copy", "third", "fourth"]
    budget = 600 << 20
    with serving(*(str(folder / name) for name in names), *FLAGS, "--memory", str(budget)) as server:
        texts = set[str]()
        with ThreadPoolExecutor(3) as pool:
            for _ in range(2):
                texts |= set(pool.map(lambda name: complete(server, name), names))
        assert len(texts) == 1
        states = [card["state"] for card in cards(server).values()]
        assert "loaded" in states
        assert "is unloaded" in server.output()
        taken = sum(own_memory(pid) for pid in (server.process.pid, *server.children()))
        assert taken <= 1.05 * budget, taken >> 20


def test_prefixes_are_found_again_after_a_model_was_away(folder: Path, tmp_path: Path) -> None:
    flags = ("--kv-cache-dir", str(tmp_path), "--enable-prompt-tokens-details")
    body = {"model": "copy", "prompt": "Once upon a time " * 100, "max_tokens": 1}
    with serving(*(str(folder / name) for name in ("copy", "third")), *FLAGS, *flags) as server:
        for expected in (False, True):
            answer = server.post("/v1/completions", body, timeout=120).json()
            details = answer["usage"].get("prompt_tokens_details") or {}
            assert (details.get("cached_tokens", 0) > 0) == expected, answer
            assert server.post("/models/unload", {"model": "copy"}, timeout=120).status_code == 200
