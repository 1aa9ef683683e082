"""Experts of GGUF files, which lie in one tensor for each layer, are read as the modules of their own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_blocks import in_blocks
from gguf_metadata import Fields
from gguf_pairs import (
    Pair,
    Recipe,
    assert_dummy_weights_are_alike,
    assert_same_logits,
    load_pair,
    write_pair,
)
from gguf_writer import Blob, write_gguf
from safetensors.torch import load_file

from models.checkpoint.weights import Reading, Weights
from models.gguf.config import raw_config
from models.gguf.file import read_gguf
from models.gguf.tensors import open_gguf
from models.layers.experts import Experts
from models.ops.grouped_matrix import Grouped, widen
from models.quantization.matrices import read_matrix
from models.quantization.methods.gguf import Gguf, GgufFields
from models.weight_coding import SavedQuantization
from models.weight_slices import Cut, WeightsError

SHAPE = {"hidden_size": 64, "intermediate_size": 128}
PUBLISHED = Recipe("Q8_0", {"exps": "MXFP4"})
"""The codings of gpt-oss as it is published: experts in mxfp4, and else 8 bits."""


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("gpt_oss"), "GptOssForCausalLM", PUBLISHED, **SHAPE)


def test_gpt_oss_in_mxfp4(gpt_oss: Pair) -> None:
    assert_same_logits(gpt_oss, 1, 2, 4)


def test_gates_and_ups_in_one_tensor(tmp_path: Path) -> None:
    recipe = Recipe("Q4_0", {"down": "Q6_K"}, fused=True)
    shape = {"hidden_size": 256, "num_attention_heads": 8, "moe_intermediate_size": 256}
    pair = write_pair(tmp_path, "Qwen3MoeForCausalLM", recipe, **shape)
    assert "blk.0.ffn_gate_up_exps.weight" in read_gguf(pair.file).tensors
    assert_same_logits(pair, 1, 2)


def test_layers_that_look_further_ahead_are_left_out(tmp_path: Path) -> None:
    further = tuple(
        Blob(f"blk.3.{name}.weight", (8,), 0, bytes(32)) for name in ("attn_norm", "nextn.shared_head_norm")
    )
    recipe = Recipe("F32", blobs=further)
    pair = write_pair(tmp_path, "Glm4MoeForCausalLM", recipe, num_nextn_predict_layers=1)
    assert read_gguf(pair.file).metadata["glm4moe.block_count"] == 4
    assert "model.layers.3.shared_head.norm.weight" in open_gguf(pair.file).tensors
    assert_same_logits(pair, 1)


def weights_of(pair: Pair) -> Weights:
    codings = {f"model.layers.0.mlp.experts.{name}_proj": "MXFP4" for name in ("gate", "up", "down")}
    method = Gguf(SavedQuantization(pair.file.name, {}), GgufFields(codings=codings))
    reading = Reading(
        open_gguf(pair.file), device=torch.device("cpu"), dtype=torch.float32, quantization=method
    )
    return Weights(reading, "model.layers.0.mlp.experts")


def test_a_piece_of_an_expert_reads_no_more_than_its_blocks(gpt_oss: Pair) -> None:
    plain = load_file(gpt_oss.plain / "model.safetensors")["model.layers.0.mlp.experts.down_proj"][4].t()
    for cut, count in ((None, 64 * 4), (Cut(0, 8, 16), 8 * 4), (Cut(1, 32, 64), 64), (Cut(1, 48, 80), 128)):
        down = weights_of(gpt_oss) / "4.down_proj"
        matrix = read_matrix(down, (64, 128), cut)
        assert isinstance(matrix, Grouped)
        assert torch.equal(widen(matrix), plain if cut is None else cut.of(plain))
        assert down.reading.bytes_read == count * 17


def test_a_rank_reads_its_own_piece_of_all_experts(gpt_oss: Pair) -> None:
    whole, *halves = (
        sum(
            parameter.nbytes
            for module in model.modules()
            if isinstance(module, Experts)
            for parameter in module.parameters()
        )
        for model in (*load_pair(gpt_oss, 1), *load_pair(gpt_oss, 2))
    )
    assert all(half < 0.6 * whole for half in halves)


def test_dummy_weights_have_the_same_bytes(gpt_oss: Pair) -> None:
    assert_dummy_weights_are_alike(gpt_oss)


def test_a_power_that_is_nan_is_refused(gpt_oss: Pair, tmp_path: Path) -> None:
    data = bytearray(gpt_oss.file.read_bytes())
    data[read_gguf(gpt_oss.file).tensors["blk.2.ffn_up_exps.weight"].offset] = 255
    copy = tmp_path / "model.gguf"
    copy.write_bytes(data)
    with pytest.raises(
        WeightsError, match=r"layers\.2\.mlp\.experts\.0\.up_proj\.weight has .*\(MXFP4\).* NaN"
    ):
        load_pair(Pair(copy, gpt_oss.plain))


def file_of(folder: Path, arch: str, more: Fields, *shape: int) -> Path:
    """Write a file with one tensor of all experts."""
    matrix = np.zeros(shape)
    fields: Fields = {"general.architecture": arch, f"{arch}.expert_count": 4, **more}
    blob = Blob("blk.0.ffn_gate_up_exps.weight", shape, 8, in_blocks(matrix, "Q8_0")[0])
    return write_gguf(folder / "model.gguf", fields, [blob])


@pytest.mark.parametrize("shape", [(3, 2, 32), (4, 3, 32), (4, 32), (4, 0, 32)], ids=str)
def test_tensors_of_another_shape_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"model\.gguf: blk\.0\.ffn_gate_up_exps\.weight has .*expert"):
        open_gguf(file_of(tmp_path, "qwen3moe", {}, *shape))


def test_too_many_experts_are_refused(tmp_path: Path) -> None:
    file = file_of(tmp_path, "qwen3moe", {"qwen3moe.expert_count": 5000}, 5000, 2, 32)
    with pytest.raises(WeightsError, match="not one of experts"):
        open_gguf(file)


def test_other_functions_of_scores_are_refused(gpt_oss: Pair, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, "Glm4MoeForCausalLM", Recipe("F32", fields={"glm4moe.expert_gating_func": 1}))
    with pytest.raises(ValueError, match=r"glm4moe\.expert_gating_func is 1, but only 2 is read"):
        raw_config(read_gguf(pair.file))
