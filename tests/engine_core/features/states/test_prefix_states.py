"""States of a hybrid are remembered where prompts go on, and prompts that begin alike find them."""

from __future__ import annotations

from fake_worker import facts, reference
from scheduler_bench import Bench, add, config, pool

from engine_core.features.states.prefix_states import PrefixStates

TURN = 7
"""The token that ends a turn, and an answer."""
SYSTEM = [*range(10, 20), TURN]
QUESTION = [*range(20, 27), TURN]


def bench(places: int = 20, **limits: int) -> Bench:
    sizes = {"block_size": 4, "max_num_seqs": 4, "num_blocks": 200, "max_model_len": 128, **limits}
    return Bench(config(), facts(remembered_states=places, **sizes), depth=1)


def serve(made: Bench, id: int, tokens: list[int], max_tokens: int = 1) -> int:
    """Serve a request, whose answer must be right; returns how many tokens of its prompt were cached."""
    made.serve(add(id, tokens, max_tokens, stop_token_ids=(TURN,)))
    assert made.text(id) == reference(tokens, max_tokens, (TURN,))
    return made.outputs[0, id][0].cached


def test_another_question_finds_the_system_prompt() -> None:
    made = bench()
    assert serve(made, 1, [*SYSTEM, *QUESTION, 30, 31]) == 0
    assert serve(made, 2, [*SYSTEM, 40, 41, 42, 43, 44, 45]) == 8  # whole blocks of SYSTEM


def test_the_next_turn_finds_the_prompt_and_its_answer() -> None:
    made = bench()
    prompt = [*SYSTEM, *QUESTION, 30]
    serve(made, 1, prompt, max_tokens=10)
    answer = made.text(1)
    known = len(prompt) + len(answer) - 1  # the last token was sampled, and never computed
    assert serve(made, 2, [*prompt, *answer, *QUESTION]) == known // 4 * 4


def test_the_third_prompt_that_parts_at_a_place_finds_it() -> None:
    made = bench()
    shared = list(range(10, 30))
    assert serve(made, 1, [*shared, 30, 31, 32, 33, 34, 35]) == 0
    assert serve(made, 2, [*shared, 40, 41, 42]) == 0
    assert serve(made, 3, [*shared, 45, 46]) == 20


def test_texts_to_be_pooled_share_what_they_have_in_common() -> None:
    made = bench()
    query = list(range(10, 22))
    cached = []
    for id in (1, 2, 3):
        made.serve(pool(id, [*query, 30 + id, 40, 41], "embed"))
        cached.append(made.pooled(id).cached)
    assert cached == [0, 0, 12]


def test_the_least_recently_used_state_gives_way() -> None:
    made = bench(places=2)
    first, second, third = ([base, *range(21, 29)] for base in (10, 11, 12))
    serve(made, 1, first)
    serve(made, 2, second)
    assert serve(made, 3, [*first, 40]) == 8
    serve(made, 4, third)
    assert serve(made, 5, [*first, 41]) == 8
    assert serve(made, 6, [*second, 41]) == 0


def test_an_answer_keeps_its_newest_state_only() -> None:
    made = bench()
    serve(made, 1, [10, 11, 12, 13, 14], max_tokens=30)
    states = made.find(PrefixStates).pool
    assert len(states) == 2  # behind the prompt's block, and behind the answer


def test_without_places_nothing_is_cached() -> None:
    made = bench(places=0)
    for id in (1, 2, 3):
        assert serve(made, id, [*SYSTEM, *QUESTION]) == 0


def test_a_reset_forgets_states() -> None:
    made = bench()
    serve(made, 1, [*SYSTEM, *QUESTION, 30, 31])
    made.scheduler.cache.reset_prefixes()
    assert serve(made, 2, [*SYSTEM, 40, 41]) == 0
    states = made.find(PrefixStates).pool
    assert len(states) + states.free == 20
