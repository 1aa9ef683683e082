"""Everything that can go wrong, at once: each request has one last answer, and it is the right one."""

import random
from collections import Counter
from pathlib import Path

import pytest
from fake_worker import EOS, facts, reference, vectors_of
from fault_world import FAILS, KILLS, World
from scripted_guesser import ScriptedGuesser, use

from engine_core.client.in_flight import is_terminal
from engine_core.protocol import Add, Failed, Pooled, Tokens
from engine_core.reason_codes import DEADLINE, QUARANTINED
from worker.protocol import Pooling, Sampling

REQUESTS = 24


def random_world(model: Path, rnd: random.Random, *, guesses: bool) -> World:
    limits = facts(
        num_blocks=rnd.choice([12, 16, 64]),
        max_num_seqs=rnd.choice([2, 4, 8]),
        max_model_len=40,
        most_rows=64 * guesses,
    )
    return World(
        model,
        rnd,
        limits,
        replicas=rnd.choice([1, 1, 2, 3]),
        steps_ahead=rnd.choice([0, 1, 2]),
        enable_prefix_caching=rnd.random() < 0.7,
        scheduling_policy=rnd.choice(["fcfs", "priority"]),
        max_token_gap_ms=rnd.choice([0.0, 1.0]),
    )


def random_request(rnd: random.Random, id: int) -> Add:
    first = FAILS if (bad := rnd.random()) < 0.06 else KILLS if bad < 0.09 else rnd.randint(1, 3)
    # A convicted prompt is refused from then on, so no two of them are equal.
    prompt = [first, id + 1, *(rnd.randint(1, 3) for _ in range(rnd.randint(0, 14)))]
    params = (
        Pooling(task=rnd.choice(["embed", "token_embed"]))
        if rnd.random() < 0.2
        else Sampling(max_tokens=rnd.randint(1, 20), stop_token_ids=rnd.choice([(), (EOS, 7)]))
    )
    return Add(
        id,
        prompt,
        params,
        rnd.randint(0, 2),
        owner=rnd.choice("abc"),
        weight=rnd.choice([1.0, 3.0]),
        max_running=rnd.choice([0, 0, 1, 3]),
        wait=rnd.choice([0.0] * 6 + [0.05, 0.3]),
        budget=rnd.choice([0.0] * 6 + [0.1, 0.5]),
        streams=rnd.random() < 0.7,
    )


def misfortune(world: World, rnd: random.Random, aborted: set[int]) -> None:
    """Let something happen that nobody wants."""
    kind = rnd.choice(["kill", "leave", "start", "abort", "pause", "go"])
    numbers = list(world.processes)
    ids = world.open_ids()
    if kind == "kill" and numbers and not world.runs_alone(number := rnd.choice(numbers)):
        world.kill(number)
    elif kind == "leave" and numbers and world.others_stay(number := rnd.choice(numbers)):
        world.leave(number)
    elif kind == "start" and (gone := set(range(world.table.layout.size)) - set(numbers)):
        world.start(min(gone))
    elif kind == "abort" and ids:
        aborted.add(rnd.choice(ids))
        world.dispatcher.abort(aborted)
    elif kind in ("pause", "go") and ids:
        world.dispatcher.pause(rnd.sample(ids, min(3, len(ids))), paused=kind == "pause")
    else:
        return
    world.seen[kind] += 1


@pytest.mark.parametrize("part", range(4))
async def test_whatever_happens_every_answer_is_right(
    model: Path, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Counter[str]()
    for seed in range(part * 25, (part + 1) * 25):
        rnd = random.Random(seed)
        use(monkeypatch, guesser := ScriptedGuesser(random.Random(seed)))
        world = random_world(model, rnd, guesses=seed % 2 > 0)
        monkeypatch.setattr("engine_core.engine.time", world)
        adds = [random_request(rnd, id) for id in range(REQUESTS)]
        aborted: set[int] = set()
        for add in adds:
            world.submit(add, pools=isinstance(add.params, Pooling))
            for _ in range(rnd.randint(1, 12)):
                if rnd.random() < 0.1:
                    misfortune(world, rnd, aborted)
                elif world.processes:
                    act = rnd.choice([world.read, world.step, world.step, world.hear])
                    act(rnd.choice(list(world.processes)))
        world.dispatcher.pause(world.open_ids(), paused=False)
        world.finish()
        seen["late"] += sum(is_late(stream.outputs[-1]) for stream in world.streams.values())
        for add in adds:
            check(add, world.streams[add.id].outputs, add.id in aborted, f"seed {seed}, request {add.id}")
        for process in world.processes.values():
            stats = process.engine.stats()
            assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
            seen["preemptions"] += stats.preemptions
        assert not len(world.dispatcher)
        seen += world.seen
        seen["held guesses"] += sum(guesser.held)
    kinds = ("kill", "killed itself", "leave", "start", "abort", "pause", "go", "preemptions", "late")
    kinds += ("held guesses",)
    assert all(seen[kind] > 5 for kind in kinds), f"too little happened: {seen}"


def is_late(output: Tokens | Pooled | Failed) -> bool:
    return isinstance(output, Failed) and output.error == DEADLINE


def check(add: Add, outputs: list[Tokens | Pooled | Failed], aborted: bool, name: str) -> None:
    assert sum(map(is_terminal, outputs)) == 1 and is_terminal(outputs[-1]), name
    last = outputs[-1]
    text = [token for output in outputs if isinstance(output, Tokens) for token in output.tokens]
    guilty = add.tokens[0] in (FAILS, KILLS)
    late = is_late(last)
    assert not late or add.wait or add.budget, name
    if isinstance(last, Failed) and not late:
        convicted = (last.code, last.error) == (500, QUARANTINED)
        assert convicted == guilty or (aborted and isinstance(add.params, Pooling)), f"{name}: {last}"
    if isinstance(last, Pooled):
        assert isinstance(add.params, Pooling) and last.vectors == vectors_of(add.tokens, add.params), name
    elif isinstance(add.params, Sampling):
        whole = reference(add.tokens, add.params.max_tokens, add.params.stop_token_ids)
        ended_whole = isinstance(last, Tokens) and last.finish in ("stop", "length")
        assert text == (whole if ended_whole else whole[: len(text)]), name
        assert ended_whole or aborted or guilty or late, f"{name}: {last}"
    assert not guilty or aborted or isinstance(last, Failed), f"{name}: it was not found out"
