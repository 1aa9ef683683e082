"""The drafters of the demo model: their arithmetic, their training in a few steps, and the shipped files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from demo_training.drafters import (
    AUX_LAYERS,
    GUESSES,
    Acceptance,
    Eagle3,
    acceptance,
    answered,
    eagle3_drafter,
    load_draft_model,
    load_eagle3,
    load_target,
    model_drafter,
    streams,
)
from demo_training.packing import NO_LOSS, Encoder, batches
from demo_training.train_drafts import (
    Pace,
    chains_of,
    draft_model_losses,
    eagle3_losses,
    fit,
    new_draft_model,
    new_eagle3,
    orthogonal,
    parts,
    save_draft_model,
    save_eagle3,
)
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig

from models.checkpoint.hub import DEMO

DRAFTS = DEMO / "drafts"
TARGET, CODEC = load_target()
KNOWN = torch.arange(0, 2048, 2)


def tiny_head() -> Eagle3:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_hidden_layers=1,
    )
    torch.manual_seed(1)
    return Eagle3(config, torch.arange(1, 50, 3)).eval()


@torch.inference_mode()
def test_a_chain_sees_its_own_guesses_as_entries_behind_those_of_the_target() -> None:
    head, n, start = tiny_head(), 9, 4
    layer = head.midlayer
    table, aux, ids = torch.randn(50, 16), torch.randn(n, 48), torch.randint(50, (n,))
    seen = (torch.arange(n - 1) <= start)[None]
    at = torch.tensor([start])
    given = list(head.chains(table, ids, aux, torch.arange(n), at, seen))

    embedded, hidden = table[ids[1 : start + 2]], head.fc(aux[: start + 1])
    for logits in given:
        positions = torch.arange(len(hidden))
        read = layer.read(embedded, hidden)
        entries = layer.self_attn.entries(read, positions)
        all_seen = torch.ones(1, len(hidden), dtype=torch.bool)
        out = hidden[-1:] + layer.self_attn(read[-1:], positions[-1:], entries, all_seen, [])
        out = out + layer.mlp(layer.post_attention_layernorm(out))
        torch.testing.assert_close(logits, head.lm_head(head.norm(out)))
        hidden = torch.cat((hidden, out))
        embedded = torch.cat((embedded, table[head.known[logits.argmax(-1)]]))


@torch.inference_mode()
def test_the_head_reads_what_enters_its_layers() -> None:
    entered: list[Tensor] = []
    for layer in AUX_LAYERS:
        hook = TARGET.model.layers[layer].register_forward_pre_hook(
            lambda _, given, named: entered.append(given[0] if given else named["hidden_states"]),
            with_kwargs=True,
        )
        found = TARGET.model(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states
        hook.remove()
    assert torch.equal(streams(found), torch.cat(entered, -1))


def test_chains_end_with_the_answer_that_they_guess() -> None:
    labels = torch.tensor([NO_LOSS, 3, 4, NO_LOSS, 5, 6, 7, NO_LOSS])
    documents = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
    starts, ahead, learned = chains_of(labels, documents)
    assert starts.tolist() == [0, 2, 3]
    assert ahead[:, 0].tolist() == [2, 4, 5]
    assert learned.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, False, False],
    ]


def test_updates_have_singular_values_near_1() -> None:
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonal(torch.randn(20, 60)))
    assert values.min() > 0.5 and values.max() < 1.5


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_training_goes_on_from_step_to_step(method: str) -> None:
    torch.manual_seed(1)
    batch = next(parts(batches(Encoder(CODEC), seed=3)))
    if method == "draft_model":
        model = new_draft_model(TARGET)
        losses = draft_model_losses(model)
    else:
        model = new_eagle3(TARGET, KNOWN)
        losses = eagle3_losses(model, TARGET)
    before = sum(loss.item() for loss in losses(batch))
    # So early in a training that long, the rate is 1 / 20 of its peak.
    fit(model, losses, iter([batch] * 6), Pace(1000, 1000, 0.04))
    assert sum(loss.item() for loss in losses(batch)) < 0.9 * before


def test_guesses_are_counted_in_steps_up_to_an_answers_end() -> None:
    truth = torch.arange(12)

    def guesses(ids: Tensor, known: Tensor) -> Tensor:
        found = known[:, None] + torch.arange(GUESSES)
        found[:, 2] = -1  # the third guess is always wrong
        return found

    # Two tokens are the prompt's and one comes from it: steps give 3, 3, 3, and the rest of 9.
    assert acceptance(guesses, [(truth, 2)]) == Acceptance(1, 9, 3, (1.0, 1.0, 0.0, 0.0))


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    head, model = new_eagle3(TARGET, KNOWN), new_draft_model(TARGET)
    save_eagle3(head, tmp_path / "head")
    save_draft_model(model, tmp_path / "model")
    again = load_eagle3(tmp_path / "head").state_dict()
    for name, tensor in head.state_dict().items():
        assert torch.equal(again[name], tensor.float() if tensor.is_floating_point() else tensor), name
    assert torch.equal(load_draft_model(tmp_path / "model").lm_head.weight, model.lm_head.weight.float())


# The shipped files.


def test_the_shipped_draft_model_fits_the_demo_model() -> None:
    mine, demo = (
        json.loads((folder / "config.json").read_text()) for folder in (DRAFTS / "draft_model", DEMO)
    )
    assert mine["architectures"] == ["LlamaForCausalLM"]
    assert all(mine[name] == demo[name] for name in ("vocab_size", "dtype", "max_position_embeddings"))
    tokenizer = (DRAFTS / "draft_model" / "tokenizer.json").read_bytes()
    assert tokenizer == (DEMO / "tokenizer.json").read_bytes()


def test_the_shipped_head_fits_the_demo_model() -> None:
    folder, width = DRAFTS / "eagle3", TARGET.config.hidden_size
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [*AUX_LAYERS]
    assert (config["vocab_size"], config["target_hidden_size"]) == (TARGET.config.vocab_size, width)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.get_slice("fc.weight").get_shape() == [width, 3 * width]
        assert file.get_slice("lm_head.weight").get_shape() == [config["draft_vocab_size"], width]
        known = file.get_tensor("d2t") + torch.arange(config["draft_vocab_size"])
        assert torch.equal(file.get_tensor("t2d").nonzero()[:, 0], known)


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_guesses_of_shipped_drafters_hold_about_as_often_as_their_config_says(method: str) -> None:
    folder = DRAFTS / method
    said = json.loads((folder / "config.json").read_text())["acceptance"]
    if method == "draft_model":
        drafter = model_drafter(load_draft_model(folder))
    else:
        drafter = eagle3_drafter(load_eagle3(folder), TARGET)
    # A few of the questions with which it was measured.
    found = acceptance(drafter, answered(TARGET, CODEC, every=120))
    assert said["guesses"] == GUESSES
    assert found.tokens_a_step == pytest.approx(said["tokens_a_step"], rel=0.3)
