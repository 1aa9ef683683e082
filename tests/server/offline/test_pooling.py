"""`LLM` on tiny checkpoints with heads: labels, rewards, and pairs of texts that are read together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooled import sibling_checkpoint

from facet import LLM, PoolingParams
from server.errors import BadRequest
from server.requests.scoring import QUERIES_AT_ONCE

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "4m", "cpu_threads": 1}
TEXTS = ["the quick brown fox", "jumps", "over the lazy dog"]


def classifier(tmp_path: Path, labels: int) -> str:
    source = ("LlamaForSequenceClassification", "LlamaForCausalLM")
    return str(sibling_checkpoint(*source, tmp_path, num_labels=labels))


def test_labels(tmp_path: Path):
    with LLM(classifier(tmp_path, 3), **OPTIONS) as llm:
        outputs = llm.classify(TEXTS, use_tqdm=False)
        for output in outputs:
            classes = output.outputs
            assert sum(classes.probs) == pytest.approx(1) and classes.num_classes == 3
            assert classes.label == f"LABEL_{int(np.argmax(classes.probs))}"
        raw = llm.classify(TEXTS, pooling_params=PoolingParams(softmax=False), use_tqdm=False)
        logits = np.exp([output.outputs.probs for output in raw])
        probs = [output.outputs.probs for output in outputs]
        assert logits / logits.sum(axis=1, keepdims=True) == pytest.approx(np.array(probs), abs=1e-5)
        with pytest.raises(BadRequest, match="use_activation and softmax mean the same, but differ"):
            llm.classify("a", pooling_params=PoolingParams(softmax=False, use_activation=True))
        with pytest.raises(BadRequest, match="PoolingParams: step_tag_id is not supported yet"):
            llm.classify("a", pooling_params=PoolingParams(step_tag_id=5))


def test_scores_of_pairs_that_are_read_together(tmp_path: Path):
    with LLM(classifier(tmp_path, 1), **OPTIONS) as llm:
        outputs = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        scores = [output.outputs.score for output in outputs]
        assert len(set(scores)) == 3 and all(0 < score < 1 for score in scores)
        assert all(output.prompt_token_ids for output in outputs)
        assert [one.outputs.score for one in llm.score(TEXTS[:1] * 3, TEXTS, use_tqdm=False)] == scores
        with pytest.raises(BadRequest, match="Task 'classify' only supports"):
            llm.score("a", "b", pooling_params=PoolingParams(dimensions=4), use_tqdm=False)
        rewards = llm.reward(TEXTS, use_tqdm=False)
        assert [len(one.outputs.data) for one in rewards] == [len(one.prompt_token_ids) for one in rewards]


@pytest.mark.slow
def test_more_scores_by_tokens_than_queries_are_held_at_once():
    with LLM("demo", tasks=["token_embed"], **OPTIONS) as llm:
        texts = [f"text {number}" for number in range(QUERIES_AT_ONCE + 3)]
        outputs = llm.score(texts, texts, use_tqdm=False)
        assert len(outputs) == len(texts)
        (last,) = llm.score(texts[-1], texts[-1], use_tqdm=False)
        assert outputs[-1].outputs.score == pytest.approx(last.outputs.score, rel=1e-5)
