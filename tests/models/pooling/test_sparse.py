"""Weights and vectors of tokens, compared with sentence-transformers and FlagEmbedding's formulas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heads import flag_checkpoint, source_of
from later import Later
from pooled import Params, assert_near, hf_output, load_pooled, pool
from tiny import tiny_checkpoint
from tokenizers import Tokenizer
from torch import nn

from models.config import ConfigError
from models.pooling.task_heads import SparseWeights
from worker.steps.output import sparse_vectors

TEXTS = ["The quick brown fox", "jumps", "over the lazy dog, and over the lazy dog; that is all."]
st = Later("sentence_transformers")
modules = Later("sentence_transformers.base.modules")
sparse = Later("sentence_transformers.sparse_encoder.modules")


def tokens_of(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("Bert", ("max", "relu")),
        ("DistilBert", ("max", "log1p_relu")),
        ("ModernBert", ("sum", "relu")),
        ("XLMRoberta", ("max", "relu")),
        ("MPNet", ("sum", "log1p_relu")),
        ("Albert", ("max", "relu")),
        ("Gte", ("max", "relu")),
        ("NomicBert", ("sum", "relu")),
        ("DebertaV2", ("max", "relu")),
    ],
)
def test_splade(family: str, form: tuple[Any, Any], tmp_path: Path) -> None:
    source = source_of(f"{family}ForMaskedLM", tmp_path / "source")
    transformer = modules.Transformer(str(source), transformer_task="fill-mask")
    made = st.SparseEncoder(modules=[transformer, sparse.SpladePooling(*form)], device="cpu")
    made.save_pretrained(str(tmp_path))
    expected = st.SparseEncoder(str(tmp_path), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    texts, model = tokens_of(tmp_path), load_pooled(tmp_path)
    assert model[0].pooler.tasks == {"sparse_embed"}
    answers = pool(model, texts, Params("sparse_embed"))
    torch.testing.assert_close(torch.stack(answers), expected, atol=1e-4, rtol=1e-4)
    assert (torch.stack(answers) == 0).any()


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("family", ["Bert", "Albert"])
def test_splade_has_the_same_bits_in_any_company(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(f"{family}ForMaskedLM", tmp_path)
    model = load_pooled(tmp_path, pooler_config={"pooling_type": "SPLADE"})
    texts = tokens_of(tmp_path)
    for text, answer in zip(texts, pool(model, texts, Params("sparse_embed")), strict=True):
        assert torch.equal(pool(model, [text], Params("sparse_embed"))[0], answer)


def test_a_sparse_auto_encoder(tmp_path: Path) -> None:
    source = source_of("BertModel", tmp_path / "source")
    pooling = Later("sentence_transformers.sentence_transformer.modules").Pooling(32, "mean")
    torch.manual_seed(0)
    encoder = sparse.SparseAutoEncoder(32, 128, k=9, normalize=True)
    with torch.no_grad():
        encoder.pre_bias.normal_()
        encoder.latent_bias.normal_()
    made = st.SparseEncoder(modules=[modules.Transformer(str(source)), pooling, encoder], device="cpu")
    made.save_pretrained(str(tmp_path))
    expected = made.encode(TEXTS, convert_to_sparse_tensor=False)
    answers = pool(load_pooled(tmp_path), tokens_of(tmp_path), Params("sparse_embed"))
    torch.testing.assert_close(torch.stack(answers), expected, atol=1e-4, rtol=1e-4)


ALL = Params("embed", outputs=("sparse_embed", "token_embed"))


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_one_pass_gives_what_flag_embedding_computes(form: str, tmp_path: Path) -> None:
    weigh, narrow = flag_checkpoint(tmp_path, form=form)
    texts, model = tokens_of(tmp_path), load_pooled(tmp_path)
    answers = pool(model, texts, ALL)
    alone = [pool(model, texts, Params(task)) for task in ("embed", "sparse_embed", "token_embed")]
    for index, text in enumerate(texts):
        dense, weights, vectors = answers[3 * index : 3 * index + 3]
        with torch.inference_mode():
            hidden = hf_output(tmp_path, "XLMRobertaModel", text).last_hidden_state[0]
            assert_near(dense, nn.functional.normalize(hidden[0], dim=-1))
            assert_near(weights.flatten(), torch.relu(weigh(hidden)).flatten())
            assert_near(vectors, nn.functional.normalize(narrow(hidden[1:]), dim=-1))
        for one, other in zip((dense, weights, vectors), alone, strict=True):
            assert torch.equal(one, other[index])


def test_several_weights_of_a_token_become_the_largest() -> None:
    weights = np.array([0.5, 0.25, 0.0, 1.0, 2.0], np.float32)
    found = sparse_vectors(weights, [7, 3, 4, 3, 9], SparseWeights((9,)))
    assert np.frombuffer(found.ids, "<i4").tolist() == [3, 7]
    assert np.frombuffer(found.data, "<f4").tolist() == [1.0, 0.5]
    kept = sparse_vectors(weights, None, SparseWeights(most=2))
    assert (np.frombuffer(kept.ids, "<i4").tolist(), kept.shape) == ([3, 4], (2,))


def test_pickles_beside_a_checkpoint_are_not_run(tmp_path: Path) -> None:
    flag_checkpoint(tmp_path)
    (tmp_path / "sparse_linear.pt").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(Exception, match="not a file of tensors"):
        load_pooled(tmp_path)


def test_an_encoder_without_such_a_head_is_named(tmp_path: Path) -> None:
    tiny_checkpoint("ElectraForMaskedLM", tmp_path)
    with pytest.raises(ConfigError, match="head for masked tokens"):
        load_pooled(tmp_path, pooler_config={"pooling_type": "SPLADE"})
