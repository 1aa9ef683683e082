"""Adapters of every kind, beside bases of every kind of layer."""

from dataclasses import dataclass, field
from typing import Any

ALL = "all-linear"


@dataclass(frozen=True)
class Case:
    """A base, and the fields of an adapter's config."""

    architecture: str
    fields: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.architecture, *self.fields])


CASES = [
    Case(
        "LlamaForCausalLM",
        {"target_modules": ALL, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}},
    ),
    Case("Qwen2ForCausalLM", {"target_modules": ["k_proj", "down_proj"], "use_dora": True}),
    Case("Qwen2ForCausalLM", {"target_modules": ["v_proj"], "bias": "lora_only", "use_rslora": True}),
    Case("GPT2LMHeadModel", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    Case("Phi3ForCausalLM", {"target_modules": ALL}),
    Case(
        "LlamaForCausalLM", {"target_modules": ["lm_head", "o_proj"], "r": 9}, {"tie_word_embeddings": False}
    ),
    Case(
        "LlamaForCausalLM",
        {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
        {"tie_word_embeddings": False},
    ),
]
EMBEDDINGS = [
    Case(
        "LlamaForCausalLM",
        {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
        {"tie_word_embeddings": False},
    ),
    Case(
        "Qwen2ForCausalLM",
        {"target_modules": ["embed_tokens"], "use_dora": True},
        {"tie_word_embeddings": True},
    ),
    Case("GPT2LMHeadModel", {"target_modules": ["wte"], "r": 3}),
    Case("Gemma2ForCausalLM", {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}),
]
TIED = Case(
    "Qwen2ForCausalLM",
    {"target_modules": ["lm_head", "v_proj"], "use_dora": True},
    {"tie_word_embeddings": True},
)
"""A head whose matrix is that of the embeddings, which stay what they are."""
