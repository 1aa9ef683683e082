"""Checkpoints with layers for multi-token prediction load without them."""

import json
from pathlib import Path

import pytest
import torch
from drive import Driver
from safetensors.torch import load_file, save_file
from tiny import hf_logits, tiny_checkpoint

from models.config import read_config
from models.loader import LoadOptions, load_model
from models.model import ServedModel
from models.parallel.parallel import Parallel
from models.weight_slices import WeightsError

PROMPT = [7, 30, 299, 4, 18, 18, 120]
LAYERS = 2


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS)


def extended(llama: Path, folder: Path, names: list[str], **fields: object) -> Path:
    """Write the same checkpoint with more tensors and fields of config.json."""
    config = json.loads((llama / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    extra = {name: torch.zeros(3) for name in names}
    save_file(load_file(llama / "model.safetensors") | extra, folder / "model.safetensors")
    return folder


def load(folder: Path, parallel: Parallel = Parallel()) -> ServedModel:
    return load_model(LoadOptions(read_config(folder), folder, dtype=torch.float32, parallel=parallel))


@pytest.mark.parametrize(
    ("names", "count", "scopes"),
    [
        (["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"], 0, "mtp"),
        (
            ["model.mtp_layers.0.input_proj.weight", "model.mtp_norm.weight"],
            0,
            "model.mtp_layers, model.mtp_norm",
        ),
        (
            [
                "model.layers.2.eh_proj.weight",
                "model.layers.2.mlp.up_proj.weight",
                "model.layers.3.enorm.weight",
            ],
            2,
            "model.layers.2, model.layers.3",
        ),
    ],
)
def test_they_are_left_unread_and_named_in_the_log(
    llama: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    names: list[str],
    count: int,
    scopes: str,
) -> None:
    folder = extended(llama, tmp_path, names, num_nextn_predict_layers=count)
    with caplog.at_level("INFO", "models"):
        model = load(folder)
    assert [record.getMessage() for record in caplog.records] == [
        f"the checkpoint's layers for multi-token prediction are not a part of the model itself: {scopes}"
    ]
    logits = Driver([model]).step({0: PROMPT})[0]
    torch.testing.assert_close(logits, hf_logits(llama, PROMPT), atol=1e-4, rtol=0)


def test_of_several_ranks_one_says_so(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = extended(llama, tmp_path, ["mtp.fc.weight"])
    with caplog.at_level("INFO", "models"):
        load(folder, Parallel(rank=1, size=2))
        load(folder, Parallel(stage=1, stages=2))
    assert not caplog.records


def test_layers_that_config_json_does_not_count_are_an_error(llama: Path, tmp_path: Path) -> None:
    folder = extended(llama, tmp_path, ["model.layers.3.enorm.weight"], num_nextn_predict_layers=1)
    with pytest.raises(WeightsError, match=r"model\.layers\.3\.enorm\.weight .* has no place in the model"):
        load(folder)
