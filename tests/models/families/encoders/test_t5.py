"""Encoders of T5 alone, as sentence-t5 and GTR are: vectors of sentence-transformers, over ranks too."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from drive import load_ranks
from encoded import TEXTS, assert_near, hf_hidden, run
from later import Later
from tiny import EOS, EOS_ID, write_tokenizer
from torch import nn

from server.offline.llm import LLM

st = Later("sentence_transformers")
modules = Later("sentence_transformers.sentence_transformer.modules")
transformers = Later("transformers")


def checkpoint(folder: Path, family: str = "T5", **changes: Any) -> Path:
    sizes = {"vocab_size": 320, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    near = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, **near, **changes)
    model = getattr(transformers, f"{family}EncoderModel")(config).eval()
    for name, tensor in model.named_parameters():
        nn.init.normal_(tensor, std=1.0 if "bias" in name or "shared" in name else 0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ending = {"single": f"$A {EOS}", "special_tokens": [(EOS, EOS_ID)]}
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(**ending)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    return folder


@pytest.mark.parametrize(("family", "kind"), [("T5", "relu"), ("MT5", "gated-gelu"), ("UMT5", "gated-gelu")])
def test_hidden_states_are_those_of_transformers_over_any_ranks(
    family: str, kind: str, tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, family, feed_forward_proj=kind)
    expected = [hf_hidden(folder, text) for text in TEXTS]
    for ranks in (1, 2, 4):
        assert_near(run(load_ranks(folder, ranks), TEXTS), expected)


def test_vectors_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    reader = modules.Transformer(str(checkpoint(tmp_path / "whole")), max_seq_length=64)
    dense = modules.Dense(32, 24, bias=False, activation_function=nn.Identity())
    folder, pooling = tmp_path / "made", modules.Pooling(32, "mean")
    made = st.SentenceTransformer(modules=[reader, pooling, dense, modules.Normalize()], device="cpu")
    made.save(str(folder))
    texts = ["a gull above the sea", "b", "one two three " * 30]
    with LLM(str(folder), dtype="float32") as llm:
        vectors = [each.outputs.embedding for each in llm.embed(texts, truncate_prompt_tokens=-1)]
    torch.testing.assert_close(torch.tensor(vectors), torch.from_numpy(made.encode(texts)), atol=1e-5, rtol=0)
