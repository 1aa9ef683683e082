"""What ranks that share experts take of memory beside others."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from msgspec import structs
from sizes import worker_config
from torch import nn

from models.parallel.experts import Transport
from worker.capacity import WorkerLimits
from worker.config import Place
from worker.features.experts.shared_experts import SharedExperts

LIMITS = WorkerLimits(block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=20)


def test_results_that_return_apart_have_room_beside_the_cache() -> None:
    plain = worker_config()
    model = structs.replace(plain.model, raw={"num_experts_per_tok": 8})

    def reserved(transport: Transport) -> int:
        place = Place(expert_size=2, expert_replicas=2, expert_transport=transport, stages=2)
        served = cast("Any", SimpleNamespace(modules=nn.Module().modules))
        config = worker_config(model=model, place=place)
        feature = SharedExperts(served, config, torch.bfloat16, torch.device("cpu"))
        return feature.step_bytes(LIMITS)

    tokens = 2 * LIMITS.max_num_batched_tokens
    more = reserved("all_to_all") - reserved("allgather_reducescatter")
    assert more == tokens * 8 * model.hidden_size * (3 * 4 + 2)
