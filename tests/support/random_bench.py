"""Random schedulers and random requests for them."""

import random

from fake_media import picture
from fake_worker import EOS, facts
from msgspec.structs import replace
from scheduler_bench import Bench, add, config, pool

from engine_core.prompt_media import Media
from engine_core.protocol import AddRequest
from worker.worker_facts import WorkerFacts, blocks_held

WINDOWS = ((0, 5), (0, 9, 9), (7,), (4, 20), (0, 0, 3), (0, 2, 6, 17))
"""Groups of layers, of which some read the last positions only."""

LONGEST_ITEM = 5
"""The tokens of the largest picture, of which one is a text between embeddings."""


def random_facts(
    rnd: random.Random, windows: tuple[int, ...], tasks: tuple[str, ...], *, chunked: bool, media: bool
) -> WorkerFacts:
    block_size = rnd.choice([1, 2, 4, 8])
    spare, slots = rnd.choice([0, 2, 20]), rnd.choice([1, 2, 4, 8])
    step = rnd.choice([3, 8, 64]) if chunked else 64
    most = rnd.choice([LONGEST_ITEM, LONGEST_ITEM + 2, 3 * LONGEST_ITEM]) if chunked else 64
    return facts(
        block_size=block_size,
        num_blocks=blocks_held(45, step, block_size, windows) + spare,
        max_num_seqs=slots,
        max_num_batched_tokens=step,
        max_model_len=48,
        tasks=tasks,
        remembered_states=rnd.choice([None, None, 0, 1, 2, 5, 40]),
        windows=windows,
        most_embeddings=most * media,
        whole_media=media and step >= LONGEST_ITEM and rnd.random() < 0.4,
    )


def random_media(rnd: random.Random, tokens: list[int]) -> tuple[Media, ...]:
    """Some of few pictures among these tokens. The same one always takes as many."""
    media: list[Media] = []
    at = rnd.choice([0, 0, 1, 5])
    while len(media) < 3:
        name = rnd.randrange(6)
        length = 1 + name % 3 * 2
        if at + length > len(tokens):
            break
        runs = ((0, 2), (3, 2)) if length == LONGEST_ITEM else None
        media.append(picture(b"%d" % name, at, length, runs))
        at += length + rnd.choice([0, 0, 1, 4])
    return tuple(media)


def bench_of(
    rnd: random.Random, windows: tuple[int, ...], tasks: tuple[str, ...], *, media: bool, guesses: bool
) -> Bench:
    chunked = rnd.random() < 0.8
    limits = random_facts(rnd, windows, tasks, chunked=chunked, media=media)
    if guesses:
        limits = replace(limits, most_rows=min(limits.max_num_batched_tokens, rnd.choice([8, 64, 64])))
    chosen = config(
        enable_prefix_caching=rnd.random() < 0.8,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rnd.choice([0, 0, 2, 5]),
        scheduling_policy=rnd.choice(["fcfs", "priority"]),
        pipeline_parallel_size=rnd.choice([1, 1, 1, 2, 3, 4]),
        steps_ahead=rnd.choice([0, 1, 1, 2]),
        max_num_encoder_input_tokens=rnd.choice([None, 1, 6]) if media else None,
        max_token_gap_ms=rnd.choice([0.0, 10.0]),
        disable_chunked_mm_input=media and limits.max_num_batched_tokens > 5 and rnd.random() < 0.2,
    )
    return Bench(chosen, limits, depth=chosen.depth - 1)


def random_bench(
    rnd: random.Random, windows: tuple[int, ...], *, media: bool = False, guesses: bool = False
) -> tuple[Bench, list[tuple[int, AddRequest]]]:
    """A configuration, and requests that share prefixes, salts, pictures and a tiny alphabet.

    Some requests go on behind tokens that another engine has written. `guesses`: whether steps verify some.
    """
    tasks = ["embed", "token_embed"] if windows == (0,) else ["embed"]
    bench = bench_of(rnd, windows, ("generate", *tasks), media=media, guesses=guesses)
    top = rnd.choice([2, 49])  # a tiny alphabet makes equal blocks after different prefixes common
    shared = [rnd.randint(1, top) for _ in range(16)]
    owners = rnd.choice([[""], ["a", "b"], ["a", "a", "a", "b"], ["", "a", "b", "c"]])
    requests = []
    for id in range(14):
        own = [rnd.randint(1, top) for _ in range(rnd.randint(1, 14))]
        max_tokens = rnd.choice([rnd.randint(1, 12), 100])
        tokens = shared[: rnd.randint(0, 16)] + own
        priority, salt = rnd.randint(0, 2), rnd.choice(["", "", "a"])
        items = random_media(rnd, tokens) if media and rnd.random() < 0.8 else ()
        owned = {"media": items, "owner": rnd.choice(owners), "weight": rnd.choice([1.0, 1.0, 0.3, 4.0])}
        owned["shared"] = rnd.choice([(), (min(5, len(tokens)), len(tokens)), (min(14, len(tokens)),)])
        if rnd.random() < 0.3:
            task = rnd.choice(tasks)
            text = pool(id, tokens, task, priority=priority, salt=salt, **owned)
            requests.append((rnd.randint(0, 1), text))
            continue
        if len(tokens) + max_tokens > 45:
            max_tokens = 45 - len(tokens)
        done = rnd.randint(1, len(tokens) - 1) if len(tokens) > 1 and not items and rnd.random() < 0.2 else 0
        request = add(
            id,
            tokens,
            max_tokens + done,
            prompt_len=len(tokens) - done if done else 0,
            streams=rnd.random() < 0.5,
            reports_guesses=rnd.random() < 0.5,
            priority=priority,
            salt=salt,
            min_tokens=min(max_tokens, rnd.choice([0, 0, 5])),
            stop_token_ids=rnd.choice([(), (EOS,), tuple(range(5))]),
            prompt_logprobs=None if done else rnd.choice([None, None, 0]),
            **owned,
        )
        requests.append((rnd.randint(0, 1), request))
    return bench, requests
