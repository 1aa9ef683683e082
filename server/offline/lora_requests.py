"""`LoRARequest`: names the adapter that computes a prompt of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

WITHOUT_LORA = "lora_request: {} cannot be used, for the model was loaded without enable_lora=True"


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter by its name, a number from 1 on, and its folder. The number means nothing here."""

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"id must be > 0, got {self.lora_int_id}")
        if not self.lora_name or not self.lora_path:
            raise ValueError("a LoRARequest needs a name and the folder of an adapter")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id


Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""An adapter for all prompts, or one, or None, for each."""


def spread(given: Adapters, count: int) -> list[LoRARequest | None]:
    """The adapter of each of so many prompts."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    asked: list[Any] = list(given) if isinstance(given, Sequence) else [given]
    if not all(one is None or isinstance(one, LoRARequest) for one in asked):
        raise TypeError("lora_request is one LoRARequest for all prompts, or a list of them and of None")
    if len(asked) != count:
        raise ValueError(f"{len(asked)} LoRARequests for {count} prompts; give one for all, or one for each")
    return asked
