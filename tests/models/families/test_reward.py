"""Reward models. Their classes come as code with checkpoints, so the expected values are computed here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from drive import Driver, load_ranks
from internlm2 import make_internlm2, rewrite
from pooled import Params, load_pooled, pool
from safetensors.torch import load_file
from tiny import hf_logits, tiny_checkpoint
from torch import Tensor, nn

PROMPTS = [[8, 44, 9, 10, 11, 44, 12, 44], [44], [5, 6, 7]]
ALL = Params("token_classify")


@torch.inference_mode()
def trunk(folder: Path, architecture: str, tokens: list[int]) -> Tensor:
    model = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager")
    return model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("labels", [1, 2])
def test_qwen2(labels: int, tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen2ForCausalLM", tmp_path, tie_word_embeddings=False)
    expected = [trunk(folder, "Qwen2ForCausalLM", tokens) for tokens in PROMPTS]
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, labels))
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    process = labels == 2
    architecture = "Qwen2ForProcessRewardModel" if process else "Qwen2ForRewardModel"
    rewrite(folder, tensors, architectures=[architecture])

    model = load_pooled(folder, pooler_config={"step_tag_id": 44} if process else {})
    assert type(model[0]).__name__ == architecture
    assert model[0].pooler.tasks == {"token_classify"}
    assert model[0].pooler.needs_all_rows(ALL)
    assert not [name for name, _ in model[0].named_parameters() if "lm_head" in name]  # pyright: ignore
    for tokens, rows, values in zip(PROMPTS, expected, pool(model, PROMPTS, ALL, chunk=3), strict=True):
        with torch.inference_mode():
            scores = head(rows)
        if process:
            scores = scores[torch.tensor(tokens) == 44].softmax(-1)
        torch.testing.assert_close(values, scores, atol=1e-5, rtol=0)


def test_the_tag_of_qwen2_is_known(tmp_path: Path) -> None:
    """The tag is <extra_0>, which these prompts do not contain."""
    folder = tiny_checkpoint("Qwen2ForCausalLM", tmp_path, tie_word_embeddings=False)
    head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    rewrite(folder, tensors, architectures=["Qwen2ForProcessRewardModel"])
    model = load_pooled(folder)
    assert [rows.shape for rows in pool(model, PROMPTS, ALL)] == [(0, 2)] * 3
    every = load_pooled(folder, pooler_config={"pooling_type": "ALL"})
    assert [rows.shape for rows in pool(every, PROMPTS, ALL)] == [(8, 2), (1, 2), (3, 2)]


@pytest.fixture
def internlm2(tmp_path: Path) -> tuple[Path, list[Tensor]]:
    """A checkpoint of InternLM2, and the logits of a Llama with the same weights."""
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path)
    expected = [hf_logits(folder, tokens) for tokens in PROMPTS]
    return make_internlm2(folder), expected


@pytest.mark.parametrize("size", [1, 2])
def test_internlm2_is_llama_under_other_names(internlm2: tuple[Path, list[Tensor]], size: int) -> None:
    folder, expected = internlm2
    logits = Driver(load_ranks(folder, size)).step(dict(enumerate(PROMPTS)))
    for row, right in enumerate(expected):
        torch.testing.assert_close(logits[row], right, atol=1e-4, rtol=0)


def test_internlm2_rewards(internlm2: tuple[Path, list[Tensor]]) -> None:
    folder, _ = internlm2
    tensors = load_file(folder / "model.safetensors")
    del tensors["output.weight"]
    value = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    rewrite(folder, tensors | {"v_head.weight": value}, architectures=["InternLM2ForRewardModel"])
    model = load_pooled(folder)
    hidden = Driver(model).hidden(dict(enumerate(PROMPTS)))
    for row, values in enumerate(pool(model, PROMPTS, ALL)):
        torch.testing.assert_close(values, hidden[row] @ value.T)
        assert values.shape == (len(PROMPTS[row]), 1)
