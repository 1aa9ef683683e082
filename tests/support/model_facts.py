"""Facts of a small model, as its worker, its engine and its server state them."""

from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from engine_core.protocol import Ready
from worker.worker_facts import WorkerFacts

WORKER = WorkerFacts(
    device="cpu",
    dtype="float32",
    block_size=16,
    num_blocks=8,
    max_model_len=100,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    weight_bytes=0,
    kv_bytes=0,
)
READY = Ready(
    model="m",
    folder="/m",
    architecture="LlamaForCausalLM",
    vocab_size=450,
    enable_prefix_caching=True,
    scheduling_policy="fcfs",
    worker=WORKER,
)

_INNER = ("ready", "worker")
"""Fields that hold facts of the floor below."""

Facts = TypeVar("Facts", bound=msgspec.Struct)


def changed(facts: Facts, **fields: Any) -> Facts:
    """The facts with other values of fields, which may be those of the facts that these ones hold."""
    own = {name: value for name, value in fields.items() if name in facts.__struct_fields__}
    rest = {name: value for name, value in fields.items() if name not in own}
    if rest:
        (inner,) = set(_INNER) & set(facts.__struct_fields__)
        own[inner] = changed(getattr(facts, inner), **rest)
    return replace(facts, **own)
