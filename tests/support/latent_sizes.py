"""The sizes of a layer with latent attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    heads: int
    rank: int
    rope: int
    nope: int
    value: int
