"""How experts are copied and moved by load: the fields of --eplb-config."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]


class Balancing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields, with the names and defaults that they have in vLLM."""

    num_redundant_experts: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The number of further copies of experts in each layer."""
    window_size: Count = 1000
    """The number of last steps whose tokens are counted, up to an eighth more."""
    step_interval: Count = 3000
    """The steps from one measurement to the next. The first comes after a quarter of them."""
    log_balancedness: bool = False
    use_async: bool = True
    """Whether layers are rearranged in one step each; otherwise all are in one step."""
    policy: Literal["default"] = "default"

    show_load: bool = False
    """Whether outputs of steps tell the tokens of each expert; it is an option of its own."""

    @property
    def first_step(self) -> int:
        """The number of the step before which load is measured for the first time."""
        return max(1, self.step_interval // 4)
