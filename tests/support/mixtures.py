"""Tiny mixtures whose experts can be divided among ranks."""

FAMILIES: dict[str, dict[str, object]] = {
    "Qwen2MoeForCausalLM": {
        "num_experts": 8,
        "moe_intermediate_size": 25,
        "shared_expert_intermediate_size": 40,
    },
    "GptOssForCausalLM": {"num_local_experts": 8, "intermediate_size": 33},
    "GraniteMoeSharedForCausalLM": {"num_local_experts": 4},
}
"""Families with experts apart, in one tensor with biases, and in another one; odd widths are not cut."""
