"""A small jina-embeddings-v3 as it was published: each task is answered by its own adapter, in one batch."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from later import Later
from live import SMALL, LiveServer, serving

encoded, published, tiny, torch = map(Later, ("encoded", "published_tasks", "tiny", "torch"))

pytestmark = pytest.mark.turns(8)

TEXT = "Once upon a time"
EMBED = "/v1/embeddings"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint as transformers has saved its base, and as it was published."""
    made = tmp_path_factory.mktemp("tasks")
    saved = tiny.tiny_checkpoint("JinaEmbeddingsV3Model", made / "saved")
    found = published.publish(saved, made / "published")
    kinds = "custom_st.Transformer", "sentence_transformers.models.Pooling"
    modules = [{"idx": n, "name": f"{n}", "path": "", "type": kind} for n, kind in enumerate(kinds)]
    modules[0]["kwargs"], modules[1]["path"] = ["task"], "1_Pooling"
    (found / "modules.json").write_text(json.dumps(modules))
    (found / "1_Pooling").mkdir()
    (found / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return saved, found


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path]) -> Iterator[LiveServer]:
    """Workers hold two adapters at a time: those of other tasks are loaded again."""
    few = ("--dtype", "float32", "--enable-lora", "--max-cpu-loras", "2")
    with serving(str(folders[1]), "--served-model-name", "jina", *few, *SMALL) as found:
        yield found


def vector(server: LiveServer, **body: Any) -> list[float]:
    answered = server.post(EMBED, {"input": TEXT, **body})
    assert answered.status_code == 200, answered.text
    assert answered.json()["model"] == body.get("model", "jina")
    return answered.json()["data"][0]["embedding"]


def expected(server: LiveServer, folder: Path, text: str) -> list[float]:
    tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    return encoded.hf_hidden(folder, tokens).mean(0).tolist()


def test_tasks(server: LiveServer, folders: tuple[Path, Path], tmp_path: Path) -> None:
    saved, found = folders
    tasks: dict[str, Any] = {task: {"task": task} for task in published.TASKS}
    with ThreadPoolExecutor(6) as pool:
        *own, base = pool.map(lambda given: vector(server, **given), [*tasks.values(), {}])
    assert base == pytest.approx(expected(server, saved, TEXT), abs=1e-4)
    for task, answer in zip(published.TASKS, own, strict=True):
        merged = published.merge(found, saved, tmp_path / task, task)
        text = published.INSTRUCTIONS[task] + TEXT
        assert answer == pytest.approx(expected(server, merged, text), abs=1e-4), task
        assert answer == vector(server, model=task) == vector(server, model="jina", task=task)


@pytest.mark.parametrize(
    "body", [{"task": "code.query"}, {"task": 5}, {"model": "separation", "task": "classification"}]
)
def test_other_tasks_are_refused_with_those_that_there_are(server: LiveServer, body: dict[str, Any]) -> None:
    refused = server.post(EMBED, {"input": TEXT, **body})
    assert refused.status_code == 400
    told = refused.json()["error"]
    assert told["param"] == "task" and ", ".join(published.TASKS) in told["message"]


def test_tasks_are_listed_as_adapters(server: LiveServer) -> None:
    cards = server.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards if card["parent"] == "jina"] == list(published.TASKS)
    assert server.post(EMBED, {"model": "none", "input": TEXT, "task": "separation"}).status_code == 404


def test_tasks_of_one_of_several_models(folders: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(f'[[models]]\nmodel = "{folders[1]}"\nname = "jina"\n[[models]]\nmodel = "demo"\n')
    with serving("--models", str(path)) as several:
        own = vector(several, model="jina", task="separation")
        assert own != vector(several, model="jina")
        named = several.post(EMBED, {"model": "jina:separation", "input": TEXT})
        assert named.json()["data"][0]["embedding"] == own
        assert several.post(EMBED, {"model": "jina", "input": TEXT, "task": "x"}).status_code == 400
