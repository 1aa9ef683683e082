"""The rules of Whisper's timestamps on random logits and answers, against those of transformers."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from later import Later

from worker.protocol import Timestamps
from worker.sampling.timestamps import TimestampRules

transformers = Later("transformers")
END, NONE, FIRST, VOCAB = 20, 24, 25, 40
PROMPT = [21, 22]


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=6), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    most_first=st.sampled_from([None, 0, 5]),
)
def test_what_may_come_next_is_what_transformers_allows(
    answers: list[list[int]], seed: int, most_first: int | None
) -> None:
    logits = 4 * torch.randn(len(answers), VOCAB, generator=torch.Generator().manual_seed(seed))
    # Timestamps never fall, because the rules let none do so.
    rising = [_rising(answer) for answer in answers]
    table = torch.full((len(answers), 12), 39)
    for row, answer in enumerate(rising):
        table[row, : len(PROMPT) + len(answer)] = torch.tensor(PROMPT + answer)
    made = torch.tensor([len(answer) for answer in rising])
    rows = torch.arange(len(answers))
    rules = TimestampRules(Timestamps(FIRST, END, NONE, most_first), rows, rows, len(PROMPT) + made, made)
    ours = logits.clone()
    rules.apply(ours, table)
    for row, answer in enumerate(rising):
        config = transformers.GenerationConfig(
            eos_token_id=END, no_timestamps_token_id=NONE, max_initial_timestamp_index=most_first
        )
        processor = transformers.WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))
        wanted = processor(torch.tensor([PROMPT + answer]), logits[row : row + 1].clone())[0]
        assert torch.equal(ours[row], wanted), answer


def _rising(answer: list[int]) -> list[int]:
    latest = FIRST
    for at, token in enumerate(answer):
        if token >= FIRST:
            answer[at] = latest = max(latest, token)
    return answer
