"""Guesses change no answer whose tokens are bound: grammars and budgets of thinking hold as without."""

import random
from collections import Counter

import pytest
from fake_worker import VOCAB, facts
from scheduler_bench import Bench, add, config
from scripted_speculator import ScriptedGuesser, use
from toy_language import Language, ToyMatcher, written_alone

from engine_core.grammar.matcher import ThinkingMatcher, TokenMatcher
from engine_core.protocol import Failed, Thinking, Tokens
from engine_core.scheduling.sequence import Sequence
from worker.worker_facts import WorkerFacts, blocks_held

LONG = Language(shortest=20, width=20)
MARKER = (1, 2, 3)
BEHIND = Language(shortest=6, width=5, wakes=MARKER[-1])


class Dictated(ScriptedGuesser):
    """Guesses these tokens, whatever the sequence."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__(random.Random(0), len(tokens))
        self.tokens = tokens

    def pays(self, seqs: object) -> bool:
        return True

    def guess(self, seq: Sequence, count: int) -> list[int]:
        done = len(seq.tokens) - seq.prompt_len
        return self.tokens[done : done + count]

    def choose(self, seqs, most_rows):
        left = most_rows - len(seqs)
        chosen = {seq: self.guess(seq, min(left, self.most)) for seq in seqs if seq in self.known}
        return {seq: guesses for seq, guesses in chosen.items() if guesses}


def written(
    monkeypatch: pytest.MonkeyPatch,
    tokens: list[int],
    matcher: TokenMatcher | None,
    thinking: Thinking | None = None,
) -> Bench:
    """A bench that has served one request with these guesses, if the worker takes as many."""
    use(monkeypatch, Dictated(tokens))
    bench = Bench(config(steps_ahead=0), facts(most_rows=64))
    bench.add(add(1, [5, 7], max_tokens=24, thinking=thinking, reports_guesses=True), matcher=matcher)
    bench.run()
    return bench


def test_guesses_that_fit_come_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    right = written_alone([5, 7], 24, ToyMatcher(LONG))
    bench = written(monkeypatch, right, ToyMatcher(LONG))
    assert bench.text(1) == right
    assert bench.scheduler.counters.steps == 2


def test_guesses_are_cut_at_the_first_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    right = written_alone([5, 7], 24, ToyMatcher(LONG))
    foreign = next(token for token in range(VOCAB) if token not in LONG.allowed(right[:4]))
    bench = written(monkeypatch, [*right[:4], foreign, *right[5:]], ToyMatcher(LONG))
    assert bench.text(1) == right
    report = bench.last(1).guesses
    assert report is not None and (report.guessed[0], report.held[0]) == (3, 3)


def test_guesses_that_fit_and_are_wrong_leave_the_matcher_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = written_alone([5, 7], 24, ToyMatcher(LONG))
    other = next(token for token in LONG.allowed(right[:2]) if token != right[2])
    text = [*right[:2], other]
    while len(text) < 10:
        text.append(LONG.allowed(text)[0])
    bench = written(monkeypatch, text, ToyMatcher(LONG))
    assert bench.text(1) == right
    report = bench.last(1).guesses
    assert report is not None and (report.guessed[0], report.held[0]) == (9, 1)


@pytest.mark.parametrize("budget", [None, 0, 1, 2, 4, 9])
def test_thinking_ends_within_guesses_and_a_grammar_begins(
    monkeypatch: pytest.MonkeyPatch, budget: int | None
) -> None:
    thinking = Thinking(budget, MARKER, open=True, opens=((4, 4),))
    for language in (BEHIND, None):
        alone = ToyMatcher(language) if language is not None else None
        right = written_alone([5, 7], 24, ThinkingMatcher(thinking, 0, alone))
        matcher = ToyMatcher(language) if language is not None else None
        bench = written(monkeypatch, right, matcher, thinking)
        assert bench.text(1) == right
        assert bench.scheduler.counters.steps == 2
    if budget is not None:
        assert right[budget : budget + 3] == list(MARKER)


@pytest.mark.parametrize("breaks", [3, -3, 5, -5])
def test_a_text_that_cannot_go_on_ends_behind_the_same_token(
    monkeypatch: pytest.MonkeyPatch, breaks: int
) -> None:
    language = Language(shortest=20, breaks=breaks)
    right = written_alone([5, 7], 24, ToyMatcher(Language(shortest=20)))
    found: list[tuple[list[int], Failed]] = []
    for guesses in (right, []):
        *told, last = written(monkeypatch, guesses, ToyMatcher(language)).outputs[0, 1]
        assert isinstance(last, Failed)
        found.append(([token for each in told if isinstance(each, Tokens) for token in each.tokens], last))
    assert found[0] == found[1]
    assert found[0][0] == right[: abs(breaks) - 1]


def random_bench(rnd: random.Random) -> Bench:
    block_size, step = rnd.choice([1, 2, 4, 8]), rnd.choice([3, 8, 64])
    limits: WorkerFacts = facts(
        block_size=block_size,
        num_blocks=blocks_held(45, step, block_size, (0,)) + rnd.choice([0, 2, 20]),
        max_num_seqs=rnd.choice([1, 2, 4, 8]),
        max_num_batched_tokens=step,
        max_model_len=48,
        most_rows=rnd.choice([step, min(step, 8)]),
    )
    return Bench(config(steps_ahead=0, scheduling_policy=rnd.choice(["fcfs", "priority"])), limits)


def random_matcher(rnd: random.Random) -> tuple[Language | None, Thinking | None]:
    """A language, or a budget of thinking, or thinking behind which a text in a language begins."""
    widths = {"width": rnd.choice([1, 2, 4, 20]), "shortest": rnd.randint(1, 12)}
    if rnd.random() < 0.4:
        return Language(wakes=rnd.choice([None, rnd.randrange(VOCAB)]), **widths), None
    language = Language(wakes=MARKER[-1], **widths) if rnd.random() < 0.6 else None
    opens = rnd.choice([(), ((4,),), ((1, 4), (9, 9))]) if language is None else ()
    ends = ((rnd.randrange(9),),) if rnd.random() < 0.5 else ()
    return language, Thinking(rnd.choice([None, *range(8)]), MARKER, rnd.random() < 0.7, opens, ends)


@pytest.mark.parametrize("part", range(4))
def test_random_answers_are_those_without_guesses(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Counter[str]()
    for seed in range(part * 40, (part + 1) * 40):
        rnd = random.Random(seed)
        guesser = ScriptedGuesser(rnd, rnd.choice([1, 3, 8]), rnd.choice([0.3, 0.8, 0.9, 1.0]))
        use(monkeypatch, guesser)
        bench, right = random_bench(rnd), dict[int, list[int]]()
        for id in range(10):
            prompt, most = [rnd.randint(1, 49) for _ in range(rnd.randint(1, 14))], rnd.randint(1, 30)
            language, thinking = random_matcher(rnd)
            made = [None if language is None else ToyMatcher(language) for _ in range(2)]
            alone = made[0] if thinking is None else ThinkingMatcher(thinking, 0, made[0])
            right[id] = written_alone(prompt, most, alone or ToyMatcher(Language(wakes=VOCAB)))
            request = add(id, prompt, most, thinking=thinking, priority=rnd.randint(0, 2))
            bench.add(request, matcher=made[1])
            bench.steps(rnd.randint(0, 3))
        bench.run()
        for id, text in right.items():
            assert bench.text(id) == text, f"request {id} of seed {seed}"
        seen["held"] += sum(guesser.held)
        seen["failed"] += guesser.guessed - sum(guesser.held)
        seen["preemptions"] += bench.scheduler.counters.preemptions
        seen["stops"] += sum(bench.last(id).finish == "stop" for id in right)
    assert min(seen[each] for each in ("held", "failed", "preemptions", "stops")) > 10
