"""Whole experts on ranks: which rank holds which, the same results as of one rank, and no byte more sent."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import Driver, load_ranks, run_in_chunks
from mixtures import FAMILIES
from safetensors.torch import load_file
from tiny import tiny_checkpoint

from models.config import ConfigError, read_config
from models.parallel.experts import ExpertPlace, Placement, check_experts, count_experts

PROMPT = list(range(40, 63))


def test_placements() -> None:
    def held(placement: Placement) -> list[list[int]]:
        return [list(ExpertPlace(rank, 3, placement).numbers(6)) for rank in range(3)]

    assert held("linear") == [[0, 1], [2, 3], [4, 5]]
    assert held("round_robin") == [[0, 3], [1, 4], [2, 5]]
    with pytest.raises(ValueError, match="7 experts cannot be divided evenly among 3 ranks"):
        ExpertPlace(0, 3).numbers(7)


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_with_whole_experts_have_the_results_of_one(
    family: str, placement: Placement, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family, tmp_path, **FAMILIES[family])
    expected = run_in_chunks(Driver(load_ranks(folder)), 0, PROMPT, 7)
    for size in (2, 4):
        found = run_in_chunks(Driver(load_ranks(folder, size, placement=placement)), 0, PROMPT, 7)
        torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=0)
        assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("family", ["GptOssForCausalLM", "GraniteMoeSharedForCausalLM"])
def test_ranks_read_their_own_experts_alone(family: str, read: list[int], tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path, **FAMILIES[family], num_key_value_heads=4)
    tensors = load_file(folder / "model.safetensors")
    marks = ("experts.", "input_linear", "output_linear")
    experts = sum(
        tensor.nbytes
        for name, tensor in tensors.items()
        if any(mark in name for mark in marks) and "shared" not in name
    )
    load_ranks(folder)
    load_ranks(folder, 4, placement="linear")
    load_ranks(folder, 4, placement="round_robin")
    alone, *ranks = read
    assert experts > alone / 2
    for bytes_read in ranks:
        assert bytes_read < alone - experts * 3 // 4
    assert sum(ranks[:4]) == sum(ranks[4:])


def test_experts_of_modules_of_their_own_are_left_to_other_ranks(read: list[int], tmp_path: Path) -> None:
    folder = tiny_checkpoint("MixtralForCausalLM", tmp_path, num_local_experts=4)
    load_ranks(folder, 2)
    load_ranks(folder, 2, placement="round_robin")
    assert read[:2] == read[2:]


def sent(folder: Path, placement: Placement | None) -> int:
    ranks: Any = load_ranks(folder, 2, placement=placement)
    Driver(ranks).step({0: PROMPT, 1: PROMPT[:3]})
    return ranks[0].model.layers[0].mlp.experts.parallel.group._group.sent


def test_whole_experts_send_no_byte_more_than_pieces(tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen2MoeForCausalLM", tmp_path, num_experts=8)
    assert sent(folder, "linear") == sent(folder, None) > 0


@pytest.mark.parametrize("placement", [None, "linear"])
def test_the_log_says_what_a_rank_holds(
    placement: Placement | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_checkpoint("MixtralForCausalLM", tmp_path, num_local_experts=4, intermediate_size=2048)
    with caplog.at_level(logging.INFO):
        load_ranks(folder, 2, placement=placement)
        load_ranks(folder, 1)
    which = "2 of 4 experts" if placement else "4 experts, 1/2 of the width of each,"
    lines = [record.message for record in caplog.records if "experts" in record.message]
    assert lines[0].startswith(f"this worker holds {which} in each of its layers with experts (3): ")
    assert lines[1].startswith("this worker holds 4 experts in each of its layers with experts (3): 9 MiB, ")
    assert lines[0].endswith((": 4 MiB, and 0 MiB of other weights", ": 5 MiB, and 0 MiB of other weights"))


def refusal(folder: Path, ranks: int, **raw: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | raw))
    with pytest.raises(ConfigError) as refused:
        check_experts(read_config(folder), ranks)
    return str(refused.value)


def test_what_cannot_be_divided_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen3MoeForCausalLM", tmp_path, num_experts=6)
    assert count_experts(read_config(folder)) == 6
    check_experts(read_config(folder), 3)
    assert refusal(folder, 4) == (
        "--enable-expert-parallel: 6 experts cannot be divided evenly among 4 ranks; choose "
        "--tensor-parallel-size 2, or leave the option out, and each rank holds a piece of every expert"
    )
    dense = tiny_checkpoint("LlamaForCausalLM", tmp_path / "dense")
    assert "LlamaForCausalLM has no experts; leave the option out" in refusal(dense, 2)
