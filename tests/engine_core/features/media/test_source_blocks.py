"""Sources: encoded once, held in blocks of their own, given back with those of the cache."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from fake_sources import number_of, source
from fake_steps import Landed
from fake_worker import VOCAB, facts, text_after
from msgspec.structs import replace
from scheduler_bench import Bench, add, config, pool

from engine_core.protocol import AddRequest, Failed, Source
from worker.buffers import Buffer
from worker.protocol import StepBounds, StepInput
from worker.worker_facts import WorkerFacts

SIZE = 4


def speech(num_source_blocks: int = 12, **changes: int) -> WorkerFacts:
    plain = facts(block_size=SIZE, **changes)  # pyright: ignore[reportArgumentType]
    return replace(
        plain, source_kind="audio", source_len=12, source_shape=(1, 3), num_source_blocks=num_source_blocks
    )


def expected(request: AddRequest) -> list[int]:
    """The tokens that a request must get when it runs alone."""
    assert request.source is not None
    tokens, shift = list(request.tokens), number_of(request.source, SIZE)
    while len(tokens) < len(request.tokens) + request.params.max_tokens:  # pyright: ignore[reportAttributeAccessIssue]
        tokens.append((text_after(tokens) + shift) % VOCAB)
    return tokens[len(request.tokens) :]


def check_blocks(bench: Bench) -> None:
    """Assert that blocks of sources count the sequences that hold them."""
    sources = bench.sources
    pool = sources.pool
    users = Counter(block for blocks in sources._held.values() for block in blocks)  # pyright: ignore[reportPrivateUsage]
    begun = sources._begun  # pyright: ignore[reportPrivateUsage]
    users.update(begun.blocks if begun else ())
    assert all(pool.users(block) == users[block] for block in range(pool.count))
    assert pool.free == pool.count - len(users)


def test_equal_sources_are_encoded_once_and_share_their_blocks() -> None:
    bench = Bench(config(), speech())
    requests = [add(id, [1, 2, 3, id], source=source("a")) for id in range(4)]
    bench.add_all(requests)
    bench.run()
    bench.serve(add(9, [5, 6], source=source("a")))
    assert bench.worker.sources.encoded == 1
    assert [bench.text(id) for id in range(4)] == [expected(each) for each in requests]
    bench.serve(add(10, [5, 6], source=source("a"), salt="another"))
    assert bench.worker.sources.encoded == 2, "what others have sent is not found by another salt"
    assert not bench.sources.bytes
    bench.sources.forget_prefixes()
    bench.serve(add(11, [5, 6], source=source("a"), salt="another"))
    assert bench.worker.sources.encoded == 3, "the weights of the encoder may be others"
    assert bench.text(11) == bench.text(10)


def test_prompts_of_different_sources_share_no_prefix() -> None:
    bench = Bench(config(), speech())
    prompt = list(range(1, 10))
    for id, name in enumerate("aba"):
        bench.serve(add(id, prompt, source=source(name)))
    assert [bench.cached(id) for id in range(3)] == [0, 0, 8]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_pool_that_holds_one_source_serves_all_of_them(depth: int) -> None:
    bench = Bench(config(steps_ahead=depth), speech(num_source_blocks=3), depth)
    requests = [add(id, [id + 1, 2], source=source("abc"[id % 3])) for id in range(6)]
    bench.add_all(requests)
    while bench.step():
        check_blocks(bench)
    assert [bench.text(each.id) for each in requests] == [expected(each) for each in requests]


@pytest.mark.parametrize("seed", range(6))
def test_sequences_give_both_kinds_of_blocks_back_and_are_right_again(seed: int) -> None:
    rolled = random.Random(seed)
    limits = speech(rolled.choice([3, 4, 7]), num_blocks=rolled.choice([8, 12]), max_model_len=32)
    bench = Bench(config(scheduling_policy="priority", steps_ahead=seed % 3), limits, seed % 3)
    requests = [
        add(
            *(id, [rolled.randint(1, 40) for _ in range(rolled.randint(1, 14))], rolled.randint(1, 12)),
            priority=rolled.randint(0, 2),
            source=source(rolled.choice("abcd"), rolled.choice([3, 12])),
        )
        for id in range(12)
    ]
    for request in requests:
        bench.add(request)
        bench.steps(rolled.randint(0, 3))
        check_blocks(bench)
    bench.run()
    check_blocks(bench)
    assert [bench.text(each.id) for each in requests] == [expected(each) for each in requests]


def test_a_step_encodes_no_more_than_its_budget_unless_one_alone_is_larger() -> None:
    bench = Bench(config(max_num_encoder_input_tokens=20), speech(num_source_blocks=12))
    bench.add_all([add(id, [1, 2], source=source("abc"[id])) for id in range(3)])
    planned = bench.scheduler.schedule(1.0)
    assert planned is not None and len(planned.step.sources) == 2
    bench = Bench(config(max_num_encoder_input_tokens=1), speech())
    bench.serve(add(0, [1, 2], source=source("a")))
    assert bench.worker.sources.encoded == 1


def layered(layers: int = 6, **changes: int) -> WorkerFacts:
    return replace(speech(**changes), source_layers=layers)


def begin_partly(depth: int = 0) -> Bench:
    """A bench whose steps have begun to encode the source of request 1, beside a stream."""
    bench = Bench(config(max_token_gap_ms=1.0, steps_ahead=depth), layered(num_source_blocks=6), depth)
    bench.add(add(0, [1, 2], 60, source=source("a"), streams=True))
    bench.steps(6)
    bench.add(add(1, [3, 2], source=source("b")))
    while not (bench.sources._begun):  # pyright: ignore[reportPrivateUsage]
        assert bench.step()
    return bench


@pytest.mark.parametrize("depth", [0, 2])
def test_while_somebody_reads_a_stream_layers_of_an_encoder_are_divided_among_steps(depth: int) -> None:
    bench = begin_partly(depth)
    seen, launch = list[StepInput](), bench.worker.launch

    def noted(step: StepInput, following: Callable[[], StepBounds] | None = None) -> Landed:
        seen.append(step)
        return launch(step, following)

    bench.worker.launch = noted
    bench.add(add(2, [5], source=source("c")))
    while bench.step():
        check_blocks(bench)
    layers = [step.source_layers for step in seen if step.source_layers]
    assert len(layers) > 3 and max(layers) < 6
    assert bench.worker.sources.encoded == 3
    for request in (
        add(0, [1, 2], 60, source=source("a")),
        add(1, [3, 2], source=source("b")),
        add(2, [5], source=source("c")),
    ):
        assert bench.text(request.id) == expected(request)


@pytest.mark.parametrize("ends", ["it is aborted", "a step fails", "another one takes its place"])
def test_a_source_that_is_begun_may_be_given_up(ends: str) -> None:
    bench = begin_partly()
    if ends == "it is aborted":
        bench.scheduler.abort([(0, 1)], bench.now)
    elif ends == "a step fails":
        planned = bench.scheduler.schedule(bench.now)
        assert planned is not None
        bench.collect(
            bench.scheduler.results.land_failed(planned, bench.now, short_of_memory=False, behind=False)
        )
    else:
        bench.scheduler.abort([(0, 0)], bench.now)
        bench.add(add(2, [5], source=source("c"), priority=-1))
        bench.add(add(3, [5], source=source("d"), priority=-1))
    check_blocks(bench)
    bench.run()
    check_blocks(bench)
    if ends != "it is aborted":
        assert bench.text(1) == expected(add(1, [3, 2], source=source("b")))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (None, "send one"),
        (source("a", 13), "from 1 to 12"),
        (Source("a", 12), "no tokens"),
        (Source("a", 2, [1, 2]), "no tokens"),
    ],
)
def test_a_source_that_the_encoder_cannot_read_is_refused(wrong: Source | None, said: str) -> None:
    bench = Bench(config(), speech())
    bench.add(add(0, [1], source=wrong))
    [failed] = bench.outputs[0, 0]
    assert isinstance(failed, Failed) and failed.code == 400 and said in failed.message


def test_sources_of_tokens_have_tokens_of_the_vocabulary() -> None:
    texts = replace(speech(), source_kind="tokens")
    bench = Bench(config(), texts)
    wrong = [
        Source("a", 2, [1, 50]),
        Source("a", 3, [1]),
        Source("a", 2, [1, 2], Buffer(b"12")),
    ]
    for id, each in enumerate(wrong):
        bench.add(add(id, [1], source=each))
        assert isinstance(bench.outputs[0, id][0], Failed)
    bench = Bench(config(), facts())
    bench.add(add(0, [1], source=source("a")))
    bench.add(pool(1, [1], source=source("a")))
    assert all(isinstance(bench.outputs[0, id][0], Failed) for id in range(2))
