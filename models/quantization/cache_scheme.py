"""What a checkpoint says of the numbers in its KV cache. No torch."""

from __future__ import annotations

import msgspec

from models.config import ConfigError, ModelConfig

_HEADS = "attn_head"


class CacheScheme(msgspec.Struct, frozen=True, kw_only=True):
    """The field `kv_cache_scheme` of compressed-tensors."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    dynamic: bool | str = False

    @property
    def obstacle(self) -> str | None:
        """Why keys and values cannot be cached so, as the end of a sentence; None if they can be in fp8."""
        if (self.num_bits, self.type) != (8, "float"):
            return f"numbers of {self.num_bits} bits of the type {self.type!r}, and fp8 alone is known"
        if self.strategy == _HEADS:
            return "a scale for each head, and one for each layer alone is known"
        return None


def read_cache_scheme(config: ModelConfig) -> CacheScheme | None:
    """Read how the checkpoint wants its KV cache; None if it says nothing.

    Other methods than compressed-tensors do not say it: they have scales, which an option puts to use.
    """
    saved = config.quantization
    if saved is None or "config_groups" not in saved.fields:
        return None
    try:
        return msgspec.convert(saved.fields.get("kv_cache_scheme"), CacheScheme | None)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{saved.place}: 'kv_cache_scheme': {error}") from None
