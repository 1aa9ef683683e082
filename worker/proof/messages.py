"""What a process that computes a proof is asked, and what it tells. No torch."""

from __future__ import annotations

import msgspec

from worker.config import WorkerConfig


class ProofOrder(msgspec.Struct, frozen=True):
    """Prompts to compute, each alone, with a model that generates or embeds."""

    config: WorkerConfig
    prompts: list[list[int]]
    length: int
    """The tokens of each answer, which are the likeliest ones."""
    features: list[bytes] = []
    """For models that transcribe, the features [bands, frames] in float32 of the sound of each prompt."""
    operations: bool = True
    """Whether the operations of this machine are compared with their reference, too."""


class Computed(msgspec.Struct, frozen=True):
    """What a model computes of one prompt."""

    layers: list[bytes]
    """The hidden state of the last token behind each layer, as numbers of float32."""
    tokens: list[int] = []
    logprobs: list[float] = []
    """The logarithm of the probability of each of these tokens."""
    vector: list[float] = []
    """The embedding, of a model that embeds."""


class OperationCheck(msgspec.Struct, frozen=True):
    """How far an operation of this machine is from its reference."""

    name: str
    dtype: str
    difference: float
    """The largest difference of a number, in parts of what it may be."""


class Proof(msgspec.Struct, frozen=True):
    device: str
    kernels: str
    """The level of kernels that the device has chosen; torch, if none."""
    dtype: str
    weights: str
    """A digest of the checkpoint's weights."""
    computed: list[Computed]
    operations: list[OperationCheck]
