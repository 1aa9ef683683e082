"""A published file of 4 bits, SmolLM2-135M-Instruct, is read as transformers reads it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from facet import LLM, SamplingParams
from models.checkpoint.hub import DEMO, HubError, resolve

TEXT = (DEMO / "README.md").read_text()[:1200] + " Größe, naïve 東京 😀\n\n\tdef f(x): return x+1  # 12345"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return resolve("smollm2", None, None, lambda _: None)
    except HubError:
        pytest.skip("the package that carries SmolLM2 is absent")


def test_smollm2_is_what_transformers_makes_of_it(file: Path) -> None:
    named = {"gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **named)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **named)
    llm = LLM(str(file), dtype="float32", kv_cache_memory_bytes="128M", max_model_len=1024)
    greedy = SamplingParams(temperature=0, max_tokens=24, prompt_logprobs=0)
    [read], [chat] = llm.generate([TEXT], greedy), llm.chat(CHAT, greedy)

    ids = tokenizer(TEXT)["input_ids"]
    assert read.prompt_token_ids == ids
    asked = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert chat.prompt_token_ids == asked
    with torch.inference_mode():
        said = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        answer = model.generate(torch.tensor([asked]), do_sample=False, max_new_tokens=24)[0, len(asked) :]
    assert read.prompt_logprobs is not None
    found = [row[token].logprob for row, token in zip(read.prompt_logprobs[1:], ids[1:], strict=True) if row]
    expected = said[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    # Inputs have 16 bits, and some numbers of this model are very large.
    apart = (torch.tensor(found) - expected).abs()
    assert apart.max() < 5e-3 and apart.mean() < 6e-4
    told = chat.outputs[0].token_ids
    assert told == answer.tolist()[: len(told)] and len(told) >= 8
