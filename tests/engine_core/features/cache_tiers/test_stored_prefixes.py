"""Prefixes on a scripted disk: what is written and brought back, and that a disk never changes an answer."""

import random

import pytest
from fake_media import seen_tokens
from fake_worker import facts, reference, vectors_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_bench import random_media
from scheduler_bench import add, config, pool
from scripted_disk import DiskBench, ScriptedDisk

from engine_core.protocol import AddRequest, Pooled
from worker.protocol import Pooling

TOKENS = [1 + number * number % 47 for number in range(60)]


def bench(disk: ScriptedDisk | None = None, **limits: object) -> DiskBench:
    return DiskBench(config(), facts(**limits), scripted=disk or ScriptedDisk())  # pyright: ignore[reportArgumentType]


def restarted(before: DiskBench) -> DiskBench:
    """A new engine that finds the disk of another one."""
    return DiskBench(before.config, before.facts, scripted=before.scripted)


@pytest.mark.parametrize("windows", [(0,), (8,), (0, 8), (0, 8, 8, 20)])
def test_a_prefix_is_found_after_a_restart(windows: tuple[int, ...]) -> None:
    first = bench(windows=windows, num_blocks=100, tasks=("generate",))
    first.serve(add(1, TOKENS[:40]))
    first.settle()
    second = restarted(first)
    second.serve(add(1, TOKENS[:40]))
    assert second.cached(1) == 36
    assert second.text(1) == reference(TOKENS[:40], 4)
    assert second.scripted.read_blocks == 9 if windows[0] == 0 == windows[-1] else 2


def test_blocks_that_were_taken_come_back_from_disk() -> None:
    served = bench(num_blocks=14, max_model_len=48)
    served.serve(add(1, TOKENS[:40]))
    served.settle()
    served.serve(add(2, [3] * 44))
    served.serve(add(3, TOKENS[:40]))
    assert served.cached(3) == 36 and served.text(3) == reference(TOKENS[:40], 4)


@pytest.mark.parametrize("states", [None, 3])
def test_memory_gets_what_is_about_to_be_forgotten(states: int | None) -> None:
    memory = ScriptedDisk(room=40)
    served = bench(memory, num_blocks=16, max_model_len=48, remembered_states=states)

    def save() -> None:
        while served.prefixes.write(served.now, idle=True):
            memory.finish_write()

    served.serve(add(1, TOKENS[:41]))
    save()
    assert len(memory.kept) == 7, "of the next 12 blocks that are taken 5 hold nothing"
    for id in (2, 3):
        served.serve(add(id, [id] * 44))
        save()
    served.serve(add(4, TOKENS[:41]))
    assert served.cached(4) == 40 and served.text(4) == reference(TOKENS[:41], 4)
    assert memory.read_blocks and len(memory.kept) <= 40
    assert not served.prefixes.write_rest(served.now, served.now), "memory ends with the engine"


def test_the_state_of_a_hybrid_comes_back_with_its_blocks() -> None:
    first = bench(remembered_states=4)
    first.serve(add(1, TOKENS[:43]))
    first.settle()
    for lost in (False, True):
        second = restarted(first)
        assert second.scripted.states is not None
        if lost:
            second.scripted.states.damaged |= second.scripted.states.kept.keys()
        second.serve(add(1, TOKENS[:43]))
        assert second.cached(1) == (0 if lost else 40)
        assert second.text(1) == reference(TOKENS[:43], 4)


def test_other_salts_find_nothing() -> None:
    served = bench()
    served.serve(add(1, TOKENS[:40], salt="a"))
    served.settle()
    after = restarted(served)
    after.serve(add(1, TOKENS[:40], salt="b"))
    assert after.cached(1) == 0 and not after.scripted.read_blocks


def test_others_run_while_a_sequence_waits_for_its_blocks() -> None:
    served = bench()
    served.serve(add(1, TOKENS[:40]))
    served.settle()
    after = restarted(served)
    after.add(add(1, TOKENS[:40]))
    after.add(add(2, [5, 6, 7], max_tokens=20))
    after.steps(10)
    assert [seq.id for seq in after.scheduler.running] == [2]
    after.run()
    assert after.cached(1) == 36 and after.text(2) == reference([5, 6, 7], 20)


@pytest.mark.parametrize("lost", [0, 4, 8])
def test_what_is_lost_is_computed(lost: int) -> None:
    served = bench()
    served.serve(add(1, TOKENS[:40]))
    served.settle()
    after = restarted(served)
    after.scripted.damaged = {list(after.scripted.kept)[lost]}
    after.serve(add(1, TOKENS[:40]))
    assert after.cached(1) == 4 * lost and after.text(1) == reference(TOKENS[:40], 4)


def test_a_disk_that_does_not_answer_is_given_up() -> None:
    served = bench()
    served.serve(add(1, TOKENS[:40]))
    served.settle()
    after = restarted(served)
    after.add(add(1, TOKENS[:40]))
    after.step()
    after.scripted.read_one()
    assert after.prefixes.waits() and not after.scheduler.running
    after.now = after.prefixes.next_time()
    after.steps(4)
    assert after.cached(1) == 4, "what had come was of use"
    after.run()
    assert after.text(1) == reference(TOKENS[:40], 4)


def test_a_disk_that_seems_slow_is_tried_again_after_a_while() -> None:
    served = bench()
    served.serve(add(1, TOKENS[:40]))
    served.settle()
    slow, tries = served.scripted, 0
    slow.pace.seconds = 0.001
    while not slow.read_blocks:
        after = restarted(served)
        after.serve(add(1, TOKENS[:40]))
        tries += 1
    assert 3 < tries < 60


def test_a_reset_forgets_what_is_on_disk_and_what_comes_from_there() -> None:
    served = bench()
    served.serve(add(1, TOKENS[:40]))
    served.settle()
    after = restarted(served)
    after.add(add(1, TOKENS[:40]))
    after.step()
    after.scripted.read_one()
    after.scheduler.cache.reset_prefixes()
    after.prefixes.forget_prefixes()
    after.run()
    assert after.cached(1) == 0 and not after.scripted.kept
    assert after.text(1) == reference(TOKENS[:40], 4)


def test_blocks_are_written_slowly_beside_steps_and_at_once_while_nothing_runs() -> None:
    served = bench()
    served.serve(add(1, TOKENS[:40]))
    disk, now = served.scripted, 100.0
    disk.write_seconds = 0.01
    assert served.prefixes.write(now, idle=False)
    disk.finish_write()
    assert not served.prefixes.write(now + 0.4, idle=False)
    assert served.prefixes.write(now + 0.6, idle=False)
    disk.finish_write()
    assert served.prefixes.write(now + 0.6, idle=True)


@given(st.integers(0, 2**32), st.sampled_from([(0,), (0, 8), (0, 5, 9)]), st.sampled_from([None, 3, 9]))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_requests_with_a_disk_that_loses_what_it_likes(
    seed: int, windows: tuple[int, ...], states: int | None
) -> None:
    """Engines end at any moment, also while blocks are written or read, and others find their disk."""
    rnd = random.Random(seed)
    disk = ScriptedDisk(most=3, room=rnd.choice([None, None, 8, 40]))
    tasks = ("generate", "token_embed") if windows == (0,) and states is None else ("generate",)
    limits = facts(
        num_blocks=rnd.choice([24, 40]) * len(windows),
        max_num_seqs=4,
        max_model_len=40,
        windows=windows,
        tasks=tasks,
        remembered_states=states,
        most_embeddings=6,
        kept_embeddings=rnd.choice([0, 6, 20]),
    )
    chosen = config(max_token_gap_ms=0, scheduling_policy=rnd.choice(["fcfs", "priority"]))
    for _ in range(3):
        served = DiskBench(chosen, limits, depth=rnd.choice([0, 1]), scripted=disk)
        requests = {id: random_request(rnd, id, tasks) for id in range(8)}
        todo = list(requests.values())
        ended: set[int] = set()
        for _ in range(rnd.choice([30, 2000])):
            if todo and rnd.random() < 0.5:
                served.add(todo.pop())
            act(rnd, served, ended)
            if not (todo or served.scheduler.live or served.in_flight):
                break
        else:
            continue  # it was killed
        for id, request in requests.items():
            outputs = served.outputs.get((0, id), [])
            if id in ended:
                continue
            if isinstance(request.params, Pooling):
                [only] = outputs
                assert isinstance(only, Pooled) and only.vectors == vectors_of(
                    seen_tokens(request), request.params
                )
                continue
            assert served.text(id) == reference(seen_tokens(request), 4)


def random_request(rnd: random.Random, id: int, tasks: tuple[str, ...]) -> AddRequest:
    """A request, which may have pictures and be pooled if tokens can be."""
    tokens = TOKENS[: rnd.randrange(1, 30)] + [rnd.randrange(1, 4) for _ in range(rnd.randrange(3))]
    pools = "token_embed" in tasks
    media = random_media(rnd, tokens) if pools else ()
    if pools and rnd.random() < 0.3:
        return pool(id, tokens, "token_embed", media=media)
    return add(id, tokens, media=media)


def act(rnd: random.Random, served: DiskBench, ended: set[int]) -> None:
    """Let something happen: steps, the disk's work, losses, aborts and pauses."""
    scheduler, disk = served.scheduler, served.scripted
    live = sorted(scheduler.live)
    if rnd.random() < 0.6:
        disk.read_one()
    if rnd.random() < 0.5:
        served.prefixes.write(served.now, idle=rnd.random() < 0.5)
    if rnd.random() < 0.5:
        disk.finish_write(lose=rnd.random() < 0.2)
    if rnd.random() < 0.1 and disk.kept:
        name = rnd.choice(sorted(disk.kept))
        disk.damaged.add(name) if rnd.random() < 0.5 else disk.kept.pop(name)
    if rnd.random() < 0.1 and disk.states is not None and disk.states.kept:
        disk.states.kept.pop(rnd.choice(sorted(disk.states.kept)))
    if live and rnd.random() < 0.03:
        key = rnd.choice(live)
        ended.add(key[1])
        served.abort(key)
    elif live and rnd.random() < 0.1:
        key = rnd.choice(live)
        seq = scheduler.live[key]
        (scheduler.paused.resume if seq.paused else scheduler.paused.pause)([key])
    if not served.step() and scheduler.paused and rnd.random() < 0.5:
        scheduler.paused.resume([seq.key for seq in scheduler.paused])
