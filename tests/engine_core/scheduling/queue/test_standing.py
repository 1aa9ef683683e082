"""How far a request has come: how many come before it, or how many tokens of its prompt are computed."""

from fake_worker import facts
from scheduler_bench import Bench, add, config

from engine_core.protocol import Standing


def bench(slots: int = 1) -> Bench:
    return Bench(config(), facts(max_num_seqs=slots, max_num_batched_tokens=8))


def standing(bench: Bench, id: int) -> Standing | None:
    seq = bench.scheduler.live.get((0, id))
    return None if seq is None else bench.scheduler.waiting.standing(seq)


def test_those_before_it_are_counted() -> None:
    queue = bench()
    for id in range(4):
        queue.add(add(id, [1 + id], max_tokens=40))
    queue.step()
    assert [standing(queue, id) for id in (1, 2, 3)] == [Standing(id, id - 1, 0, 1) for id in (1, 2, 3)]
    queue.abort((0, 1))
    assert standing(queue, 2) == Standing(2, 0, 0, 1)
    assert standing(queue, 1) is None


def test_of_other_owners_so_many_come_before_it_as_their_weights_say() -> None:
    queue = bench()
    queue.add(add(0, [1], max_tokens=40))
    queue.step()
    for id in range(1, 11):
        queue.add(add(id, [1 + id], owner="many"))
    for id in range(11, 13):
        queue.add(add(id, [1 + id], owner="two", weight=3.0))
    assert standing(queue, 3) == Standing(3, 2 + 2, 0, 1), "the other one has no more"
    assert standing(queue, 11) == Standing(11, 0, 0, 1), "one for three of its own"
    assert standing(queue, 12) == Standing(12, 1, 0, 1)


def test_a_prompt_is_read_in_pieces() -> None:
    queue = bench()
    queue.add(add(1, [1] * 20))
    queue.step()
    assert standing(queue, 1) == Standing(1, -1, 8, 20)
    for _ in range(2):
        queue.step()
    found = standing(queue, 1)
    assert found is not None and found.ahead == -1 and found.read == found.known - 1
