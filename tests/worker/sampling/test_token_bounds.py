"""Bounds that follow a step: their forms, which of them belong to a step, and that they come first."""

from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampled import plan_rows
from toy_language import FORMS, bound_of
from untimed import untimed

from worker.devices.cpu import Cpu
from worker.features.grammar.step_bounds import Bounds
from worker.protocol import Bound, Sampling, StepBounds
from worker.sampling import sampler
from worker.sampling import token_bounds as bounds
from worker.sampling.grouped_logits import BY_TORCH
from worker.sampling.logprobs import unpack_logprobs
from worker.sampling.sampler import SampledTokens
from worker.sampling.token_bounds import RowBits, forbid, row_bits
from worker.sampling.top_k_top_p import draw_fully, draw_lazily

VOCAB = 50


def told(number: int, **rows: Bound | None) -> StepBounds:
    return StepBounds(number, {int(slot[1:]): bound for slot, bound in rows.items()})


def bits_of(bounds: StepBounds, bound: dict[int, list[int]], vocab: int) -> RowBits:
    bits = row_bits(bounds, bound, vocab)
    assert bits is not None
    return bits


@untimed()
@given(allowed=st.sets(st.integers(0, 69)), vocab=st.sampled_from([70, 64, 96]))
def test_all_forms_mean_the_same(allowed: set[int], vocab: int) -> None:
    within = sorted(token for token in allowed if token < vocab)
    found = [bits_of(told(1, s3=bound_of(within, vocab, form)), {3: [7]}, vocab) for form in FORMS]
    for each in found:
        bits = np.unpackbits(each.words.view(np.uint8), bitorder="little")[:vocab]
        assert each.rows.tolist() == [7] and np.flatnonzero(bits).tolist() == within


def test_bits_of_another_length_forbid_what_they_do_not_name() -> None:
    short, long = Bound("bits", b"\xff" * 4), Bound("bits", b"\xff" * 12)
    found = bits_of(told(1, s0=short, s1=long), {0: [0], 1: [1]}, 70)
    assert found.words.tolist() == [[-1, 0, 0], [-1, -1, -1]]
    outside = bits_of(told(1, s0=Bound("allowed", np.array([-1, 3, 70], "<i4").tobytes())), {0: [0]}, 70)
    assert outside.words.tolist() == [[8, 0, 0]]


def test_rows_that_may_sample_anything_are_left_out() -> None:
    assert row_bits(told(1, s4=None, s2=None), {2: [0], 4: [1]}, 40) is None
    found = bits_of(told(1, s4=None, s2=bound_of([1], 40, "bits")), {2: [0], 4: [1]}, 40)
    assert found.rows.tolist() == [0]


@pytest.mark.parametrize("rows", [{}, {"s1": None}, {"s1": None, "s2": None, "s3": None}, {"s3": None}])
def test_bounds_of_other_rows_break_the_step(rows: dict[str, Bound | None]) -> None:
    with pytest.raises(ValueError, match=r"step 5: bounds came for slots \[.*\], and \[1, 2\] are bound"):
        row_bits(told(5, **rows), {1: [0], 2: [1]}, 40)


def test_each_guess_has_bounds_of_its_own() -> None:
    behind = [None, bound_of([5, 33], 40, "allowed"), bound_of([6], 40, "bits")]
    bounds = StepBounds(5, {2: bound_of([4], 40, "bits"), 7: None}, {2: behind})
    found = bits_of(bounds, {7: [0], 2: [1, 2, 3, 4]}, 40)
    assert found.rows.tolist() == [1, 3, 4]
    assert found.words.tolist() == [[1 << 4, 0], [1 << 5, 1 << 1], [1 << 6, 0]]
    for wrong in ({}, {2: behind[:2]}, {2: [*behind, None]}, {2: behind, 7: [None]}, {7: behind}):
        with pytest.raises(ValueError, match=r"step 5: bounds came for .*, and \[2, 2, 2, 2, 7\] are bound"):
            row_bits(StepBounds(5, bounds.rows, wrong), {7: [0], 2: [1, 2, 3, 4]}, 40)


def test_a_step_reads_its_own_bounds_and_no_others() -> None:
    come = deque([told(1), told(3), told(4), told(7), told(9)])
    reader = Bounds(forbid)
    assert reader.bounds_of(3, come.popleft).number == 3, "those of a step that broke are dropped"
    assert reader.bounds_of(4, come.popleft).number == 4
    with pytest.raises(ValueError, match="step 6 got no bounds: those of step 7 came"):
        reader.bounds_of(6, come.popleft)
    assert reader.bounds_of(7, come.popleft).number == 7, "and they are kept for that one"
    with pytest.raises(ValueError, match="step 8 got no bounds"):
        reader.bounds_of(8, come.popleft)
    with pytest.raises(IndexError):
        reader.bounds_of(10, come.popleft)


def sample(
    params: list[Sampling],
    allowed: list[list[int] | None],
    logits: torch.Tensor,
    *,
    outputs: int = 3,
    by_torch: bool = False,
) -> SampledTokens:
    """Sample rows whose texts have so many tokens of output. Rows with None are not bound."""
    device = Cpu(1)
    tokens = [(3 * at) % VOCAB for at in range(5 + outputs)]
    bound = {slot: slot for slot, each in enumerate(allowed) if each is not None}
    slots, plan = plan_rows([(each, tokens, 5) for each in params], VOCAB, bound=bound.values())
    forms = {slot: bound_of(allowed[slot] or [], VOCAB, FORMS[slot % 3]) for slot in bound}
    bits = row_bits(StepBounds(1, dict(forms)), {slot: [slot] for slot in bound}, VOCAB)
    scan, write = (BY_TORCH, bounds.forbid) if by_torch else (device.scan, device.forbid)
    with torch.inference_mode():
        return sampler.sample(
            *(logits.clone(), plan, slots.tokens, scan),
            draw=draw_fully if by_torch else draw_lazily,
            forbid=None if bits is None else lambda x: write(x, bits),
        )


ids = st.integers(0, VOCAB - 1)
options = st.builds(
    Sampling,
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 0.3, 0.9]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**40),
    presence_penalty=st.sampled_from([0.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    min_tokens=st.sampled_from([0, 0, 20]),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100), max_size=3),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=1).map(tuple), max_size=8).map(tuple),
    allowed_token_ids=st.lists(ids, max_size=8, unique=True).map(tuple),
    logprobs=st.sampled_from([None, None, 3]),
)


@untimed(50)
@given(
    rows=st.lists(
        st.tuples(options, st.one_of(st.none(), st.lists(ids, min_size=1, max_size=6, unique=True))),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 2**32 - 1),
    by_torch=st.booleans(),
)
def test_bounds_hold_with_every_option(
    rows: list[tuple[Sampling, list[int] | None]], seed: int, by_torch: bool
) -> None:
    made = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(rows), VOCAB, generator=made)
    params, allowed = [each for each, _ in rows], [each for _, each in rows]
    sampled = sample(params, allowed, logits, by_torch=by_torch)
    found = sampled.tokens.tolist()
    assert sampled.finite.all()
    for (own, within), token in zip(rows, found, strict=True):
        if within is None:
            continue
        assert token in within
        forbidden = {word[0] for word in own.bad_words} | (
            set(own.stop_token_ids) if own.min_tokens else set()
        )
        wished = [
            each
            for each in within
            if each not in forbidden and (not own.allowed_token_ids or each in own.allowed_token_ids)
        ]
        assert not wished or token in wished, "options hold as far as bounds leave something"
    alone = [
        int(sample([own], [within], logits[row : row + 1], by_torch=by_torch).tokens[0])
        for row, (own, within) in enumerate(rows)
    ]
    assert found == alone
    within = torch.tensor([[each is None or id in each for id in range(VOCAB)] for each in allowed])
    raw = logits.masked_fill(~within, -torch.inf).log_softmax(-1)
    tables = iter(sampled.logprobs)
    if any(each.logprobs for each in params):
        asked = [row for row, each in enumerate(params) if each.logprobs]
        for row, entry in zip(asked, unpack_logprobs(next(tables).numpy()), strict=True):
            assert entry.values[0] == pytest.approx(float(raw[row, found[row]]), abs=1e-4)
            assert entry.ids[1] == int(raw[row].argmax()), "raw logprobs are those of what may come"


def test_the_likeliest_within_bounds_is_revived() -> None:
    logits = torch.arange(VOCAB).float()[None]
    greedy = {"max_tokens": 9, "temperature": 0.0}
    cases = [
        Sampling(**greedy, allowed_token_ids=(1, 2)),
        Sampling(**greedy, bad_words=((7,), (9,))),
        Sampling(**greedy, min_tokens=9, stop_token_ids=(7, 9)),
        Sampling(**greedy, allowed_token_ids=(1, 2), bad_words=((9,),)),
        Sampling(**greedy, logit_bias={9: -1000.0}, allowed_token_ids=(4,)),
    ]
    assert [int(sample([each], [[7, 9]], logits).tokens[0]) for each in cases] == [9] * 5


def test_bounds_that_leave_nothing_fail_the_row_alone() -> None:
    sampled = sample([Sampling(max_tokens=9), Sampling(max_tokens=9)], [[], [4]], torch.randn(2, VOCAB))
    assert sampled.finite.tolist() == [0, 1] and int(sampled.tokens[1]) == 4
