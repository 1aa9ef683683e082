"""What a checkpoint is, as far as the engine must know it: read from its config.json, never from its code.

Facts that concern one family only stay in `raw` and are read in that family's file.
"""

from __future__ import annotations

import msgspec


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str
    """The name under which the registry finds the model's class, e.g. LlamaForCausalLM."""
    dtype: str
    """The dtype the checkpoint was saved in: float32, bfloat16 or float16."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    """Positions the model was made for; the default of --max-model-len."""
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """All ids that end a text, those of generation_config.json included; the primary one first."""
    raw: dict[str, object]
    """config.json, after --hf-overrides; for composite checkpoints, its text part."""
