"""Every option of `Sampling` against a plain numpy oracle that treats one row at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampled import plan_rows
from untimed import untimed

from worker.devices.cpu import Cpu
from worker.protocol import LogprobsMode, Sampling
from worker.sampling import sampler
from worker.sampling.grouped_logits import BY_TORCH, GroupedLogits
from worker.sampling.logprobs import unpack_logprobs
from worker.sampling.sampler import SampledTokens, SamplingPlan
from worker.sampling.top_k_top_p import FullMass, LazyMass, draw_fully, draw_lazily
from worker.tables.random_bits import mix, uniform
from worker.tables.slots import Slots


@dataclass
class Row:
    params: Sampling
    logits: np.ndarray  # [V]
    prompt: list[int]
    output: list[int]


@dataclass
class Step:
    """Some rows as the runner brings them to the sampler; their tokens are on the device only."""

    slots: Slots
    plan: SamplingPlan
    logits: torch.Tensor

    @classmethod
    def of(cls, rows: list[Row], first_slot: int = 0) -> Step:
        texts = [(row.params, row.prompt + row.output, len(row.prompt)) for row in rows]
        slots, plan = plan_rows(texts, len(rows[0].logits), first_slot=first_slot)
        logits = np.stack([row.logits for row in rows]).astype(np.float32)
        return cls(slots, plan, torch.from_numpy(logits))


def sample(rows: list[Row], *, may_sync: bool = True, first_slot: int = 0) -> SampledTokens:
    """Sample as the CPU does, which may read results within a step, or as a GPU does."""
    step = Step.of(rows, first_slot)
    scan = Cpu(1).scan if may_sync else BY_TORCH
    with torch.inference_mode():
        draw = draw_lazily if may_sync else draw_fully
        return sampler.sample(step.logits, step.plan, step.slots.tokens, scan, draw=draw)


def masked(row: Row) -> np.ndarray:
    """The logits after masks, bias and penalties, as `Sampling` orders them."""
    params = row.params
    x = row.logits.astype(np.float64).copy()
    if params.allowed_token_ids:
        keep = np.full(len(x), -np.inf)
        keep[list(params.allowed_token_ids)] = 0
        x = x + keep
    fallback = int(x.argmax())
    for word in params.bad_words:
        before = list(word[:-1])
        if len(before) <= len(row.output) and row.output[len(row.output) - len(before) :] == before:
            x[word[-1]] = -np.inf
    if len(row.output) < params.min_tokens:
        x[list(params.stop_token_ids)] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if (x == -np.inf).all():
        x[fallback] = 0
    for token in set(row.prompt + row.output):
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token in set(row.output):
        x[token] -= params.frequency_penalty * row.output.count(token) + params.presence_penalty
    return x


def kept(row: Row) -> np.ndarray:
    """Probabilities after temperature, min_p, top_k and top_p; zero for tokens that they refuse."""
    params = row.params
    x = masked(row) / params.temperature
    p = np.exp(x - x.max())
    p = np.where(p >= params.min_p, p, 0)
    if params.top_k:
        p = np.where(p >= np.sort(p)[::-1][min(params.top_k, len(p)) - 1], p, 0)
    if params.top_p < 1:
        falling = np.sort(p)[::-1]
        reached = np.searchsorted(np.cumsum(falling), params.top_p * p.sum())
        p = np.where(p >= falling[min(reached, len(p) - 1)], p, 0)
    return p / p.sum()


def drawn(row: Row) -> tuple[int, float]:
    """The oracle's token, and how far the point lies from the nearest border between two tokens."""
    seed = np.array([row.params.seed & (2**64 - 1)], np.uint64)
    point = (float(uniform(seed, np.array([len(row.output)]))[0]) + 0.5) / 2**31
    borders = np.cumsum(kept(row))
    return int(np.searchsorted(borders, point, side="right")), float(np.abs(borders - point).min())


def alike(logits: np.ndarray, *params: Sampling) -> list[Row]:
    """Rows with the same logits and no output."""
    return [Row(each, logits, [0], []) for each in params]


def random_row(rng: np.random.Generator, params: Sampling, vocab: int = 50) -> Row:
    tokens = rng.integers(0, vocab, size=int(rng.integers(1, 20))).tolist()
    prompt_len = int(rng.integers(1, len(tokens) + 1))
    return Row(params, rng.normal(0, 3, vocab), tokens[:prompt_len], tokens[prompt_len:])


tokens = st.integers(0, 49)
edits = st.builds(
    Sampling,
    max_tokens=st.just(100),
    temperature=st.just(0.0),
    presence_penalty=st.sampled_from([0.0, -1.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.3]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    min_tokens=st.integers(0, 20),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=4),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    allowed_token_ids=st.lists(tokens, max_size=8, unique=True).map(tuple),
)
filters = st.builds(
    Sampling,
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.3, 1.0, 1.8]),
    top_p=st.sampled_from([1.0, 0.05, 0.5, 0.9, 0.999]),
    top_k=st.sampled_from([0, 1, 2, 7, 49, 50, 1000]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@untimed(40)
@given(many=st.lists(edits, min_size=1, max_size=6), seed=st.integers(0, 2**32))
def test_masks_and_penalties_equal_the_oracle(many: list[Sampling], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, each) for each in many]
    step = Step.of(rows)
    if step.plan.masks is not None:
        step.plan.masks.apply(step.logits, step.slots.tokens)
    for penalties in step.plan.penalties:
        penalties.apply(step.logits, step.slots.tokens)
    for row, logits in zip(rows, step.logits.numpy(), strict=True):
        expected = masked(row)
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        assert expected[int(sample([row]).tokens[0])] == pytest.approx(expected.max(), abs=1e-4)


@untimed(40)
@given(many=st.lists(filters, min_size=1, max_size=40), seed=st.integers(0, 2**32), may_sync=st.booleans())
def test_draws_equal_the_oracle(many: list[Sampling], seed: int, may_sync: bool) -> None:
    rng = np.random.default_rng(seed)
    rows = [random_row(rng, each) for each in many]
    sampled = sample(rows, may_sync=may_sync)
    assert sampled.finite.all()
    for row, token in zip(rows, sampled.tokens.tolist(), strict=True):
        expected, margin = drawn(row)
        if margin > 1e-5:  # else rounding may put the point on either side of a border
            assert token == expected


def test_long_texts_are_penalised_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.sampling.penalties.MOST_TOKENS", 40)  # two rows of up to 20 tokens
    rng = np.random.default_rng(2)
    params = Sampling(max_tokens=9, temperature=0, repetition_penalty=1.5, presence_penalty=1.0)
    rows = [random_row(rng, params) for _ in range(5)]
    step = Step.of(rows)
    assert len(step.plan.penalties) > 1
    for penalties in step.plan.penalties:
        penalties.apply(step.logits, step.slots.tokens)
    np.testing.assert_allclose(step.logits, np.stack([masked(row) for row in rows]), atol=1e-4)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000, 5000])
@pytest.mark.parametrize("may_sync", [True, False])
@pytest.mark.parametrize("top_k", [0, 300])
def test_filters_beyond_the_shortlist(vocab: int, may_sync: bool, top_k: int) -> None:
    """The distributions are flat: top_p, or top_k, needs more tokens than any shortlist has."""
    rng = np.random.default_rng(vocab)
    rows = [
        Row(Sampling(max_tokens=1, top_p=p, top_k=top_k, seed=seed), rng.normal(0, 0.1, vocab), [0], [])
        for seed, p in enumerate([0.001, 0.1, 0.5, 0.9, 1.0, 0.99] * 4)
    ]
    sampled = sample(rows, may_sync=may_sync)
    for row, token in zip(rows, sampled.tokens.tolist(), strict=True):
        expected, margin = drawn(row)
        if margin > 1e-7:
            assert token == expected


def test_tokens_that_tie_with_the_last_one_are_kept() -> None:
    logits = np.array([1.0, 3.0, 3.0, 3.0, 0.0])
    for top_p, top_k, min_p in ((1.0, 1, 0.0), (1.0, 2, 0.0), (0.01, 0, 0.0), (0.9, 2, 0.0), (1.0, 0, 1.0)):
        given = {"max_tokens": 1, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        rows = alike(logits, *(Sampling(**given, seed=seed) for seed in range(100)))
        assert set(sample(rows).tokens.tolist()) == {1, 2, 3}


def test_ties_are_kept_wherever_they_stand() -> None:
    """There are more ties than any shortlist has, in every part of the vocabulary."""
    logits = np.zeros(20_000)
    tied = np.arange(3, 20_000, 50)  # 400 tokens
    logits[tied] = 9.0
    for top_p, top_k in ((1.0, 1), (0.2, 5), (0.001, 0)):
        params = (Sampling(max_tokens=1, seed=seed, top_p=top_p, top_k=top_k) for seed in range(2000))
        tokens = set(sample(alike(logits, *params)).tokens.tolist())
        assert tokens <= set(tied.tolist())
        assert len(tokens) > 380


@pytest.mark.parametrize("vocab", [1, 64, 1000, 4097])
def test_masses_are_the_same_however_many_are_computed(vocab: int) -> None:
    logits = GroupedLogits(torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)), Cpu(1).scan)
    rows, temperature = torch.tensor([3, 0, 4]), torch.tensor([[0.7], [1.0], [1.9]])
    lazy, full = LazyMass(logits, rows, temperature), FullMass(logits, rows, temperature)
    for count in (1, 64, 5000):
        top = full.largest(count)
        assert top.shape == (3, min(count, logits.logits.shape[1]))
        assert torch.equal(lazy.largest(count), top)
        floor = top[:, -1:]
        torch.testing.assert_close(lazy.sums(floor), full.sums(floor))
    torch.testing.assert_close(lazy.sums(None), full.sums(None))
    last = torch.full((3, 1), logits.largest.shape[1] - 1)
    assert torch.equal(lazy.group(last), full.group(last))


def test_seed_and_index_both_move_the_draw() -> None:
    logits = np.zeros(100_000)
    rows = [Row(Sampling(max_tokens=9, seed=s), logits, [0], [0] * n) for s in (1, 2) for n in (0, 1)]
    assert len(set(sample(rows).tokens.tolist())) == 4


def test_uniform_is_splitmix64() -> None:
    """The first output of the published generator for seed 1234567, whose state is not mixed before."""
    first = mix(np.array([1234567], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    assert int(first[0]) == 6457827717110365317
    points = uniform(np.arange(1000, dtype=np.uint64), np.zeros(1000, np.int64))
    assert points.min() >= 0
    assert points.max() < 2**31
    assert abs(points.mean() / 2**31 - 0.5) < 0.03


def test_wide_vocabulary_reaches_its_far_end() -> None:
    vocab = 151_936
    logits = np.full(vocab, -20.0)
    logits[vocab - 1] = 0.0
    tokens = sample([Row(Sampling(max_tokens=1, seed=s), logits, [0], []) for s in range(20)]).tokens
    assert tokens.tolist() == [vocab - 1] * 20


def test_token_after_a_bad_prefix_is_free_again() -> None:
    logits = np.array([0.0, 5.0, 1.0])
    bad = Sampling(max_tokens=9, temperature=0, bad_words=((2, 0, 1),))
    rows = [
        Row(bad, logits, [0], [2, 0]),
        Row(bad, logits, [0], [0, 2]),
        Row(bad, logits, [2, 0], []),  # the prompt does not count
        Row(bad, logits, [2], [0]),
    ]
    assert sample(rows).tokens.tolist() == [2, 1, 1, 1]


def test_everything_forbidden_takes_the_likeliest_allowed() -> None:
    logits = np.array([9.0, 1.0, 2.0, 3.0])
    greedy = Sampling(max_tokens=1, temperature=0, allowed_token_ids=(1, 2), bad_words=((1,), (2,)))
    random = Sampling(max_tokens=1, allowed_token_ids=(1, 2), bad_words=((1,), (2,)), top_p=0.5)
    stops = Sampling(max_tokens=9, min_tokens=3, stop_token_ids=(0, 1, 2, 3))
    never = Sampling(max_tokens=1, temperature=0, allowed_token_ids=(1, 2), suppressed=(1, 2))
    sampled = sample(alike(logits, greedy, random, stops, never))
    assert sampled.tokens.tolist() == [2, 2, 0, 2]
    assert sampled.finite.all()


def test_ids_outside_the_vocabulary_touch_no_other_row() -> None:
    logits = np.array([1.0, 2.0, 3.0])
    odd = Sampling(
        max_tokens=9,
        temperature=0,
        min_tokens=5,
        stop_token_ids=(5, 3),
        logit_bias={4: 50.0},
        bad_words=((5,),),
        allowed_token_ids=(0, 1, 5),
    )
    greedy = Sampling(max_tokens=1, temperature=0)
    assert sample([Row(odd, logits, [0], []), Row(greedy, logits, [0], [])]).tokens.tolist() == [1, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_rows_are_reported_and_alone(bad: float) -> None:
    rng = np.random.default_rng(0)
    shapes = [
        Sampling(max_tokens=1, temperature=0),
        Sampling(max_tokens=1, top_p=0.9, repetition_penalty=1.2),
    ]
    good = [random_row(rng, each) for each in shapes]
    broken = [random_row(rng, each) for each in shapes]
    for row in broken:
        row.logits[13] = bad
    hopeless = Row(shapes[0], np.full(50, -np.inf), [0], [])
    sampled = sample([good[0], broken[0], hopeless, broken[1], good[1]])
    assert sampled.finite.tolist() == [True, False, False, False, True]
    alone = sample(good).tokens
    assert sampled.tokens[[0, 4]].tolist() == alone.tolist()
    assert ((sampled.tokens >= 0) & (sampled.tokens < 50)).all()


def test_logprobs_are_of_the_raw_logits() -> None:
    rng = np.random.default_rng(1)
    rows = [
        random_row(rng, Sampling(max_tokens=1, temperature=0, logit_bias={3: 100.0}, logprobs=2)),
        random_row(rng, Sampling(max_tokens=1, temperature=0)),
        random_row(rng, Sampling(max_tokens=1, temperature=2.0, seed=3, logprobs=0)),
        random_row(rng, Sampling(max_tokens=1, temperature=0, allowed_token_ids=(9,), logprobs=-1)),
        random_row(rng, Sampling(max_tokens=1, temperature=0, logprobs=2)),
    ]
    sampled = sample(rows)
    by_row = {}
    for members, table in zip([[0, 4], [2], [3]], sampled.logprobs, strict=True):
        by_row.update(zip(members, unpack_logprobs(table.numpy()), strict=True))
    for index, entry in by_row.items():
        x = rows[index].logits
        raw = x - np.log(np.exp(x - x.max()).sum()) - x.max()
        token, top = int(sampled.tokens[index]), rows[index].params.logprobs
        best = np.argsort(-raw)[: None if top == -1 else top]
        assert entry.ids == [token, *best.tolist()]
        assert entry.values == pytest.approx(raw[entry.ids], abs=1e-5)
        assert entry.rank == 1 + int((raw > raw[token]).sum())


@pytest.mark.parametrize("may_sync", [True, False])
@pytest.mark.parametrize("mode", get_args(LogprobsMode))
def test_what_is_told_in_each_mode_equals_the_oracle(mode: LogprobsMode, may_sync: bool) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logit_bias": {3: 9.0}, "repetition_penalty": 1.5},
        {"temperature": 0.7, "top_p": 0.8, "frequency_penalty": 1.0},
        {"temperature": 1.8, "top_p": 0.9, "top_k": 7},
        {"temperature": 0.3, "min_p": 0.1, "allowed_token_ids": (2, 3, 9, 20)},
        {"temperature": 2.0},
    ]
    rng, given = np.random.default_rng(3), {"max_tokens": 9, "logprobs": -1, "logprobs_mode": mode}
    rows = [random_row(rng, Sampling(**given, **kind, seed=seed)) for seed in range(4) for kind in kinds]
    sampled, tables = sample(rows, may_sync=may_sync), 0
    for plan, table in zip(Step.of(rows).plan.logprobs, sampled.logprobs, strict=True):
        for index, entry in zip(plan.rows_host, unpack_logprobs(table.numpy()), strict=True):
            row, tables = rows[index], tables + 1
            expected = masked(row) if mode.startswith("processed") else row.logits
            if mode.startswith("processed") and row.params.temperature:
                expected = np.where(kept(row) > 0, expected / row.params.temperature, -np.inf)
            if mode.endswith("logprobs"):
                expected = expected - np.logaddexp.reduce(expected)
            shown = dict(zip(entry.ids[1:], entry.values[1:], strict=True))
            np.testing.assert_allclose([shown[token] for token in range(50)], expected, atol=1e-4)
            own = shown[int(sampled.tokens[index])]
            assert entry.values[0] == own > -np.inf
            assert entry.rank == 1 + sum(value > own for value in shown.values())
    assert tables == len(rows)
