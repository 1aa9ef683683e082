"""Spaces of checkpoints: 40 changes, each of which makes another space or does not."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_facts import READY, changed
from pooled import load_pooled
from pooling_files import put_json, put_modules
from safetensors.torch import load_file, save_file
from sizes import worker_config
from tiny import tiny_checkpoint

from models.config import read_config
from models.pooling.config import read_pooling
from models.pooling.pooler import Pooler
from server.options.parse_server_options import parse
from server.reading.body_table import read_texts
from server.reading.prompts import ReadingContext, ReadingOptions
from server.requests.checkpoint_facts import find_facts, open_tokenizer
from server.requests.spaces import find_space
from server.schemas.pooling_bodies import EmbeddingRequest, PoolingRequest
from server.schemas.tei import EmbedAllRequest, EmbedRequest
from worker.config import Place
from worker.devices.fingerprint import find_digests
from worker.devices.selection import choose_dtype, open_device
from worker.features.pooling.vectors import vector_facts, widths


def asking(**fields: object) -> EmbeddingRequest:
    return EmbeddingRequest.model_validate({"input": "the fox", **fields})


TEXT = asking()
MEAN: dict[str, Any] = {"pooling_mode": "mean"}
DENSE: dict[str, Any] = {"in_features": 32, "out_features": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence encoder with a Dense module and prompts."""
    folder = tiny_checkpoint("BertModel", tmp_path_factory.mktemp("bert"), hidden_size=32)
    modules(folder, Pooling=MEAN, Dense=DENSE, Normalize=None)
    for name in ("2_Dense", "3_Dense"):
        put_weights(folder / name, 1.0)
    prompts = {"query": "query: ", "document": "", "again": "query: "}
    put_json(folder, "config_sentence_transformers.json", {"prompts": prompts})
    put_json(folder, "sentence_bert_config.json", {"max_seq_length": 32})
    return folder


def modules(folder: Path, **listed: dict[str, Any] | None) -> None:
    put_modules(folder, ("Transformer", None), *listed.items())


def put_weights(folder: Path, value: float) -> None:
    folder.mkdir(exist_ok=True)
    weights = {"linear.weight": torch.full((16, 32), value), "linear.bias": torch.zeros(16)}
    save_file(weights, folder / "model.safetensors")


Edit = Callable[[Path], object]


@dataclass
class Change:
    """What one case changes: the files of the checkpoint, the options of a server, or the request."""

    edit: Edit | None = None
    options: dict[str, Any] = field(default_factory=dict)
    pooler: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    body: Any = field(default_factory=lambda: TEXT)
    values: str = "float"


@cache
def pooler_of(folder: Path, overrides: str, asked: str) -> Pooler:
    [model] = load_pooled(folder, overrides=json.loads(overrides), pooler_config=json.loads(asked))
    return model.pooler


def space(folder: Path, change: Change) -> str:
    config = read_config(folder, change.overrides)
    pooling = read_pooling(folder, config, change.pooler)
    worker = worker_config(folder=str(folder), model=config, pooling=pooling, **change.options)
    device = open_device(worker)
    digests = find_digests(worker, device, choose_dtype(worker, device), 64)
    pooler = pooler_of(folder, json.dumps(change.overrides), json.dumps(change.pooler))
    tasks = ("embed", "token_embed")
    made, width = vector_facts(tasks, pooler, digests.vectors), widths(tasks, pooler)
    ready = changed(READY, tasks=tasks, vectors=made, widths=width)
    said = [f"--pooler-config={json.dumps(change.pooler)}"] if change.pooler else []
    server = parse([str(folder), *said, *change.flags], {})
    tokenizer = open_tokenizer(server, folder)
    facts = find_facts(server, ready, folder, tokenizer)
    found = read_texts(change.body, ReadingContext(facts, tokenizer, ReadingOptions()))
    return str(find_space(facts, found.items[0].params, found.prompt, change.values))


def weights(**changes: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        for change in changes.values():
            change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


def split(folder: Path) -> None:
    """The same weights in two files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, files = sorted(tensors), [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {name: files[i % 2] for i, name in enumerate(names)}
    for file in files:
        save_file({name: tensors[name] for name in names if index[name] == file}, folder / file)
    put_json(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def edited(name: str, **fields: object) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def token_changed(folder: Path) -> None:
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text())
    said["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    path.write_text(json.dumps(said))


def cuts_in_file(folder: Path) -> None:
    path = folder / "tokenizer.json"
    raw = path.read_text()
    cut = '"truncation":{"direction":"Right","max_length":16,"strategy":"LongestFirst","stride":0}'
    assert '"truncation":null' in raw
    path.write_text(raw.replace('"truncation":null', cut, 1))


def half(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        tensors[name] = tensors[name].bfloat16()


def one_more(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("layer.0.output.dense.weight"))
    tensors[name][0, 0] += 1


SAME = {
    "nothing": Change(),
    "dtype": Change(options={"dtype": "bfloat16"}),
    "threads": Change(options={"cpu_threads": 2}),
    "slots": Change(options={"max_num_seqs": 3}),
    "ranks": Change(options={"place": Place(tensor_size=2)}),
    "stages": Change(options={"place": Place(stages=2)}),
    "name": Change(flags=["--served-model-name", "other"]),
    "files": Change(split),
    "words of config.json": Change(edited("config.json", _name_or_path="x", transformers_version="9")),
    "labels": Change(edited("config.json", id2label={"0": "a"}, label2id={"a": 0})),
    "allowed dimensions": Change(overrides={"is_matryoshka": True, "matryoshka_dimensions": [8]}),
    "length": Change(edited("sentence_bert_config.json", max_seq_length=16)),
    "cuts of the tokenizer's file": Change(cuts_in_file),
    "a prompt without text": Change(body=asking(prompt_name="document")),
    "many texts": Change(body=asking(input=["the fox", "a"])),
    "cut texts": Change(body=asking(truncate_prompt_tokens=2)),
    "base64": Change(body=asking(encoding_format="base64", embed_dtype="float16")),
    "another API": Change(body=EmbedRequest.model_validate({"inputs": "the fox"})),
    "all dimensions": Change(body=asking(dimensions=16)),
    "normalized by name": Change(body=asking(use_activation=True)),
    "pooling by name": Change(pooler={"pooling_type": "MEAN"}),
}
OTHER = {
    "weights": Change(weights(one=one_more)),
    "their type": Change(weights(half=half)),
    "dummy weights": Change(options={"load_format": "dummy"}),
    "other dummy weights": Change(options={"load_format": "dummy", "seed": 3}),
    "quantized": Change(options={"quantization": "int8"}),
    "quantized further": Change(options={"quantization": "int4"}),
    "layers": Change(overrides={"layer_norm_eps": 1e-3}),
    "tokenizer": Change(token_changed),
    "small letters": Change(edited("sentence_bert_config.json", do_lower_case=True)),
    "pooling": Change(pooler={"pooling_type": "CLS"}),
    "no dense": Change(lambda folder: modules(folder, Pooling=MEAN, Normalize=None)),
    "other dense": Change(lambda folder: put_weights(folder / "2_Dense", 2.0)),
    "activation": Change(
        lambda folder: modules(
            folder,
            Pooling=MEAN,
            Dense={**DENSE, "activation_function": "torch.nn.modules.linear.Identity"},
            Normalize=None,
        )
    ),
    "not normalized": Change(lambda folder: modules(folder, Pooling=MEAN, Dense=DENSE)),
    "prompts left out": Change(
        lambda folder: modules(folder, Pooling={**MEAN, "include_prompt": False}, Dense=DENSE, Normalize=None)
    ),
    "dimensions": Change(pooler={"dimensions": 8}),
    "a prompt": Change(body=asking(prompt_name="query")),
    "token ids": Change(body=asking(input=[5, 6])),
    "no special tokens": Change(body=asking(add_special_tokens=False)),
    "each token": Change(body=EmbedAllRequest.model_validate({"inputs": "the fox"})),
    "binary": Change(values="binary"),
}


def test_every_change_makes_another_space_or_none(folder: Path, tmp_path: Path) -> None:
    def named(name: str, change: Change) -> str:
        if change.edit is None:
            return space(folder, change)
        copy = shutil.copytree(folder, tmp_path / name.replace(" ", "_"))
        change.edit(copy)
        return space(copy, change)

    base = space(folder, Change())
    for name, change in SAME.items():
        assert named(name, change) == base, name
    found = {name: named(name, change) for name, change in OTHER.items()}
    assert len({base, *found.values()}) == 1 + len(OTHER) and len(SAME) + len(OTHER) >= 40


def test_equal_ways_by_other_names_are_one_space(folder: Path) -> None:
    """A prompt counts by its text, and a default like a request's own choice."""
    body = asking(prompt_name="query")
    asked = space(folder, Change(body=body))
    assert space(folder, Change(body=body.model_copy(update={"prompt_name": "again"}))) == asked
    assert space(folder, Change(flags=["--default-prompt-name", "query"])) == asked
    bare = PoolingRequest.model_validate({"input": "the fox", "task": "embed", "use_activation": False})
    assert space(folder, Change(body=bare)) == space(folder, Change(pooler={"use_activation": False}))
