"""Log-probabilities of prompts are computed in pieces, of which there are more when memory was short."""

import torch

from worker.sampling.logprobs import PromptLogprobPlan, prompt_logprob_table, rows_at_once


def test_pieces_of_any_size_give_the_same_table() -> None:
    hidden, head = torch.randn(20, 8), torch.randn(50, 8)
    tokens = torch.randint(50, (3, 40))
    plan = PromptLogprobPlan(1, slice(2, 19), slice(5, 22), 4)
    sizes: list[int] = []

    def logits_of(rows: slice) -> torch.Tensor:
        sizes.append(rows.stop - rows.start)
        return (hidden[rows, None] * head).sum(-1)

    whole, small = (prompt_logprob_table(plan, tokens, logits_of, size) for size in (100, 5))
    assert torch.equal(whole, small) and sizes == [17, 5, 5, 5, 2]


def test_pieces_are_smaller_after_each_kill_and_never_empty() -> None:
    first, second, *_, last = [rows_at_once(50_000, kills) for kills in range(6)]
    assert second == first // 8 and last == 1
