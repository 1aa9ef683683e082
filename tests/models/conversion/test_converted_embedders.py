"""Vectors of decoders made into embedders, compared with transformers and sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pooled import (
    PROMPTS,
    Params,
    assert_near,
    causal_checkpoint,
    hf_output,
    load_pooled,
    pool,
    sibling_checkpoint,
)
from tiny import tiny_checkpoint
from tokenizers import Tokenizer
from torch import Tensor

from models.config import ConfigError

TEXTS = [
    "The quick brown fox",
    "jumps",
    "over the lazy dog, and there is nothing more to be said about that.",
]


def normalized(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


def forget_chat(folder: Path) -> None:
    """Remove the chat template, with which sentence-transformers would make a message of every text."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))


TRUNKS = [
    ("LlamaModel", "LlamaForCausalLM"),
    ("MistralModel", "MistralForCausalLM"),
    ("Qwen2Model", "Qwen2ForCausalLM"),
    ("Qwen3Model", "Qwen3ForCausalLM"),
    ("Gemma3TextModel", "Gemma3ForCausalLM"),
    ("Gemma3nTextModel", "Gemma3nForCausalLM"),
    ("GPT2Model", "GPT2LMHeadModel"),
    ("OPTModel", "OPTForCausalLM"),  # gives states of another width than its layers have
    ("Starcoder2Model", "Starcoder2ForCausalLM"),
    ("GPTNeoXModel", "GPTNeoXForCausalLM"),
    ("Jais2Model", "Jais2ForCausalLM"),  # on transformers' code
]


@pytest.mark.parametrize(("trunk", "generating"), TRUNKS)
def test_a_trunk_alone_and_a_generating_checkpoint_embed_alike(
    trunk: str, generating: str, tmp_path: Path
) -> None:
    bare = sibling_checkpoint(trunk, generating, tmp_path)
    expected = [normalized(hf_output(bare, trunk, tokens).last_hidden_state[0]) for tokens in PROMPTS]
    for folder in (bare, tmp_path / "generating"):
        model = load_pooled(folder, convert="embed")
        assert model[0].pooler.tasks == {"embed", "token_embed"}
        assert not [name for name, _ in model[0].named_parameters() if "head" in name]  # pyright: ignore
        for vector, rows in zip(pool(model, PROMPTS), expected, strict=True):
            assert_near(vector, rows[-1])
        for vectors, rows in zip(pool(model, PROMPTS, Params("token_embed")), expected, strict=True):
            assert_near(vectors, rows)


def test_a_classifiers_trunk_can_embed(tmp_path: Path) -> None:
    folder = sibling_checkpoint("Qwen3ForSequenceClassification", "Qwen3ForCausalLM", tmp_path)
    for vector, other in zip(
        pool(load_pooled(folder, convert="embed"), PROMPTS),
        pool(load_pooled(tmp_path / "generating", convert="embed"), PROMPTS),
        strict=True,
    ):
        assert torch.equal(vector, other)


@pytest.mark.parametrize("modes", ["mean", "lasttoken", "weightedmean", ("cls", "max")])
@pytest.mark.parametrize("half", [False, True])
def test_sentence_transformers_computes_the_same(modes: Any, half: bool, tmp_path: Path) -> None:
    # Every process of tests collects this file: an import at its top would cost each some seconds.
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    source = tiny_checkpoint("Qwen3ForCausalLM", tmp_path / "generating")
    forget_chat(source)
    transformer = Transformer(str(source))
    pooling = Pooling(transformer.get_embedding_dimension(), modes)
    torch.manual_seed(0)
    dense = Dense(pooling.get_embedding_dimension(), 24)
    SentenceTransformer(modules=[transformer, pooling, dense, Normalize()], device="cpu").save(str(tmp_path))
    reference = SentenceTransformer(str(tmp_path), device="cpu")
    expected = torch.tensor(reference.encode(TEXTS, truncate_dim=12 if half else None))
    if half:
        expected = normalized(expected)

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = [tokenizer.encode(text).ids for text in TEXTS]
    model = load_pooled(tmp_path)
    assert model[0].pooler.width(Params()) == 24
    vectors = pool(model, tokens, Params(dimensions=12 if half else None))
    assert_near(torch.stack(vectors), expected)


# Decoders that look ahead


def test_gemma3_in_both_directions(tmp_path: Path) -> None:
    """Half of the layers see everything, the others three tokens on each side, as in EmbeddingGemma."""
    fields = {"use_bidirectional_attention": True, "sliding_window": 6}
    folder = sibling_checkpoint("Gemma3TextModel", "Gemma3ForCausalLM", tmp_path, **fields)
    assert json.loads((folder / "config.json").read_text())["sliding_window"] == 6
    model = load_pooled(folder, pooler_config={"pooling_type": "MEAN"})
    assert not model[0].causal
    assert model[0].attention_layers() == []
    for tokens, vector in zip(PROMPTS, pool(model, PROMPTS), strict=True):
        rows = hf_output(folder, "Gemma3TextModel", tokens).last_hidden_state[0]
        assert_near(vector, normalized(rows.mean(0)))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_a_decoder_told_not_to_be_causal(architecture: str, checkpoints: Path) -> None:
    folder = causal_checkpoint(architecture, checkpoints)
    model = load_pooled(folder, convert="embed", overrides={"is_causal": False})
    reference = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager")
    for tokens, vectors in zip(PROMPTS, pool(model, PROMPTS, Params("token_embed")), strict=True):
        count = len(tokens)
        unmasked = torch.zeros(1, 1, count, count)
        with torch.inference_mode():
            output = reference.model(torch.tensor([tokens]), attention_mask=unmasked, use_cache=False)
        assert_near(vectors, normalized(output.last_hidden_state[0]))


def test_a_class_that_cannot_look_ahead(checkpoints: Path) -> None:
    with pytest.raises(ConfigError, match=r"attends in both directions, and Qwen35ForEmbedding cannot"):
        load_pooled(
            causal_checkpoint("Qwen3_5ForCausalLM", checkpoints),
            convert="embed",
            overrides={"is_causal": False},
        )
