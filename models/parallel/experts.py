"""Whole experts over ranks: which rank holds which, and what cannot be divided. Arithmetic without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from models.config import ConfigError, ModelConfig
from models.parallel.rank_shares import HEADS, kv_heads_of, share_of

Placement = Literal["linear", "round_robin"]
"""Whether a rank holds neighbouring experts, or every n-th one of n ranks."""

Transport = Literal["allgather_reducescatter", "all_to_all"]
"""How tokens reach experts on other ranks and results come back: all tokens go to all replicas and each rank
returns one sum, or a token goes where its experts are and each of them returns its result by itself."""

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""The names that families have in config.json for the number of experts of a layer."""
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")
"""The names that families have there for the number of experts that a token takes."""


@dataclass(frozen=True)
class ExpertPlace:
    """A rank's position among those that share whole experts: `rank` of `size`."""

    rank: int
    size: int
    placement: Placement = "linear"
    transport: Transport = "allgather_reducescatter"

    def layout(self, count: int) -> list[int]:
        """The expert at each place, of `count` in a layer: the places of the first rank, then the next's."""
        if count % self.size:
            raise ValueError(_indivisible(count, self.size))
        if self.placement == "round_robin":
            return [expert for rank in range(self.size) for expert in range(rank, count, self.size)]
        return list(range(count))

    def numbers(self, count: int) -> list[int]:
        """The experts that this rank holds."""
        layout = self.layout(count)
        held = len(layout) // self.size
        return layout[self.rank * held : (self.rank + 1) * held]


def count_experts(model: ModelConfig) -> int:
    """The number of experts in the model's layers, as config.json says; 0 if there are none."""
    return _first_count(model, _COUNTS)


def count_chosen(model: ModelConfig) -> int:
    """The number of experts that a token takes in a layer, as config.json says; 0 if there are none."""
    return _first_count(model, _CHOSEN)


def _first_count(model: ModelConfig, names: Iterable[str]) -> int:
    found = (model.raw.get(name) for name in names)
    return next((count for count in found if isinstance(count, int) and count > 0), 0)


def check_experts(model: ModelConfig, ranks: int) -> None:
    """Refuse a model whose experts cannot be divided among so many ranks, before processes are started."""
    count = count_experts(model)
    if not count:
        raise ConfigError(
            f"--enable-expert-parallel: {model.architecture} has no experts; leave the option out"
        )
    if count % ranks:
        possible = (n for n in range(2, count + 1) if count % n == 0 and _cuts_heads(model, n))
        raise ConfigError(_indivisible(count, ranks, possible))


def _indivisible(count: int, ranks: int, possible: Iterable[int] = ()) -> str:
    """The refusal of a number of ranks. `possible`: sizes of --tensor-parallel-size that the model allows."""
    sizes = [str(size) for size in possible]
    choose = f"choose --tensor-parallel-size {' or '.join(sizes)}, or " if sizes else ""
    return (
        f"--enable-expert-parallel: {count} experts cannot be divided evenly among {ranks} ranks; {choose}"
        "leave the option out, and each rank holds a piece of every expert"
    )


def _cuts_heads(model: ModelConfig, ranks: int) -> bool:
    """Whether attention can be cut over so many ranks."""
    try:
        share_of(0, ranks, model.num_heads, HEADS)
        kv_heads_of(0, ranks, model.num_kv_heads)
    except ValueError:
        return False
    return True
