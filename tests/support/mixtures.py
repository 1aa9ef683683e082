"""Tiny mixtures whose experts can be divided among ranks."""

from models.parallel.experts import ExpertPlace
from worker.features.experts.balancer import ExpertMap, map_of

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


def first_map(experts: int, places: int) -> ExpertMap:
    """The map of a layer at a start: each expert once, and then copies of the first ones."""
    return map_of(ExpertPlace(0, 1, redundant=places - experts).layout(experts), experts)
