"""Worker configurations for tests that need no checkpoint."""

from __future__ import annotations

from typing import Any

from models.config import ModelConfig
from models.conversion.served_as import Conversion
from worker.config import WorkerConfig

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    architectures=("LlamaForCausalLM",),
    dtype="float32",
    vocab_size=320,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_len=512,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_ids=(1,),
    raw={},
)


def worker_config(**given: Any) -> WorkerConfig:
    """It generates, if nothing else is said, and offers all that goes with it."""
    fields = {"folder": "", "model": MODEL, "device": "cpu", **given}
    architecture = fields["model"].architecture
    generates = Conversion(runner="generate", convert="none", architecture=architecture)
    return WorkerConfig(**{"conversion": generates, **fields})
