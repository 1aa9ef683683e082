"""Repeated n-grams are forbidden as vLLM's processor for DeepSeek-OCR does it, in batches that change."""

import random
from typing import Any

import pytest
import torch

from worker.features.processors.custom_processors import BatchUpdate, MoveDirectionality
from worker.features.processors.repeated_ngrams import RepeatedNgrams
from worker.protocol import Sampling

SIZE = 6


def processor() -> RepeatedNgrams:
    return RepeatedNgrams(None, torch.device("cpu"), False)  # pyright: ignore[reportArgumentType]


def sampling(**arguments: Any) -> Sampling:
    return Sampling(max_tokens=4, extra_args=arguments)


def wanted(output: list[int], size: int, window: int, allowed: tuple[int, ...]) -> set[int]:
    """The tokens that would make the last `size` tokens equal to some that begin in the window."""
    found = set[int]()
    for token in set(range(SIZE)).difference(allowed):
        new = [*output, token]
        begins = range(max(0, len(output) - window), len(output) - size + 1)
        if len(output) >= size and any(new[-size:] == output[at : at + size] for at in begins):
            found.add(token)
    return found


def forbidden(made: RepeatedNgrams, rows: int) -> list[set[int]]:
    logits = made.apply(torch.zeros(rows, SIZE))
    return [{int(token) for token in row.isinf().nonzero().flatten()} for row in logits]


def test_tokens_that_would_repeat_an_ngram_are_forbidden() -> None:
    rnd, seen = random.Random(0), 0
    for _ in range(300):
        output = [rnd.randrange(4) for _ in range(rnd.randrange(30))]
        size, window, allowed = rnd.randint(1, 4), rnd.randint(1, 20), tuple(rnd.sample(range(6), 2))
        params = sampling(ngram_size=size, window_size=window, whitelist_token_ids=[*allowed], other="a")
        made = processor()
        made.update_state(BatchUpdate(1, [], [(0, params, [1, 1, 1], output)], []))
        [found] = forbidden(made, 1)
        assert found == wanted(output, size, window, allowed)
        seen += len(found)
        output.append(0)
        made.update_state(None)
        assert forbidden(made, 1) == [wanted(output, size, window, allowed)]
    assert seen > 100


def test_each_request_has_its_own_arguments_wherever_it_is() -> None:
    made, repeats = processor(), [1, 2, 1, 2, 1]
    asks, others = sampling(ngram_size=2), sampling()
    added = [(0, asks, [], repeats), (1, others, [], repeats), (2, asks, [], [3, 4, 3])]
    made.update_state(BatchUpdate(3, [], added, []))
    assert forbidden(made, 3) == [{2}, set(), {4}]
    made.update_state(BatchUpdate(2, [0], [], [(2, 0, MoveDirectionality.UNIDIRECTIONAL)]))
    assert forbidden(made, 2) == [{4}, set()]
    made.update_state(BatchUpdate(2, [], [(0, others, [], repeats), (1, asks, [], repeats)], []))
    assert forbidden(made, 2) == [set(), {2}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ngram_size": 0}, "Expected `int` >= 1"),
        ({"ngram_size": "2"}, "Expected `int | null`, got `str`"),
        ({"ngram_size": 2, "window_size": -1}, "Expected `int` >= 1"),
        ({"ngram_size": 2, "whitelist_token_ids": 7}, "Expected `array | null`"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="Expected") as refused:
        RepeatedNgrams.validate_params(sampling(**arguments))
    assert message in str(refused.value)
    RepeatedNgrams.validate_params(sampling())
