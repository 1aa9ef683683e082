"""Generating and pooling from the same weights: a real worker under the scheduler, beside Hugging Face."""

from collections.abc import Callable, Iterator
from pathlib import Path

import driven
import numpy as np
import pytest
import torch
import transformers
from driven import text
from safetensors.torch import load_file, save_file
from sizes import engine_config
from tiny import hf_greedy, hf_model, tiny_checkpoint

from engine_core.engine import Engine
from engine_core.protocol import AddRequest, Failed, Pooled, Tokens
from models.checkpoint.damage import FiniteCheck
from models.config import ConfigError
from worker.protocol import QUERY_GONE, Pooling, Sampling, Task
from worker.steps.output import NOT_FINITE, NOT_FINITE_VALUES

TEXTS = [[5, 17, 40, 99, 250, 31, 8], [300], [11, 12, 13, 11, 12, 13, 11, 12, 13, 7, 200, 4, 90, 31]]
TAG = 31
ALL_TASKS = ["generate", "embed", "token_embed"]
OUTPUT = 6

Start = Callable[..., Engine]
Answer = Tokens | Pooled | Failed


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("BertModel", tmp_path_factory.mktemp("bert"))


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[Engine] = []

    def open_engine(folder: Path, **changes: object) -> Engine:
        fields = {"block_size": 4, "num_gpu_blocks_override": 64, "max_model_len": 64, "cpu_threads": 1}
        config = engine_config(folder, **{**fields, **changes})
        engines.append(Engine.start(config, lambda _: None))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.stop()


def pool(id: int, tokens: list[int], task: Task = "embed", **params: object) -> AddRequest:
    return AddRequest(id=id, tokens=tokens, params=Pooling(task=task, **params))  # pyright: ignore[reportArgumentType]


def write(id: int, tokens: list[int], **params: object) -> AddRequest:
    named = {"max_tokens": OUTPUT, "temperature": 0, **params}
    return AddRequest(id=id, tokens=tokens, params=Sampling(**named))  # pyright: ignore[reportArgumentType]


def run(engine: Engine, *adds: AddRequest) -> dict[int, list[Answer]]:
    for add in adds:
        engine.add(0, add)
    return driven.run(engine)  # pyright: ignore[reportReturnType]


def vectors(answers: list[Answer]) -> np.ndarray:
    (only,) = answers
    assert isinstance(only, Pooled), only
    return np.frombuffer(only.vectors.data, "<f4").reshape(only.vectors.shape)


@torch.inference_mode()
def hidden(folder: Path, tokens: list[int]) -> np.ndarray:
    return hf_model(folder).model(torch.tensor([tokens])).last_hidden_state[0].numpy()  # pyright: ignore


def normal(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


MERGE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "LAST": lambda rows: rows[-1],
    "CLS": lambda rows: rows[0],
    "MEAN": lambda rows: rows.mean(0),
}


@pytest.mark.parametrize("budget", [1, 3, 64])
@pytest.mark.parametrize("mode", ["LAST", "CLS", "MEAN"])
def test_texts_are_pooled_beside_texts_that_are_written(
    llama: Path, start: Start, mode: str, budget: int
) -> None:
    engine = start(
        llama,
        tasks=ALL_TASKS,
        runner="generate",
        pooler_config={"pooling_type": mode},
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    adds = [write(10 + i, tokens) for i, tokens in enumerate(TEXTS)]
    adds[1:1] = [pool(i, tokens) for i, tokens in enumerate(TEXTS)]
    adds += [pool(20 + i, tokens, "token_embed") for i, tokens in enumerate(TEXTS)]
    told = run(engine, *adds)
    assert [text(told[10 + i]) for i in range(3)] == hf_greedy(llama, TEXTS, OUTPUT)
    for i, tokens in enumerate(TEXTS):
        rows = hidden(llama, tokens)
        np.testing.assert_allclose(vectors(told[i]), normal(MERGE[mode](rows)), atol=1e-5)
        np.testing.assert_allclose(vectors(told[20 + i]), normal(rows), atol=1e-5)


@pytest.mark.parametrize("budget", [2, 64])
def test_rows_of_steps_are_found_wherever_they_were_computed(llama: Path, start: Start, budget: int) -> None:
    pooler = {"pooling_type": "STEP", "step_tag_id": TAG}
    engine = start(llama, tasks=ALL_TASKS, pooler_config=pooler, max_num_batched_tokens=budget)
    told = run(engine, *(pool(i, tokens, "token_embed") for i, tokens in enumerate(TEXTS)))
    for i, tokens in enumerate(TEXTS):
        tagged = [place for place, token in enumerate(tokens) if token == TAG]
        np.testing.assert_allclose(vectors(told[i]), normal(hidden(llama, tokens)[tagged]), atol=1e-5)


def test_a_decoder_offers_all_that_its_weights_can_do(llama: Path, start: Start) -> None:
    worker = start(llama).ready.worker
    assert (worker.tasks, worker.widths) == (("generate", "embed"), {"embed": 32})
    asked = start(llama, tasks=ALL_TASKS).ready.worker
    assert asked.tasks == ("generate", "embed", "token_embed")
    assert asked.widths == {"embed": 32, "token_embed": 32}
    narrow = start(llama, tasks=["embed"])
    assert narrow.ready.worker.tasks == ("embed",)
    (refused,) = run(narrow, write(1, [1]))[1]
    assert isinstance(refused, Failed) and "does not generate" in refused.message
    assert start(llama, tasks=["token_embed", "generate"]).ready.worker.tasks == ("generate", "token_embed")
    assert start(llama, pooler_config={"task": "embed"}).ready.worker.tasks == ("generate", "embed")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": ["rank"]}, "no task 'rank'; there are generate, transcription, embed"),
        ({"tasks": ["classify"]}, "--tasks asks for classify, and this model, .* offers embed, token_embed"),
        ({"tasks": ["transcription"]}, "--tasks asks for transcription, and this model, .* offers generate"),
        ({"pooler_config": {"task": "classify"}}, "asks for classify, and this model offers embed"),
        ({"runner": "pooling", "tasks": ["generate"]}, "--tasks asks for generate"),
        ({"runner": "draft"}, "--runner draft: must be one of auto, generate, pooling"),
    ],
)
def test_what_cannot_be_offered_is_refused_at_the_start(
    llama: Path, start: Start, options: dict[str, object], words: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        start(llama, **options)


# Encoders


@torch.inference_mode()
def bert_hidden(folder: Path, tokens: list[int], second_at: int = 0) -> np.ndarray:
    model = transformers.AutoModel.from_pretrained(folder).eval()
    types = [int(bool(second_at) and place >= second_at) for place in range(len(tokens))]
    states = model(torch.tensor([tokens]), token_type_ids=torch.tensor([types])).last_hidden_state
    return states[0].numpy()


def test_an_encoder_reads_whole_texts_and_tells_pairs_apart(bert: Path, start: Start) -> None:
    engine = start(bert, max_num_batched_tokens=64, max_num_seqs=4)
    assert (engine.ready.worker.tasks, engine.ready.worker.num_blocks) == (("embed", "token_embed"), 0)
    texts = [*TEXTS, list(range(5, 69)), TEXTS[0]]
    adds = [pool(i, tokens, second_at=3 if i == 2 else 0) for i, tokens in enumerate(texts)]
    told = run(engine, *adds, pool(9, TEXTS[0], "token_embed", dimensions=5, use_activation=False))
    for i, tokens in enumerate(texts):
        expected = bert_hidden(bert, tokens, second_at=3 if i == 2 else 0)[0]
        np.testing.assert_allclose(vectors(told[i]), normal(expected), atol=1e-5)
    np.testing.assert_allclose(vectors(told[9]), bert_hidden(bert, TEXTS[0])[:, :5], atol=1e-5)


def test_the_budget_of_an_encoder_follows_its_longest_text(bert: Path, start: Start) -> None:
    assert start(bert, max_model_len=512).ready.worker.max_num_batched_tokens == 4096
    with pytest.raises(ValueError, match=r"--max-num-batched-tokens 32 is less than --max-model-len \(64\)"):
        start(bert, max_num_batched_tokens=32)


# Late interaction, and what goes wrong


def test_late_interaction_is_the_sum_of_best_matches(llama: Path, start: Start) -> None:
    engine = start(llama, tasks=ALL_TASKS)
    query, *documents = TEXTS
    run(engine, pool(1, query, "token_embed", late_query="q"))
    adds = [
        pool(2 + i, tokens, "token_embed", late_document="q", use_activation=None)
        for i, tokens in enumerate(documents)
    ]
    told = run(engine, *adds, pool(8, query, "token_embed", late_document="other"))
    told |= run(engine, pool(9, query, "token_embed", late_document="q", dimensions=4))
    for i, tokens in enumerate(documents):
        matches = normal(hidden(llama, query)) @ normal(hidden(llama, tokens)).T
        np.testing.assert_allclose(vectors(told[2 + i]), [matches.max(1).sum()], atol=1e-4)
    assert told[8] == [Failed(id=8, code=503, message=QUERY_GONE)]
    (narrow,) = told[9]
    assert isinstance(narrow, Failed) and "vectors have 32 numbers and the document's 4" in narrow.message


def test_what_is_not_finite_fails_its_own_sequence(
    llama: Path, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may compute such numbers. Here a weight is one, which loading would refuse."""
    monkeypatch.setattr(FiniteCheck, "add", lambda *_: None)
    bad = 77
    weights = load_file(llama / "model.safetensors")
    weights["model.embed_tokens.weight"][bad] = torch.nan
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine = start(tmp_path, tasks=ALL_TASKS)
    adds = [pool(1, TEXTS[0]), pool(2, [5, bad]), write(3, [bad]), write(4, TEXTS[0])]
    told = run(engine, *adds, pool(5, [5, bad], "token_embed"), pool(6, TEXTS[2], "token_embed"))
    assert told[2] == [Failed(2, 500, NOT_FINITE_VALUES)]
    assert told[3] == [Failed(3, 500, NOT_FINITE)]
    assert told[5] == [Failed(5, 500, NOT_FINITE_VALUES)]
    np.testing.assert_allclose(vectors(told[1]), normal(hidden(llama, TEXTS[0])[-1]), atol=1e-5)
    np.testing.assert_allclose(vectors(told[6]), normal(hidden(llama, TEXTS[2])), atol=1e-5)
    assert text(told[4]) == hf_greedy(llama, TEXTS[:1], OUTPUT)[0]
