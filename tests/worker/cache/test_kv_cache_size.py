"""The number of cache blocks, and the error if they are too few."""

import logging
from dataclasses import replace

import pytest
import torch
from sizes import MODEL, worker_config

from models.conversion.conversion_choice import Conversion
from models.layers.latent_attention import IndexerSpec, LatentAttention, LatentSpec, TokenIndexer
from models.parallel.rank_shares import Span
from worker.cache.cache_groups import CacheLayout, LayerGroup
from worker.cache.kv_cache_size import bytes_beside_cache, size_cache, step_bytes
from worker.capacity import CacheBudget, WorkerLimits
from worker.config import Place
from worker.devices.cpu import Cpu

LIMITS = WorkerLimits(block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)
PER_SEQUENCE = 7  # blocks of 16 for 100 tokens
LATENT = LatentSpec(query_rank=None, rank=512, nope=128, rope=64, value=128)
INDEXER = IndexerSpec(query_rank=1536, heads=64, width=128, rope=64, most=2048, turns_neighbours=False)


def budget(nbytes: int, flag: str = "--x", most: int = 1 << 40) -> CacheBudget:
    return CacheBudget(nbytes, flag, most)


def test_budget_decides_up_to_what_all_rows_can_fill() -> None:
    assert size_cache(worker_config(), LIMITS, 1000, budget(9_999)).num_blocks == 9
    assert size_cache(worker_config(), LIMITS, 1000, budget(10**9)).num_blocks == 4 * PER_SEQUENCE


def test_operator_decides_before_the_budget() -> None:
    by_bytes = worker_config(kv_cache_memory_bytes=8_000)
    assert size_cache(by_bytes, LIMITS, 1000, budget(10**9)).num_blocks == 8
    by_count = worker_config(num_gpu_blocks_override=300, kv_cache_memory_bytes=8_000)
    assert size_cache(by_count, LIMITS, 1000, budget(0)).num_blocks == 300


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"kv_cache_memory_bytes": 900 << 30}, "--kv-cache-memory-bytes asks for 900.00 GiB"),
        ({"num_gpu_blocks_override": 900_000_000}, "--num-gpu-blocks-override asks for 838.19 GiB"),
    ],
)
def test_more_than_there_is_cannot_be_asked_for(given: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=f"{told} of KV cache, and there are 24.00 GiB of memory beside"):
        size_cache(worker_config(**given), LIMITS, 1000, budget(0, most=24 << 30))


def test_a_cache_that_was_too_large_is_halved(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sizes = [size_cache(worker_config(), LIMITS, 1 << 20, budget(1 << 30), halvings=n) for n in range(4)]
    assert [size.num_blocks for size in sizes] == [28, 14, PER_SEQUENCE, PER_SEQUENCE]
    assert "before this one because memory ran out: 1; the KV cache has 0.01 GiB, not 0.03 GiB" in caplog.text
    few = worker_config(num_gpu_blocks_override=3)
    assert size_cache(few, LIMITS, 1 << 20, budget(0), halvings=2).num_blocks == 3


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({}, "--gpu-memory-utilization"),
        ({"kv_cache_memory_bytes": 3 << 20}, "--kv-cache-memory-bytes"),
        ({"num_gpu_blocks_override": 3}, "--num-gpu-blocks-override"),
    ],
)
def test_too_little_for_the_length_asked_for(given: dict[str, int], flag: str) -> None:
    with pytest.raises(ValueError) as error:
        config = worker_config(max_model_len=100, **given)
        size_cache(config, LIMITS, 1 << 20, budget(3 << 20, "--gpu-memory-utilization"))
    message = str(error.value)
    assert "one sequence of 100 tokens needs 7.00 MiB" in message
    assert "3.00 MiB are there" in message
    assert flag in message
    assert "--max-model-len to 48 at most" in message


def test_length_not_asked_for_is_fitted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        size = size_cache(worker_config(), LIMITS, 1 << 20, budget(3 << 20, "--kv-cache-memory-bytes"))
    assert (size.num_blocks, size.max_model_len) == (3, 48)
    assert "now 48 tokens" in caplog.text
    assert "--kv-cache-memory-bytes" in caplog.text


def test_no_room_for_a_single_block() -> None:
    with pytest.raises(ValueError, match=r"raise --x$"):
        size_cache(worker_config(), LIMITS, 1000, budget(999))


def test_an_indexer_caches_keys_in_the_same_blocks() -> None:
    """DeepSeek-V3.2's 128 numbers of a token beside the 576 of its latent."""
    layers = [TokenIndexer(7168, INDEXER), LatentAttention(Span(128, 0, 64), LATENT, scale=1.0)]
    layout = CacheLayout([LayerGroup(0, layers)], 16, torch.bfloat16)
    assert layout.block_bytes == 16 * (128 + 576) * 2
    assert [part.shape for part in layout.bind(8, Cpu(1))] == [(8, 16, 128), (8, 16, 576)]


def test_a_model_that_only_pools_has_room_for_the_texts_of_its_steps() -> None:
    pooling = Conversion(runner="pooling", convert="embed", architecture="")
    config = worker_config(conversion=pooling, steps_ahead=1)
    limits = replace(LIMITS, max_num_seqs=64, max_num_batched_tokens=64)
    of_step = 64 // LIMITS.block_size + 64
    assert size_cache(config, limits, 1, budget(10**9)).num_blocks == 2 * of_step + PER_SEQUENCE
    asked = worker_config(conversion=pooling, steps_ahead=1, kv_cache_memory_bytes=10**6)
    assert size_cache(asked, limits, 1, budget(10**9)).num_blocks == 64 * PER_SEQUENCE


def test_a_step_has_room_for_the_logits_of_all_rows_three_times() -> None:
    roomy = replace(LIMITS, max_num_batched_tokens=100)
    few, many = (
        step_bytes(MODEL, replace(roomy, max_num_seqs=count), torch.float32, place=Place())
        for count in (70, 71)
    )
    assert many - few >= 3 * 4 * MODEL.vocab_size


def test_a_step_has_room_for_the_tokens_of_all_replicas_that_share_experts() -> None:
    one, two, three = (
        step_bytes(MODEL, LIMITS, torch.float32, place=Place(expert_replicas=count)) for count in (1, 2, 3)
    )
    assert three - two == two - one >= LIMITS.max_num_batched_tokens * 4 * MODEL.hidden_size * 4


@pytest.mark.parametrize(
    ("place", "recorded"),
    [
        (Place(), 1),
        (Place(tensor_size=2), 1),
        (Place(tensor_size=2, stages=2), 1),
        (Place(expert_size=2, expert_replicas=2), 0),
    ],
)
def test_recorded_steps_need_room_where_there_are_any(place: Place, recorded: int) -> None:
    """With ranks, layers are narrower, and logits are there in pieces, too."""
    asked: list[tuple[int, int]] = []

    class Records(Cpu):
        def recording_bytes(self, rows: int, *, per_row: int, per_token: int, attention: object) -> int:
            asked.append((per_row, per_token))
            return 1 << 40

    config = worker_config(place=place)
    device, dtype = Records(1), torch.bfloat16
    beside = bytes_beside_cache(config, LIMITS, device, [], dtype, ["generate"])
    assert beside >> 40 == recorded
    ranks, width = place.tensor_size, MODEL.hidden_size
    copies = 5 if ranks == 2 else 4
    expected = [(copies * 4 * MODEL.vocab_size, (4 * width + 16 * width // ranks) * 2)]
    assert asked == expected * recorded


def test_blocks_of_a_model_without_attention_are_few_enough_to_be_listed() -> None:
    assert size_cache(worker_config(), LIMITS, 0, budget(0)).num_blocks == 4 * PER_SEQUENCE
    long = replace(LIMITS, max_num_seqs=128, max_model_len=1 << 20)
    assert size_cache(worker_config(), long, 0, budget(0)).num_blocks == 1 << 17
    assert (
        size_cache(worker_config(), replace(long, max_model_len=1 << 22), 0, budget(0)).num_blocks == 1 << 18
    )
    told = iter([-8, 10**6])  # the bytes of a block on another rank, and how many it has room for
    beside = size_cache(worker_config(), long, 0, budget(0), lambda mine: min(mine, next(told)))
    assert beside.num_blocks == 10**6
