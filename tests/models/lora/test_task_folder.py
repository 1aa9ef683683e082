"""What of a published checkpoint with tasks cannot be served is refused, with what is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from published_tasks import TASKS, publish
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint
from torch import Tensor

from models.lora.task_folder import make_folder, task_adapters
from models.lora_config import read_adapter
from models.plain_files import FileError

FC1 = "roberta.encoder.layers.1.mlp.fc1.parametrizations.weight.0.lora_"
TYPES = "roberta.embeddings.token_type_embeddings.parametrizations.weight.0.lora_A"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    return publish(tiny_checkpoint("JinaEmbeddingsV3Model", folder / "saved"), folder / "it")


def test_an_adapter_is_made_of_the_factors_of_each_task(published: Path, tmp_path: Path) -> None:
    made = make_folder(published, tmp_path)
    assert make_folder(published, tmp_path) == made
    stacks = load_file(published / "model.safetensors")
    for number, (task, folder) in enumerate(task_adapters(made).items()):
        config, tensors = read_adapter(folder), load_file(folder / "adapter_model.safetensors")
        assert task == TASKS[number] and config.most_rank == 8
        assert config.scale("roberta.layers.1.mlp.fc1", 4) == 0.25
        assert config.scale("roberta.embeddings.word_embeddings", 8) == 0.25
        assert torch.equal(
            tensors["base_model.model.roberta.layers.1.mlp.fc1.lora_A.weight"], stacks[f"{FC1}A"][number]
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda stored: stored.pop(f"{FC1}B"), "not both factors"),
        (lambda stored: stored.update({f"{FC1}A": stored[f"{FC1}A"][:4].clone()}), r"has the shape \[4, "),
        (lambda stored: stored.update({f"{FC1}A": stored[f"{FC1}A"][:, :2].clone()}), "lora_rank is 4"),
        (lambda stored: stored.update({TYPES: stored[TYPES].repeat(1, 2, 1)}), "2 types of tokens"),
        (lambda stored: stored.update({f"{FC1}A": stored[f"{FC1}A"].long()}), "cannot be read: 'I64'"),
    ],
)
def test_other_factors_are_refused(
    published: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], said: str
) -> None:
    folder, cache = tmp_path / "it", tmp_path / "cache"
    folder.mkdir()
    cache.mkdir()
    (folder / "config.json").write_bytes((published / "config.json").read_bytes())
    stored = load_file(published / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(FileError, match=said):
        make_folder(folder, cache)


def test_there_are_none_where_there_are_no_weights(published: Path, tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "config.json").write_bytes((published / "config.json").read_bytes())
    assert task_adapters(make_folder(tmp_path / "it", tmp_path)) == {}
