"""One server whose adapters chat, embed and classify from one base, each as PEFT computes it, under load and
when its engine is killed."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from later import Later
from live import LONG, SMALL, LiveServer, chunks, events, serving, wait_until

from models.checkpoint.hub import DEMO

torch, transformers, peft_adapters = Later("torch"), Later("transformers"), Later("peft_adapters")

pytestmark = pytest.mark.turns(5)

TEXT = "Once upon a time there was a little dog"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
CLASSES = {
    "words": ("AutoModelForCausalLM", "CAUSAL_LM", {}),
    "other": ("AutoModelForCausalLM", "CAUSAL_LM", {}),
    "kinds": ("AutoModelForSequenceClassification", "SEQ_CLS", {"num_labels": 3}),
    "parts": ("AutoModelForTokenClassification", "TOKEN_CLS", {"num_labels": 2}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, found = tmp_path_factory.mktemp("adapters"), dict[str, Any]()
    for seed, (name, (cls, task, of)) in enumerate(CLASSES.items(), 1):
        base = getattr(transformers, cls).from_pretrained(DEMO, dtype=torch.float32, **of)
        found[name] = peft_adapters.make_adapter(
            Path(DEMO), folder / name, seed, base, task_type=task, target_modules=["q_proj", "v_proj"]
        )
    (folder / "kinds" / "config.json").write_text(json.dumps({"id2label": {0: "dog", 1: "cat", 2: "bird"}}))
    return found


@pytest.fixture(scope="module")
def server(made: dict[str, Any]) -> Iterator[LiveServer]:
    named = (f"{name}={each.folder}" for name, each in made.items() if name != "other")
    runtime = ("--allow-runtime-lora", "--lora-dir", str(made["other"].folder.parent))
    told = ("--enable-prompt-tokens-details",)
    tasks = ("--tasks", "generate", "embed", "token_embed")
    with serving("demo", *SMALL, *tasks, *told, "--lora-modules", *named, *runtime) as found:
        yield found


def answer(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    answered = server.post(path, body)
    assert answered.status_code == 200, answered.text
    return answered.json()


def tokens_of(server: LiveServer, text: str = TEXT) -> list[int]:
    return answer(server, "/tokenize", prompt=text)["tokens"]


def text_of(server: LiveServer, model: str, **body: Any) -> str:
    given = {"model": model, "prompt": TEXT, **GREEDY, **body}
    return answer(server, "/v1/completions", **given)["choices"][0]["text"]


def test_words_are_those_that_peft_computes(server: LiveServer, made: dict[str, Any]) -> None:
    tokens = tokens_of(server)
    given = len(tokens)
    for _ in range(GREEDY["max_tokens"]):
        tokens.append(int(made["words"].logits(tokens)[-1].argmax()))
    expected = answer(server, "/detokenize", tokens=tokens[given:])["prompt"]
    assert text_of(server, "words") == expected
    assert text_of(server, "demo") != expected


def test_streams_chats_and_choices_are_of_the_adapter(server: LiveServer) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}], **GREEDY}
    told: dict[str, str] = {}
    for model in ("demo", "words"):
        asked = {**chat, "model": model}
        whole = answer(server, "/v1/chat/completions", **asked)
        assert whole["model"] == model
        with server.stream("/v1/chat/completions", {**asked, "stream": True}) as response:
            parts = chunks(response)
        assert {part["model"] for part in parts} == {model}
        streamed = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
        assert streamed == whole["choices"][0]["message"]["content"]
        several = answer(server, "/v1/chat/completions", **asked, n=3)
        assert {one["message"]["content"] for one in several["choices"]} == {streamed}
        told[model] = streamed
    assert told["demo"] != told["words"]


def test_other_apis_name_adapters_too(server: LiveServer) -> None:
    messages, expected = [{"role": "user", "content": TEXT}], set[str]()
    for model in ("words", "demo"):
        greedy = {"model": model, "temperature": 0}
        claude = answer(server, "/v1/messages", **greedy, messages=messages, max_tokens=8)
        openai = answer(server, "/v1/responses", **greedy, input=TEXT, max_output_tokens=8, store=False)
        ollama = answer(
            server, "/api/chat", model=model, messages=messages, stream=False,
            options={"temperature": 0, "num_predict": 8},
        )  # fmt: skip
        assert (claude["model"], openai["model"], ollama["model"]) == (model, model, model)
        texts = {claude["content"][0]["text"], openai["output"][-1]["content"][0]["text"]}
        texts.add(ollama["message"]["content"])
        assert len(texts) == 1
        expected |= texts
    assert len(expected) == 2


def test_vectors_and_labels_are_those_that_peft_computes(server: LiveServer, made: dict[str, Any]) -> None:
    tokens = tokens_of(server)
    with torch.inference_mode():
        states = made["words"].model(input_ids=torch.tensor([tokens]), output_hidden_states=True)
        last = torch.nn.functional.normalize(states.hidden_states[-1][0, -1], dim=-1)
        kinds = made["kinds"].model(input_ids=torch.tensor([tokens])).logits[0].softmax(-1)
    vector = answer(server, "/v1/embeddings", model="words", input=tokens)["data"][0]["embedding"]
    assert vector == pytest.approx(last.tolist(), abs=1e-4)
    assert vector != answer(server, "/v1/embeddings", model="demo", input=tokens)["data"][0]["embedding"]
    [labelled] = answer(server, "/classify", model="kinds", input=TEXT)["data"]
    assert labelled["probs"] == pytest.approx(kinds.tolist(), abs=1e-4)
    assert labelled["label"] == ("dog", "cat", "bird")[int(kinds.argmax())]
    [rows] = answer(server, "/pooling", model="parts", input=TEXT, task="token_classify")["data"]
    expected = made["parts"].logits(tokens).softmax(-1)
    assert torch.tensor(rows["data"]).allclose(expected, atol=1e-4)
    refused = server.post("/classify", {"model": "demo", "input": TEXT})
    assert refused.status_code == 400 and "classify" in refused.json()["error"]["message"]


def test_cached_prefixes_are_of_one_adapter(server: LiveServer) -> None:
    prompt = "A story of the sea, in which there is no cat and no dog. " * 12
    for model, found in (("demo", False), ("words", False), ("demo", True), ("words", True)):
        told = answer(server, "/v1/completions", model=model, prompt=prompt, **GREEDY)
        assert (told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) is found, model


def test_adapters_come_and_go_under_load(server: LiveServer) -> None:
    expected = {model: text_of(server, model) for model in ("demo", "words")}
    assert server.post(LOAD, {"lora_name": "late", "lora_path": "other"}).is_success
    expected["late"] = text_of(server, "late")
    assert len(set(expected.values())) == 3
    over = Event()

    def ask(model: str) -> int:
        asked = 0
        while not over.is_set():
            assert text_of(server, model) == expected[model]
            asked += 1
        return asked

    with ThreadPoolExecutor(4) as pool, server.stream("/v1/completions", {**LONG, "model": "late"}) as kept:
        asking = [pool.submit(ask, model) for model in ("demo", "words")]
        data = events(kept)
        next(data)
        for _ in range(4):
            assert server.post(UNLOAD, {"lora_name": "late"}).is_success
            gone = server.post("/v1/completions", {"model": "late", "prompt": TEXT})
            assert gone.status_code == 404
            assert server.post(LOAD, {"lora_name": "late", "lora_path": "other"}).is_success
            assert text_of(server, "late") == expected["late"]
        over.set()
        assert min(one.result() for one in asking) > 0
        assert list(data)[-1] == "[DONE]"


@contextmanager
def killing(server: LiveServer) -> Iterator[None]:
    killed = server.engine_pid()
    os.kill(killed, signal.SIGKILL)
    yield
    wait_until(lambda: server.get("/ready").status_code == 200, 10)
    assert server.engine_pid() != killed


def test_answers_go_on_when_the_engine_is_killed(server: LiveServer) -> None:
    server.post(LOAD, {"lora_name": "late", "lora_path": "other", "load_inplace": True})
    models = ("demo", "words", "late")
    expected = {model: text_of(server, model, max_tokens=300) for model in models}
    labels = answer(server, "/classify", model="kinds", input=TEXT)["data"]

    def stream(model: str) -> str:
        body = {**LONG, "prompt": TEXT, "model": model, "max_tokens": 300}
        with server.stream("/v1/completions", body) as one:
            data = events(one)
            found = [next(data)]
            begun[model].set()
            found += data
        assert found[-1] == "[DONE]"
        return "".join(choice["text"] for each in found[:-1] for choice in json.loads(each)["choices"])

    begun = {model: Event() for model in models}
    with ThreadPoolExecutor(8) as pool:
        streams = {model: pool.submit(stream, model) for model in models}
        assert all(each.wait(20) for each in begun.values())
        with killing(server):
            waiting = {model: pool.submit(text_of, server, model, max_tokens=300) for model in models}
            labelled = pool.submit(answer, server, "/classify", model="kinds", input=TEXT)
            assert {model: one.result() for model, one in streams.items()} == expected
            assert {model: one.result() for model, one in waiting.items()} == expected
            assert labelled.result()["data"] == labels
    listed = [card["id"] for card in answer_of_get(server, "/v1/models")["data"]]
    assert listed == ["demo", "words", "kinds", "parts", "late"]


def answer_of_get(server: LiveServer, path: str) -> dict[str, Any]:
    return server.get(path).json()


def test_an_api_process_that_is_killed_finds_what_the_engine_has(server: LiveServer) -> None:
    server.post(LOAD, {"lora_name": "late", "lora_path": "other", "load_inplace": True})
    assert server.post(UNLOAD, {"lora_name": "parts"}).is_success
    [killed] = server.api_pids()
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: server.api_pids() not in ([], [killed]), 10)
    names = {card["id"] for card in answer_of_get(server, "/v1/models")["data"]}
    assert names == {"demo", "words", "kinds", "late"}, "what was unloaded stays so"
    assert text_of(server, "late") != text_of(server, "words")


def test_metrics_name_adapters(server: LiveServer) -> None:
    text_of(server, "words")
    page = server.get("/metrics").text
    assert 'vllm:lora_requests_info{max_lora="8",' in page
    assert 'facet:lora_generation_tokens_total{adapter="words",model_name="demo"} ' in page
