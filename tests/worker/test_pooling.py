"""Pooling adds memory to a worker, and to its steps a plan of the hidden states that are pooled."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from laid_out import LaidOut, Table
from sizes import worker_config
from tiny import tiny_checkpoint

from models.config import read_config
from models.context import ForwardContext
from models.conversion.conversion_choice import resolve_conversion
from models.pooling.config import read_pooling
from worker.devices.cpu import Cpu
from worker.features.pooling.pooled_texts import HiddenStore, QueryStore, gather_hidden, max_sim
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep
from worker.runner import Runner
from worker.worker_facts import WorkerFacts

WHOLE, LAST, TAGGED = Pooling(task="token_embed"), Pooling(task="embed"), Pooling(task="token_classify")


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


def needed_positions(params: Pooling, tokens: Sequence[int]) -> Sequence[int]:
    """All, or the last one, or those of the token 32."""
    if params == TAGGED:
        return [position for position, token in enumerate(tokens) if token == 32]
    return range(0 if params == WHOLE else len(tokens) - 1, len(tokens))


def new(slot: int, count: int, params: Pooling | Sampling) -> NewSeq:
    return NewSeq(slot=slot, tokens=[10 * slot + i for i in range(count)], prompt_len=count, params=params)


def seq(slot: int, start: int, count: int, blocks: list[int] | None = None, *, pools: bool = True) -> SeqStep:
    return SeqStep(slot=slot, start=start, count=count, blocks=blocks or [], samples=False, pools=pools)


def states(batch: LaidOut) -> torch.Tensor:
    """Hidden states whose numbers are their token ids."""
    return batch.ids[:, None].float().expand(-1, 3)


def test_rows_come_from_the_step_or_from_earlier_ones() -> None:
    table = Table(needed_positions)
    store = HiddenStore(10, 4, 3, torch.float32, table.device.allocate)
    first = table.step(
        seq(1, 0, 5, [7, 3], pools=False),
        seq(2, 0, 2, [1], pools=False),
        new=[new(1, 6, WHOLE), new(2, 3, LAST)],
    )
    assert first.pooled is None
    store.write(states(first), first.context)
    second = table.step(
        seq(1, 5, 1), seq(2, 2, 1), seq(3, 0, 4, [9]), seq(0, 0, 2, [4], pools=False),
        new=[new(3, 4, WHOLE), new(0, 9, Sampling(max_tokens=1))],
    )  # fmt: skip
    store.write(states(second), second.context)
    plan = second.pooled
    assert plan is not None
    assert (plan.rows, plan.segments.lengths, plan.params) == ([1, 2, 0], [1, 4, 6], [LAST, WHOLE, WHOLE])
    pooled = gather_hidden(plan, states(second), store, table.slots)
    expected = [22, 30, 31, 32, 33, 10, 11, 12, 13, 14, 15]
    assert pooled.hidden[:, 0].tolist() == expected
    with pytest.raises(ValueError, match="earlier steps, which are not stored"):
        gather_hidden(plan, states(second), None, table.slots)


def test_a_step_of_whole_sequences_is_pooled_as_it_is() -> None:
    table = Table(needed_positions, paged=False)
    batch = table.step(seq(1, 0, 4), seq(3, 0, 2), new=[new(1, 4, WHOLE), new(3, 2, WHOLE)])
    plan = batch.pooled
    assert plan is not None
    assert (plan.rows, plan.segments.lengths, plan.params, plan.needed) == (
        [0, 1],
        [4, 2],
        [WHOLE, WHOLE],
        None,
    )
    hidden = states(batch)
    assert gather_hidden(plan, hidden, None, table.slots).hidden is hidden


def test_positions_that_a_token_names_come_from_the_step_or_from_earlier_ones() -> None:
    """A sequence that has none of them is pooled, too, and has no rows."""
    table = Table(needed_positions)
    store = HiddenStore(10, 4, 3, torch.float32, table.device.allocate)
    early, late, none = ([7, 32, 8, 32, 9, 32], [1, 2, 3, 4, 5, 32], [1, 2])
    news = [NewSeq(slot, text, len(text), TAGGED) for slot, text in enumerate((early, late, none))]
    first = table.step(*(seq(slot, 0, 2, [slot, slot + 3], pools=slot == 2) for slot in range(3)), new=news)
    assert first.pooled is not None
    assert (first.pooled.rows, first.pooled.segments.lengths) == ([2], [0])
    assert gather_hidden(first.pooled, states(first), store, table.slots).hidden.shape == (0, 3)
    at = torch.arange(12.0)
    store.write(at[:6, None].expand(-1, 3), first.context)
    second = table.step(*(seq(slot, 2, 4) for slot in range(2)))
    assert second.pooled is not None
    assert (second.pooled.rows, second.pooled.segments.lengths) == ([1, 0], [1, 3])
    hidden = 100 + at[:8, None].expand(-1, 3)
    store.write(hidden, second.context)
    pooled = gather_hidden(second.pooled, hidden, store, table.slots)
    assert pooled.hidden[:, 0].tolist() == [107, 1, 101, 103]


def test_a_sequence_that_was_admitted_to_be_sampled_is_not_pooled() -> None:
    table = Table(needed_positions)
    with pytest.raises(ValueError, match="was not admitted"):
        table.step(seq(1, 0, 5, [7, 3]), new=[new(1, 5, Sampling(max_tokens=1))])


def test_whole_sequences_have_token_types_and_no_blocks() -> None:
    table = Table(needed_positions, paged=False)
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


def test_max_sim() -> None:
    query, document = torch.tensor([[1.0, 0], [0, 2]]), torch.tensor([[0.5, 0.5], [0.1, 0.9], [-3, 0]])
    assert max_sim(query, document).tolist() == pytest.approx([0.5 + 1.8])
    assert max_sim(query, torch.empty(0, 2)).tolist() == [0.0]
