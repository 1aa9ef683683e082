"""top_n_sigma and typical_p against a plain numpy oracle, and through the sampler."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampled import plan_rows
from untimed import untimed

from worker.devices.cpu import Cpu
from worker.protocol import Sampling
from worker.sampling import sampler
from worker.sampling.filters import Filter
from worker.sampling.top_k_top_p import draw_lazily

LOGITS = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05]))


def kept(logits: np.ndarray, sigmas: float = 0.0, typical_p: float = 1.0) -> set[int]:
    allowed = logits > -math.inf
    if sigmas:
        allowed &= logits >= logits.max() - sigmas * logits[allowed].std()
    if typical_p < 1:
        mass = np.where(allowed, np.exp(logits - logits.max()), 0)
        mass /= mass.sum()
        surprise = np.where(allowed, -np.log(np.where(mass > 0, mass, 1)), math.inf)
        mean = float((mass[allowed] * surprise[allowed]).sum())
        left, found = typical_p, np.zeros(len(logits), bool)
        for token in np.abs(surprise - mean).argsort():
            found[token] = True
            left -= mass[token]
            if left < 0:
                break
        allowed &= found
    return {*np.flatnonzero(allowed).tolist()}


def left(logits: np.ndarray, sigmas: float, typical_p: float) -> set[int]:
    rows = torch.tensor(np.stack([logits] * 2), dtype=torch.float32)
    Filter(1, sigmas, typical_p).apply(rows)
    assert rows[0].tolist() == torch.tensor(logits, dtype=torch.float32).tolist()
    return {*torch.nonzero(rows[1] > -math.inf).flatten().tolist()}


@untimed(80)
@given(
    seed=st.integers(0, 2**32),
    sigmas=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    typical_p=st.sampled_from([1.0, 0.01, 0.2, 0.7, 0.95]),
    masked=st.booleans(),
)
def test_the_tokens_left_are_those_of_the_oracle(
    seed: int, sigmas: float, typical_p: float, masked: bool
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, 60)
    if masked:
        logits[::3] = -math.inf
    assert left(logits, sigmas, typical_p) == kept(logits, sigmas, typical_p)


def test_ties_pass_together() -> None:
    assert left(np.array([2.0, 1.0, 1.0, 1.0, -3.0]), 0.0, 0.01) == {1, 2, 3}


def test_a_row_that_is_no_number_stays_so() -> None:
    rows = torch.full((1, 5), math.nan)
    Filter(0, 1.0, 0.5).apply(rows)
    assert rows.isnan().all()


@pytest.mark.parametrize(
    ("params", "tokens"),
    [({"typical_p": 0.3}, {1, 2}), ({"top_n_sigma": 0.5}, {0}), ({"top_n_sigma": 1.5}, {0, 1})],
)
def test_only_rows_that_ask_draw_from_fewer_tokens(params: dict[str, Any], tokens: set[int]) -> None:
    asks = [Sampling(max_tokens=1, seed=seed, **params) for seed in range(300)]
    others = [Sampling(max_tokens=1, seed=seed) for seed in range(300)]
    slots, plan = plan_rows([(each, [0], 1) for each in [*asks, *others]], 5)
    logits = torch.tensor(np.stack([LOGITS] * 600), dtype=torch.float32)
    with torch.inference_mode():
        found = sampler.sample(logits, plan, slots.tokens, Cpu(1).scan, draw=draw_lazily).tokens.tolist()
    assert {*found[:300]} == tokens
    assert {*found[300:]} == {0, 1, 2, 3, 4}


def test_greedy_rows_have_no_filters() -> None:
    params = Sampling(max_tokens=1, temperature=0.0, typical_p=0.1, top_n_sigma=1.0)
    assert plan_rows([(params, [0], 1)], 5)[1].filters == []
