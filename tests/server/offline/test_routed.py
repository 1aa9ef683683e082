"""SPLADE whose queries have static weights: with sentence-transformers' Router, in whole engines."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heads import source_of
from later import Later

from facet import LLM, PoolingParams
from models.config import ConfigError
from models.pooling.converted_checkpoints import find_or_make

st = Later("sentence_transformers")
modules = Later("sentence_transformers.base.modules")
sparse = Later("sentence_transformers.sparse_encoder.modules")
QUERY, TEXTS = "the quick quick dog", ["The quick brown fox jumps", "over the lazy dog; that is all."]


def save(folder: Path, **options: Any) -> Any:
    source = source_of("BertForMaskedLM", folder / "source")
    encoder = modules.Transformer(str(source), transformer_task="fill-mask")
    torch.manual_seed(0)
    weights = sparse.SparseStaticEmbedding(
        tokenizer=encoder.tokenizer, weight=torch.rand(320).clamp(min=0.3) - 0.3
    )
    document = [encoder, sparse.SpladePooling("max")]
    router = modules.Router.for_query_document(query_modules=[weights], document_modules=document, **options)
    made = st.SparseEncoder(modules=[router], device="cpu")
    made.save_pretrained(str(folder / "it"))
    return made


@pytest.mark.turns(3)
def test_queries_are_weighed_without_a_step(tmp_path: Path) -> None:
    made = save(tmp_path)
    expected = made.encode_query([QUERY], convert_to_sparse_tensor=False)[0].numpy()
    documents = made.encode_document(TEXTS, convert_to_sparse_tensor=False).numpy()
    with LLM(str(tmp_path / "it"), dtype="float32", cpu_threads=1) as llm:
        asked = PoolingParams(task="sparse_embed", query=True)
        (found,) = llm.encode(QUERY, pooling_params=asked, use_tqdm=False)
        scores = [each.outputs.score for each in llm.score(QUERY, TEXTS, use_tqdm=False)]
    np.testing.assert_allclose(scores, documents @ expected, atol=1e-4)
    np.testing.assert_array_equal(found.outputs.ids, np.flatnonzero(expected))
    np.testing.assert_array_equal(found.outputs.data, expected[expected > 0])


@pytest.mark.parametrize(
    ("options", "changes", "told"),
    [
        ({"default_route": "query"}, {}, "'default_route'"),
        ({}, {"route_mappings": {"(None, 'text')": "query"}}, "are not served"),
    ],
)
def test_routes_that_are_not_served(options: Any, changes: Any, told: str, tmp_path: Path) -> None:
    save(tmp_path, **options)
    path = tmp_path / "it" / "router_config.json"
    said = json.loads(path.read_text())
    said["parameters"] |= changes
    path.write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=told):
        find_or_make(tmp_path / "it", lambda name, folder: tmp_path)


def test_one_tokenizer_reads_both(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "it" / "query_0_SparseStaticEmbedding" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(ConfigError, match="another tokenizer"):
        find_or_make(tmp_path / "it", lambda name, folder: tmp_path)
