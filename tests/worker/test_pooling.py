"""What pooling takes of a worker's memory, and what a step of texts has.

Real engines show that the right hidden states are pooled, in tests/engine_core/test_tasks.py.
"""

from pathlib import Path

import pytest
import torch
from laid_out import Table
from sizes import worker_config
from tiny import tiny_checkpoint

from models.config import read_config
from models.context import ForwardContext
from models.conversion.conversion_choice import resolve_conversion
from models.pooling.config import read_pooling
from worker.devices.cpu import Cpu
from worker.features.pooling.pooled_texts import HiddenStore, QueryStore
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep
from worker.runner import Runner
from worker.worker_facts import WorkerFacts

LAST = Pooling(task="embed")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def facts_of(folder: Path, runner: str = "auto", tasks: tuple[str, ...] = (), **given: object) -> WorkerFacts:
    model = read_config(folder)
    config = worker_config(
        folder=str(folder),
        model=model,
        conversion=resolve_conversion(model, folder, runner=runner),
        pooling=read_pooling(folder, model, {}),
        tasks=tasks,
        num_gpu_blocks_override=64,
        cpu_threads=1,
        **given,
    )
    opened = Runner(config, lambda stage, fraction: None)
    facts = opened.facts
    opened.close()
    return facts


def test_one_copy_of_the_weights_does_it_all(llama: Path) -> None:
    everything, text_only = facts_of(llama), facts_of(llama, tasks=("generate",))
    vectors_only = facts_of(llama, runner="pooling")
    lm_head = 320 * 32 * 4
    assert everything.weight_bytes == text_only.weight_bytes
    assert vectors_only.weight_bytes == everything.weight_bytes - lm_head
    assert vectors_only.tasks == ("embed", "token_embed")


def test_hidden_states_take_memory_only_where_a_task_reads_them_all(llama: Path) -> None:
    keys_and_values = 64 * 32 * (3 * 2 * 2 * 8) * 4  # blocks, positions, layers and heads, float32
    everything = facts_of(llama, tasks=("generate", "token_embed"))
    assert everything.whole_tasks == ("token_embed",)
    assert everything.kv_bytes == keys_and_values + 64 * 32 * 32 * 4
    last_only = facts_of(llama)
    assert last_only.tasks == ("generate", "embed")
    assert last_only.whole_tasks == ()
    assert last_only.kv_bytes == keys_and_values


def test_hidden_states_may_be_narrower_than_the_layers(tmp_path: Path) -> None:
    facts = facts_of(tiny_checkpoint("OPTForCausalLM", tmp_path), tasks=("token_embed",))
    assert facts.widths == {"token_embed": 16}
    assert facts.kv_bytes == 64 * 32 * (3 * 2 * 4 * 8 + 16) * 4


def new(slot: int, count: int, params: Pooling | Sampling) -> NewSeq:
    return NewSeq(slot=slot, tokens=[10 * slot + i for i in range(count)], prompt_len=count, params=params)


def seq(slot: int, start: int, count: int, blocks: list[int] | None = None, *, pools: bool = True) -> SeqStep:
    return SeqStep(slot=slot, start=start, count=count, blocks=blocks or [], samples=False, pools=pools)


def test_a_sequence_that_was_admitted_to_be_sampled_is_not_pooled() -> None:
    table = Table(lambda _, tokens: range(len(tokens)))
    with pytest.raises(ValueError, match="was not admitted"):
        table.step(seq(1, 0, 5, [7, 3]), new=[new(1, 5, Sampling(max_tokens=1))])


def test_whole_sequences_have_token_types_and_no_blocks() -> None:
    table = Table(lambda _, tokens: range(len(tokens)), paged=False)
    pair = Pooling(task="embed", second_at=2)
    batch = table.step(seq(1, 0, 4), seq(0, 0, 3), new=[new(1, 4, pair), new(0, 3, LAST)])
    assert batch.context.token_types is not None
    assert batch.context.token_types.tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert batch.context.positions.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.ids.tolist() == [10, 11, 12, 13, 0, 1, 2]
    plain = table.step(seq(0, 0, 3), new=[new(0, 3, LAST)])
    assert plain.context.token_types is None
    with pytest.raises(ValueError, match="does not fit"):
        table.step(seq(1, 1, 3))


def test_a_store_keeps_what_was_written_in_its_dtype() -> None:
    store = HiddenStore(4, 2, 3, torch.bfloat16, Cpu(1).allocate)
    context = ForwardContext(*[torch.empty(0)] * 4, torch.tensor([9, 2]), 2, [2], [2])  # pyright: ignore[reportCallIssue]
    store.write(torch.tensor([[1.0, 2, 3], [4, 5, 6]]), context)
    table = torch.tensor([[0, 0], [1, 4]], dtype=torch.int32)
    rows = store.read(table, torch.tensor([1, 1]), torch.tensor([0, 3]))
    assert rows.tolist() == [[4, 5, 6], [1, 2, 3]]
    assert rows.dtype == torch.bfloat16


def test_the_query_that_was_used_longest_ago_is_dropped() -> None:
    queries = QueryStore(max_bytes=100)
    for name in ("a", "b"):
        queries.put(name, torch.ones(3, 4))  # 48 bytes
    assert queries.get("a") is not None
    queries.put("c", torch.ones(3, 4))
    assert queries.get("b") is None
    assert queries.get("a") is not None and queries.get("c") is not None
    queries.put("a", torch.zeros(3, 4))  # takes its own place
    assert queries.get("c") is not None
    queries.put("huge", torch.ones(100, 4))
    assert [queries.get(name) is None for name in ("a", "c", "huge")] == [True, True, False]
