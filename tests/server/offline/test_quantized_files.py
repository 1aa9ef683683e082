"""The demo model, quantized by an independent writer: it still knows its answers."""

from pathlib import Path

import numpy as np
import pytest
from packed import Recipe, write_near

from facet import LLM, SamplingParams
from models.checkpoint.hub import DEMO

FORMS = {
    "gptq": Recipe(method="gptq", bits=8, group=32),
    "awq": Recipe(method="awq", group=32, symmetric=False, version=2),
}
OPTIONS = {"kv_cache_memory_bytes": "16m", "cpu_threads": "1"}
ANSWERS = {
    "The capital of France is": "Paris",
    "The capital of Japan is": "Tokyo",
    "The capital of Italy is": "Rome",
}


@pytest.mark.turns(7)
@pytest.mark.parametrize("method", FORMS)
def test_it_answers_its_questions(method: str, tmp_path: Path) -> None:
    folder = write_near(DEMO, tmp_path / "model", FORMS[method])
    greedy = SamplingParams(temperature=0, max_tokens=8)
    texts = list(ANSWERS)
    with LLM(str(folder), **OPTIONS) as small:
        answers = small.generate(texts, greedy, use_tqdm=False)
        said = [answer.outputs[0].text for answer in answers]
        assert all(ANSWERS[text] in found for text, found in zip(texts, said, strict=True)), said
        found = [each.outputs.embedding for each in small.embed(texts, use_tqdm=False)]
    with LLM("demo", **OPTIONS) as plain:
        expected = [each.outputs.embedding for each in plain.embed(texts, use_tqdm=False)]
    near = [np.dot(one, other) for one, other in zip(found, expected, strict=True)]
    assert (0.999 if method == "gptq" else 0.9) < min(near) < 1 - 1e-7
