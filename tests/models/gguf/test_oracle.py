"""transformers reads GGUF files of the tests as the plain checkpoints they are said to mean, where it can."""

from pathlib import Path

import pytest
import torch
import transformers
from gguf_blocks import KINDS
from gguf_pairs import Recipe, write_pair
from tiny import hf_logits

PROMPT = [5, 80, 300, 12, 55, 7]
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8}
NARROW = {"hidden_size": 64, "intermediate_size": 96}
READ = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM")
"""The families whose metadata transformers understands whole; of Qwen3 and Gemma it misses fields."""
CASES = [*((READ[0], kind, WIDE) for kind in KINDS), *((arch, "Q8_0", NARROW) for arch in READ[1:])]


@pytest.mark.parametrize(
    ("arch", "kind", "shape"), CASES, ids=lambda case: case if isinstance(case, str) else ""
)
def test_transformers_computes_the_same(
    arch: str, kind: str, shape: dict[str, object], tmp_path: Path
) -> None:
    pair = write_pair(tmp_path, arch, Recipe(kind), **shape)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        pair.file.parent, gguf_file=pair.file.name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        found = model.eval()(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(found, hf_logits(pair.plain, PROMPT), atol=1e-5, rtol=1e-5)
