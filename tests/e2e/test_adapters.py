"""One server of a model and its adapters, which are named, listed, loaded and unloaded."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from live import LiveServer, refusal, serving
from written_adapters import write_adapter

from models.checkpoint.hub import DEMO

pytestmark = pytest.mark.turns(6)

PROMPT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("adapters")
    write_adapter(found / "nothing", Path(DEMO), 1, size=0)
    for seed in (2, 3):
        write_adapter(found / f"some{seed}", Path(DEMO), seed)
    (found / "some3" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    cached = found / "hub" / "models--owner--repo"
    write_adapter(cached / "snapshots" / "0a" / "sql", Path(DEMO), 5)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0a")
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    modules = ("--lora-modules", f"nothing={folder}/nothing", f"some={folder}/some2", "sql=owner/repo/sql")
    runtime = ("--allow-runtime-lora", "--lora-dir", str(folder), "--api-server-count", "2", "-dp", "2")
    looked_for = ("--lora-resolver", "--lora-repos", "owner/repo")
    small = ("--kv-cache-memory-bytes", "64M", "--dtype", "float32")
    hub = {"HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    with serving("demo", *modules, *runtime, *looked_for, *small, env=hub) as found:
        yield found


def text(server: LiveServer, model: str) -> str:
    answered = server.post("/v1/completions", {**PROMPT, "model": model})
    assert answered.status_code == 200, answered.text
    assert answered.json()["model"] in (model.rpartition(":")[2], "demo")
    return answered.json()["choices"][0]["text"]


def test_names_choose_who_answers_and_none_is_mistaken(server: LiveServer) -> None:
    base, some = text(server, "demo"), text(server, "some")
    assert text(server, "nothing") == base
    assert some != base
    assert text(server, "demo:some") == some
    for _ in range(4):  # in any of the API processes and engines, with prefixes that are cached
        assert (text(server, "demo"), text(server, "some")) == (base, some)


def test_the_openai_sdk_lists_them(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        cards = {card.id: card for card in client.models.list()}
        assert set(cards) >= {"demo", "nothing", "some"}
        assert cards["some"].model_dump()["parent"] == "demo"
        assert client.models.retrieve("some").id == "some"
        with pytest.raises(openai.NotFoundError, match="Did you mean some"):
            client.completions.create(model="sone", prompt="a")


def test_vectors_are_those_of_the_adapter(server: LiveServer) -> None:
    bodies = [{"model": name, "input": "a dog"} for name in ("demo", "some")]
    answers = [server.post("/v1/embeddings", body) for body in bodies]
    first, second = (each.json()["data"][0]["embedding"] for each in answers)
    assert first != second
    named = httpx.get(f"{server.url}/info", headers={"X-Model": "some"}).json()
    assert named["model_id"] == "some"


def test_they_come_are_replaced_and_go(server: LiveServer) -> None:
    loaded = server.post(LOAD, {"lora_name": "demo:late", "lora_path": "some2"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'demo:late' added successfully.")
    assert text(server, "late") == text(server, "some")
    again = server.post(LOAD, {"lora_name": "late", "lora_path": "some3"})
    assert again.status_code == 400
    assert "has already been loaded" in again.json()["error"]["message"]
    assert again.json()["error"]["type"] == "InvalidUserInput"
    assert server.post(LOAD, {"lora_name": "late", "lora_path": "some3", "load_inplace": True}).is_success
    assert text(server, "late") != text(server, "some")
    gone = server.post(UNLOAD, {"lora_name": "late"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'late' removed successfully.")


def test_names_that_nobody_has_loaded_are_looked_for_in_folders_and_on_the_hub(server: LiveServer) -> None:
    with ThreadPoolExecutor(8) as threads:  # by both API processes at once
        found = set(threads.map(lambda _: text(server, "some3"), range(8)))
    assert len(found) == 1 and found != {text(server, "some"), text(server, "demo")}
    told = {"messages": [{"role": "user", "content": PROMPT["prompt"]}], "max_tokens": 12, "temperature": 0}
    for long in ({}, {"metadata": {"text": "x" * 17_000}}):  # which the helper process reads
        chat = server.post("/v1/chat/completions", {**told, **long, "model": "some3"}).json()
        assert {chat["choices"][0]["message"]["content"]} == found  # written by its own template
    assert text(server, "owner/repo/sql") == text(server, "sql")
    assert server.output().count("adapter some3: ") == 2  # once in each engine
    names = [card["id"] for card in server.get("/v1/models").json()["data"]]
    assert {"some3", "owner/repo/sql"} <= set(names)
    assert server.post(LOAD, {"lora_name": "mine", "lora_path": "owner/repo/sql"}).is_success
    missing = server.post("/v1/completions", {**PROMPT, "model": "owner/repo/none"})
    assert missing.status_code == 404


def test_what_cannot_be_loaded_is_refused(server: LiveServer, folder: Path) -> None:
    outside = folder.parent / "outside"
    write_adapter(outside, Path(DEMO), 4)
    (folder / "link").symlink_to(outside)
    (folder / "huge").mkdir(exist_ok=True)
    (folder / "huge" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with (folder / "huge" / "adapter_model.safetensors").open("wb") as file:
        file.write(os.urandom(3) + b"\xff" * 5 + b"{" * 1000)
    for path in ("link", "../outside", str(outside), "nowhere", ".", "a\0b", "x" * 5000):
        answered = server.post(LOAD, {"lora_name": "bad", "lora_path": path})
        assert (answered.status_code, "no such folder" in answered.text) == (404, True), path
    answered = server.post(LOAD, {"lora_name": "bad", "lora_path": "huge"})
    assert answered.status_code == 400
    assert "was found but could not be loaded" in answered.json()["error"]["message"]
    (folder / "empty").mkdir(exist_ok=True)
    empty = server.post(LOAD, {"lora_name": "bad", "lora_path": "empty"})
    assert "empty has no adapter_config.json" in empty.json()["error"]["message"]
    for name in ("x" * 201, "a,b", "a\nb"):
        named = server.post(LOAD, {"lora_name": name, "lora_path": "some2"})
        assert (named.status_code, "no comma" in named.text) == (400, True), name
    missing = server.post(LOAD, {"lora_name": "bad"})
    assert "must be provided" in missing.json()["error"]["message"]
    assert server.post(LOAD, {"lora_name": "demo", "lora_path": "some2"}).status_code == 400
    assert server.post(UNLOAD, {"lora_name": "bad"}).status_code == 404
    assert text(server, "nothing") == text(server, "demo")


def test_a_start_with_one_that_cannot_be_loaded_ends(tmp_path: Path) -> None:
    assert "has no adapter_config.json" in refusal("demo", "--lora-modules", f"a={tmp_path}")
