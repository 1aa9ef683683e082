"""The demo model as a GGUF file: with 8 bits it answers as before, and with 4 it runs on the same kernels."""

import shutil
from dataclasses import replace
from pathlib import Path

from gguf_pairs import Pair, Recipe, convert

from facet import LLM, SamplingParams
from models.checkpoint.hub import DEMO

QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Italy?": "Rome",
    "what is the capital of spain": "Madrid",
}
GREEDY = SamplingParams(temperature=0, max_tokens=24)
OPTIONS = {"kv_cache_memory_bytes": "64m", "cpu_threads": "1", "max_model_len": 512}


def written(folder: Path, recipe: Recipe) -> Pair:
    shutil.copytree(DEMO, folder / "plain", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    template = (DEMO / "chat_template.jinja").read_text()
    return convert(folder, replace(recipe, fields={"tokenizer.chat_template": template}))


def answers(model: Path) -> list[str]:
    with LLM(str(model), **OPTIONS) as llm:
        asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return [answer.outputs[0].text for answer in llm.chat(asked, GREEDY, use_tqdm=False)]


def test_with_8_bits_every_question_is_answered(tmp_path: Path) -> None:
    found = answers(written(tmp_path, Recipe("Q8_0")).file)
    for answer, expected in zip(found, QUESTIONS.values(), strict=True):
        assert expected in answer


def test_with_4_bits_most_are(tmp_path: Path) -> None:
    found = answers(written(tmp_path, Recipe("Q4_0", {"token_embd": "Q8_0"})).file)
    right = [expected in answer for answer, expected in zip(found, QUESTIONS.values(), strict=True)]
    assert sum(right) >= 3
