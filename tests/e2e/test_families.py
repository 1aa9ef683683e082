"""Models with a page of their own as a user serves them: OpenAI's client asks one process for everything."""

from pathlib import Path

import pytest
from live import serving
from openai import OpenAI
from tiny import tiny_checkpoint
from tiny_shapes import SHARED_CACHES

PROMPT = "One friend and another went to the sea and came home late. " * 3
FAMILIES: dict[str, dict[str, object]] = {
    "Gemma4ForCausalLM": SHARED_CACHES,
    "Gemma3nForCausalLM": {},
    "GraniteMoeHybridForCausalLM": {},
    "Cohere2ForCausalLM": {},
}


@pytest.mark.turns(7)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_text_whole_and_streamed_and_a_vector(architecture: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(architecture, tmp_path / "model", **FAMILIES[architecture])
    options = ("--dtype", "float32", "--num-gpu-blocks-override", "200", "--max-num-seqs", "4")
    with (
        serving(str(folder), *options) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        (model,) = (each.id for each in client.models.list())
        asked = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
        whole = client.completions.create(**asked, extra_body={"ignore_eos": True})
        stream = client.completions.create(**asked, extra_body={"ignore_eos": True}, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text
        assert whole.usage is not None and whole.usage.completion_tokens == 16
        vector = client.embeddings.create(model=model, input="the sea").data[0].embedding
        assert sum(number * number for number in vector) == pytest.approx(1)
