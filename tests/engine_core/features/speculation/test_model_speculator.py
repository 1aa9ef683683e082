"""How many guesses a drafter makes, and what becomes of them."""

from random import Random

from fake_worker import VOCAB, facts, reference
from msgspec.structs import replace
from replayed_texts import sequence
from scheduler_bench import Bench, add, config

from engine_core.features.speculation.model_speculator import ModelSpeculator
from engine_core.options.speculation_options import SpeculationOptions
from engine_core.scheduling.step_time_model import StepTime
from worker.worker_facts import blocks_held


def guesser(most: int = 8, step: float = 0.01, row: float = 0.0, each: float = 0.0) -> ModelSpeculator:
    """A guesser that has learned what a step and a row take, and a guess for up to 8 sequences."""
    line = StepTime([(1, step), (16, step + 16 * row)])
    made = ModelSpeculator(
        SpeculationOptions(method="draft_model", most=most), replace(facts(most_rows=64), drafts=64), line
    )
    for rows in (1, 2, 4, 8, 16, 32, 64) * 20:
        line.learn([1.0, rows, 0.0, rows, 0.0], step + rows * row, fills=False)
    for count in (1, 2, 4, 8):
        made.learn_proposing([1] * count, each)
    return made


def learn(made: ModelSpeculator, rate: float, drafts: int = 200) -> None:
    """Let so many of its guesses hold, in drafts of four."""
    random = Random(1)
    for _ in range(drafts):
        held = next((at for at in range(4) if random.random() > rate), 4)
        made.landed(sequence(99, [1, 2]), 4, held)


def length(made: ModelSpeculator, count: int = 1) -> int:
    seqs = [sequence(id, [1, 2, 3]) for id in range(count)]
    for seq in seqs:
        made.enter(seq)
    lengths = made.lengths(seqs)
    assert made.pays(seqs) == bool(lengths)
    return max(lengths.values(), default=0)


def test_a_quick_drafter_guesses_more_than_a_slow_one() -> None:
    found = []
    for each in (0.0002, 0.002, 0.006, 0.03):
        made = guesser(each=each)
        learn(made, 0.8)
        found.append(length(made))
    assert found == sorted(found, reverse=True)
    assert found[0] >= 6 and 1 <= found[2] <= 2 and found[3] == 0


def test_guesses_that_do_not_hold_are_not_made_but_tried_again() -> None:
    made = guesser(each=0.002)
    learn(made, 0.05)
    seq = sequence(1, [1, 2, 3])
    made.enter(seq)
    tried = []
    for _ in range(250):
        made.follow(seq, 1)
        tried.append(len(made.lengths([seq])) and made.lengths([seq])[seq])
    assert sum(map(bool, tried)) == 2 and max(tried) == 1, "of two, the second would surely not hold"
    learn(made, 0.9, 600)
    made.follow(seq, 1)
    assert made.lengths([seq])[seq] >= 3


def test_where_rows_take_time_many_sequences_get_none() -> None:
    made = guesser(step=0.001, row=0.001, each=0.0002)
    learn(made, 0.7)
    assert length(made, 1) > 0
    assert length(made, 16) == 0


def test_bounds_of_the_request_and_the_operator_are_kept() -> None:
    made = guesser(most=3)
    free, none, two = (sequence(id, [1, 2, 3], most_guesses=most) for id, most in enumerate((None, 0, 2)))
    for seq in (free, none, two):
        made.enter(seq)
    assert made.lengths([free, none, two]) == {free: 3, two: 2}
    made.offer(none, [1])
    made.offer(free, [4, 5, 6])
    made.offer(two, [7, 8])
    assert made.choose([free, none, two], 64) == {free: [4, 5, 6], two: [7, 8]}
    assert made.choose([free, none, two], 6) == {free: [4], two: [7]}
    made.follow(free, 1)
    assert made.choose([free, two], 64) == {two: [7, 8]}
    made.leave(two)
    assert made.choose([free, two], 64) == {}


def bench(steps_ahead: int = 1, **limits: object) -> Bench:
    asked = {"method": "draft_model", "model": "x"}
    fake = replace(facts(most_rows=64, **limits), drafts=64)  # pyright: ignore[reportArgumentType]
    return Bench(config(speculative_config=asked, steps_ahead=steps_ahead), fake, steps_ahead)


def test_a_draft_is_verified_by_the_next_step() -> None:
    served = bench(steps_ahead=0)
    served.add(add(1, [5, 7], max_tokens=30, reports_guesses=True))
    rows = served.all_rows()
    assert served.text(1) == reference([5, 7], 30)
    assert rows[:2] == [[2], [1]] and 4 <= rows[2][0] < rows[-2][0] and len(rows) < 10
    report = served.last(1).guesses
    assert report is not None and report.guessed == report.held


def test_random_drafts_change_no_answer() -> None:
    assert sum(guessed_at_random(Random(seed)) for seed in range(60)) > 500


def guessed_at_random(random: Random) -> int:
    """Serve some requests with drafts of which some hold, and return how many tokens were guessed."""
    windows = random.choice(((0,), (0, 5)))
    size = random.choice((1, 2, 4))
    served = bench(
        block_size=size,
        num_blocks=blocks_held(40, 16, size, windows) + random.choice((0, 2, 20)),
        max_num_seqs=random.choice((1, 2, 4)),
        max_num_batched_tokens=16,
        max_model_len=40,
        windows=windows,
    )

    def draft(tokens: list[int], count: int) -> list[int]:
        right = reference(tokens, count)
        return [each if random.random() < 0.7 else random.randrange(VOCAB) for each in right]

    served.worker.drafter = draft  # pyright: ignore[reportAttributeAccessIssue]
    asked = [(id, [random.randint(1, 40) for _ in range(random.randint(1, 12))]) for id in range(6)]
    for id, prompt in asked:
        served.add(add(id, prompt, max_tokens=random.randint(1, 28)))
        served.steps(random.randint(0, 5))
    served.run()
    for id, prompt in asked:
        text = served.text(id)
        assert text == reference(prompt, len(text))
    guesses = served.scheduler.stats(0.0).guesses
    assert served.scheduler.cache.pool.free == served.facts.num_blocks
    return guesses.guessed if guesses else 0
