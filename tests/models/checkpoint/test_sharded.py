"""Checkpoints with files for each rank: a rank has the same weights from them, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_checkpoint

from models.config import read_config
from models.loader import LoadOptions, load_model
from models.parallel.parallel import Parallel
from models.sharding import run, shard
from models.weight_pieces import WeightsError


def weights(folder: Path, load_format: str, parallel: Parallel) -> dict[str, torch.Tensor]:
    config = read_config(folder)
    options = LoadOptions(config, folder, dtype=torch.float32, parallel=parallel, load_format=load_format)
    return dict(load_model(options).named_parameters())


@pytest.mark.parametrize(
    ("name", "ranks", "stages"),
    [("LlamaForCausalLM", 2, 1), ("Qwen3MoeForCausalLM", 2, 2), ("Qwen3_5ForCausalLM", 1, 2)],
)
def test_each_rank_has_the_same_weights(tmp_path: Path, name: str, ranks: int, stages: int) -> None:
    folder, out = tiny_checkpoint(name, tmp_path / "whole"), tmp_path / "cut"
    shard(folder, out, ranks, stages)
    files = {path.name for path in out.glob("*.safetensors")}
    assert files == {f"model-rank-{rank}-part-0.safetensors" for rank in range(ranks * stages)}
    for rank in range(ranks * stages):
        parallel = Parallel(rank % ranks, ranks, stage=rank // ranks, stages=stages)
        expected = weights(folder, "auto", parallel)
        for path in out.glob("*.safetensors"):  # each finds all that it needs in its own
            path.rename(path if f"rank-{rank}-" in path.name else tmp_path / path.name)
        found = weights(out, "sharded_state", parallel)
        for path in tmp_path.glob("*.safetensors"):
            path.rename(out / path.name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[each], expected[each]) for each in expected)


def test_what_was_not_written_for_it_is_refused(tmp_path: Path) -> None:
    folder, out = tiny_checkpoint("LlamaForCausalLM", tmp_path / "whole"), tmp_path / "cut"
    shard(folder, out, 2, 1)
    with pytest.raises(WeightsError, match="was written for -tp 2 -pp 1"):
        weights(out, "sharded_state", Parallel())
    with pytest.raises(WeightsError, match="has no model-rank-0-part-0"):
        weights(folder, "sharded_state", Parallel())
    save_file({"model.norm.weight": torch.ones(4)}, out / "model-rank-0-part-0.safetensors")
    with pytest.raises(WeightsError, match="was not written by `facet shard`"):
        weights(out, "sharded_state", Parallel(0, 2))


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, out = tiny_checkpoint("LlamaForCausalLM", tmp_path / "whole"), tmp_path / "cut"
    assert run([str(folder), "--output", str(out)], "facet shard") == 0
    assert "rank 0 of 1 is written" in capfd.readouterr().out
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    asked = ([], "File exists"), (["-tp", "3"], "--tensor-parallel-size 3"), (["-pp", "0"], "or more")
    for words, said in asked:
        assert run([str(folder), "--output", str(out), *words], "facet shard") == 1
        assert said in capfd.readouterr().err
