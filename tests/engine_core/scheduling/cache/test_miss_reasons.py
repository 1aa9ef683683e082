"""Why no longer prefix was cached: each reason is planted, and must be named by the first answer."""

import logging
from collections.abc import Callable
from typing import get_args

import pytest
from fake_worker import facts
from scheduler_bench import Bench, add, config, pool

from engine_core.protocol import Add, CacheMiss
from engine_core.reason_codes import MissReason
from engine_core.scheduling.cache.block_hash import RecentHashes
from engine_core.scheduling.cache.block_pool import BlockPool
from engine_core.scheduling.cache.miss_reasons import MOST_TOKENS, OVERHEAD, PrefixMemory
from engine_core.scheduling.queue.owner_shares import Owner
from engine_core.scheduling.sequence import Sequence
from worker.protocol import Sampling

PROMPT = list(range(1, 13))  # three blocks
ASKS = 9
"""The id of the request whose miss is explained."""


def bench(*, caches: bool = True, **changes: object) -> Bench:
    return Bench(config(enable_prefix_caching=caches), facts(**{"block_size": 4, **changes}))


def ask(bench: Bench, tokens: list[int], **changes: object) -> None:
    bench.add(add(ASKS, tokens, max_tokens=1, diagnoses=True, **changes))


def after(tokens: list[int], remembered: list[int] | None = PROMPT, **changes: object) -> Bench:
    """A request that asks, after one with the remembered prompt has ended."""
    made = bench()
    if remembered is not None:
        made.serve(add(1, remembered, max_tokens=1))
    ask(made, tokens, **changes)
    return made


def after_one_that_ended_early() -> Bench:
    made = bench(max_num_batched_tokens=4)
    made.add(add(1, PROMPT))
    made.step()
    made.abort((0, 1))
    ask(made, PROMPT)
    return made


def beside_one_that_computes_it() -> Bench:
    made = bench(max_num_batched_tokens=16)
    made.add(add(1, PROMPT))
    ask(made, PROMPT)
    return made


def beside_one_that_was_preempted() -> Bench:
    """The one with the prompt holds the only slot when one of higher priority comes, which asks."""
    made = Bench(
        config(scheduling_policy="priority"), facts(block_size=4, max_num_seqs=1, max_num_batched_tokens=4)
    )
    made.add(add(1, PROMPT, priority=5))
    made.step()
    ask(made, PROMPT, priority=0)
    return made


def after_eviction() -> Bench:
    made = bench(num_blocks=4)
    made.serve(add(1, PROMPT, max_tokens=1))
    made.serve(add(2, [40, *range(20, 33)], max_tokens=1))
    ask(made, PROMPT)
    return made


def after_reset() -> Bench:
    made = bench()
    made.serve(add(1, PROMPT, max_tokens=1))
    made.scheduler.cache.pool.withdraw_all()
    ask(made, PROMPT)
    return made


def without_state() -> Bench:
    """The prompt that is remembered ends behind another block than the one behind which this one parts."""
    made = bench(remembered_states=4)
    made.serve(add(1, PROMPT, max_tokens=1))
    ask(made, [*PROMPT[:8], 30, 31])
    return made


def disabled() -> Bench:
    made = bench(caches=False)
    ask(made, PROMPT)
    return made


def without_cache() -> Bench:
    made = bench(num_blocks=0, causal=False, max_num_batched_tokens=128)
    made.add(pool(ASKS, PROMPT, diagnoses=True))
    return made


PLANTED: list[tuple[MissReason, int, Callable[[], Bench]]] = [
    ("first_time", 0, lambda: after(PROMPT, remembered=None)),
    ("first_time", 0, lambda: after(PROMPT, salt="mine")),
    ("other_beginning", 0, lambda: after([30, *PROMPT])),
    ("different_token", 6, lambda: after([*PROMPT[:6], 30, *PROMPT[7:], 31])),
    ("rest_of_block", 6, lambda: after([*PROMPT[:6], 30, 31, 32], PROMPT[:6])),
    ("rest_of_block", 6, lambda: after(PROMPT[:6], PROMPT[:6])),
    ("new_tokens", 12, lambda: after([*PROMPT, 30, 31, 32, 33, 34])),
    ("last_token", 12, lambda: after(PROMPT)),
    ("none", 8, lambda: after([*PROMPT[:8], 30, 31])),
    ("short_prompt", 3, lambda: after([*PROMPT[:3], 30])),
    ("prompt_logprobs", 12, lambda: after(PROMPT, prompt_logprobs=0)),
    ("evicted", 12, after_eviction),
    ("reset", 12, after_reset),
    ("computing", 12, beside_one_that_computes_it),
    ("preempted", 12, beside_one_that_was_preempted),
    ("not_computed", 12, after_one_that_ended_early),
    ("state_not_kept", 8, without_state),
    ("disabled", 0, disabled),
    ("no_cache", 0, without_cache),
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted[0])
def test_every_planted_reason_is_named(planted: tuple[MissReason, int, Callable[[], Bench]]) -> None:
    reason, matched, plant = planted
    made = plant()
    made.run()
    assert made.miss(ASKS) == CacheMiss(reason, matched)


def test_every_reason_is_planted() -> None:
    assert {reason for reason, _, _ in PLANTED} == set(get_args(MissReason))


def test_only_the_first_answer_of_those_who_ask_says_it() -> None:
    made = bench()
    made.add(add(1, PROMPT, max_tokens=3, diagnoses=True))
    made.serve(add(2, PROMPT, max_tokens=3))
    assert [output.miss is None for output in made.outputs[0, 1]] == [False, True, True]  # pyright: ignore[reportAttributeAccessIssue]
    assert made.miss(2) is None


def test_a_pooled_text_is_told_too() -> None:
    made = bench()
    made.serve(pool(1, PROMPT))
    made.serve(pool(2, [*PROMPT[:5], 30, 31, 32, 33], diagnoses=True))
    assert made.miss(2) == CacheMiss("different_token", 5)


def test_an_answer_is_remembered_with_its_prompt() -> None:
    made = bench()
    made.serve(add(1, PROMPT, max_tokens=7))
    turn = [*PROMPT, *made.text(1)[:5]]
    ask(made, [*turn, (made.text(1)[5] + 1) % 50, 1, 2, 3, 4])
    made.run()
    assert made.miss(ASKS) == CacheMiss("different_token", len(turn))


def test_nothing_is_told_of_other_salts() -> None:
    """Whatever others have sent, a request is told what it would be told if it were alone."""

    def told(others: list[Add]) -> CacheMiss | None:
        made = bench()
        made.add_all(others)
        made.run()
        made.serve(add(1, PROMPT[:7], max_tokens=1, salt="mine"))
        ask(made, PROMPT, salt="mine")
        made.run()
        return made.miss(ASKS)

    alone = told([])
    assert alone == CacheMiss("rest_of_block", 7)
    others = [add(3, PROMPT), add(4, PROMPT, salt="other"), add(5, PROMPT[:8], salt="other")]
    assert told(others) == alone


def test_what_is_evicted_is_known_when_its_prompt_is_forgotten() -> None:
    made = after_eviction()
    forget_all(made.scheduler.cache.memory)
    made.run()
    assert made.miss(ASKS) == CacheMiss("evicted", 12)


def test_what_follows_a_forgotten_prompt_is_new() -> None:
    made = after([*PROMPT, 30, 31, 32, 33, 34])
    forget_all(made.scheduler.cache.memory)
    made.run()
    assert made.miss(ASKS) == CacheMiss("new_tokens", 12)


def test_debug_logs_say_why_more_than_a_block_missed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "engine_core.scheduling.cache.cache_manager")
    made = after([*PROMPT[:6], 30, 31, 32, 33, 34])
    made.run()
    made.serve(add(3, PROMPT, max_tokens=1), client=2)
    made.add(add(4, [*PROMPT[:6], 30], max_tokens=1))  # no more than a block is missing
    made.run()
    assert [record.message for record in caplog.records] == [
        "request 1 of client 0: 0 of 12 prompt tokens were cached, 0 match: first_time",
        "request 9 of client 0: 4 of 11 prompt tokens were cached, 6 match: different_token",
    ]


# The memory alone.


def sequence(id: int, tokens: list[int], salt: str = "") -> Sequence:
    request = Add(id=id, tokens=tokens, params=Sampling(max_tokens=5), salt=salt)
    return Sequence((0, id), request, (0, 0.0, id), 1000, 0.0, Owner(""))


def remember(memory: PrefixMemory, id: int, tokens: list[int], salt: str = "", output: int = 0) -> None:
    seq = sequence(id, tokens, salt)
    memory.begin(seq)
    seq.tokens += [7] * output
    seq.done = True
    memory.end(seq)


def forget_all(memory: PrefixMemory) -> None:
    """Remember so much of another salt that there is room for nothing else."""
    remember(memory, 1000, [1] * (MOST_TOKENS - OVERHEAD), salt="other")
    assert len(memory) == 1


def test_memory_is_bounded_and_the_oldest_prompts_are_forgotten() -> None:
    memory = PrefixMemory(4, most_tokens=1000)
    for id in range(200):
        remember(memory, id, [id] * 20, salt=f"salt {id % 50}", output=17)
        assert memory.size <= 1000
    assert len(memory) == 1000 // (20 + 16 + OVERHEAD)
    assert len(memory._by_salt) == len(memory)  # pyright: ignore[reportPrivateUsage]
    assert not memory._open  # pyright: ignore[reportPrivateUsage]
    miss = memory.explain(sequence(1, [199] * 20, salt="salt 49"), BlockPool(1))
    assert miss == CacheMiss("not_computed", 20)
    assert memory.explain(sequence(1, [0] * 20, salt="salt 0"), BlockPool(1)) == CacheMiss("first_time", 0)


def test_prompts_of_aborted_and_of_running_requests_are_forgotten_too() -> None:
    memory = PrefixMemory(4, most_tokens=1000)
    for id in range(200):
        seq = sequence(id, [id] * 20)
        memory.begin(seq)
        if id % 2:
            memory.end(seq)  # preempted, and never seen again
    assert memory.size <= 1000
    assert len(memory) == 1000 // (20 + OVERHEAD)
    assert len(memory._open) == len(memory)  # pyright: ignore[reportPrivateUsage]


def test_a_prompt_longer_than_the_memory_leaves_it_empty() -> None:
    memory = PrefixMemory(4, most_tokens=100)
    remember(memory, 1, [1] * 200)
    assert (len(memory), memory.size) == (0, 0)


def test_the_longest_common_beginning_counts_not_the_latest() -> None:
    memory = PrefixMemory(4)
    for id, tokens in enumerate([[*PROMPT[:9], 30], [*PROMPT[:11], 31, 32], PROMPT[:5], [40]]):
        remember(memory, id, tokens)
    assert memory.explain(sequence(9, [*PROMPT, 13, 14, 15]), BlockPool(1)).matched == 11


def test_recent_hashes_are_bounded() -> None:
    hashes = RecentHashes(most=10)
    for number in range(1000):
        hashes.add([number.to_bytes(2)])
        assert len(hashes) <= 20
    assert all(number.to_bytes(2) in hashes for number in range(990, 1000))
    hashes.discard([(999).to_bytes(2)])
    assert (999).to_bytes(2) not in hashes
