"""The memory that plain attention needs beside its input and output."""

import torch

from models.layers.attention import Attention
from worker.devices.base import plain_attention_bytes

TOKENS, LONGEST = 64, 100


def needed(softcap: float | None = None) -> int:
    layers = [Attention(heads=2, kv_heads=2, head_dim=8, scale=1.0, softcap=cap) for cap in (None, softcap)]
    return plain_attention_bytes(layers, TOKENS, LONGEST, torch.bfloat16)


def test_there_is_room_for_a_gathered_sequence_and_its_mask() -> None:
    projected = 3 * TOKENS * 3 * 2 * 8 * 2  # queries, keys and values, three times
    keys_and_values = 2 * 2 * LONGEST * 2 * 8 * 2  # twice: gathered, and spread over the heads
    assert needed() == projected + keys_and_values + TOKENS * LONGEST * (1 + 2)


def test_there_is_room_for_scores_that_are_capped() -> None:
    """Three float32 copies of [heads, new tokens, all tokens], as the plain attention writes them."""
    assert needed(50.0) - needed() == 3 * 4 * 2 * TOKENS * LONGEST
