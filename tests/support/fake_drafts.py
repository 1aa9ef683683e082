"""The rows of a step of a worker without tensors: one with guesses becomes several, and then one again."""

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from worker.protocol import Bound, SeqStep, StepBounds, StepInput
from worker.worker_facts import WorkerFacts


def nearest(token: int, allowed: list[int]) -> int:
    """The token that is sampled in place of one that may not be allowed."""
    return token if token in allowed or not allowed else allowed[token % len(allowed)]


def bounds_of(
    step: StepInput, following: Callable[[], StepBounds] | None
) -> dict[tuple[int, int], Bound | None]:
    """What may be sampled in bound rows, by slot and index of the output."""
    bound = [seq for seq in step.seqs if seq.bound]
    if not bound:
        return {}
    if following is None:
        raise ValueError("nobody tells bounds")
    while (told := following()).number < step.number:
        pass
    guesses = {seq.slot: len(seq.guesses) for seq in bound if seq.guesses}
    found = {slot: len(each) for slot, each in told.guesses.items()}
    if (told.number, told.rows.keys(), found) != (step.number, {seq.slot for seq in bound}, guesses):
        raise ValueError("these are not the bounds of this step")
    return {
        (seq.slot, seq.output_index + at): each
        for seq in bound
        for at, each in enumerate([told.rows[seq.slot], *told.guesses.get(seq.slot, [])])
    }


def run_rows(
    step: StepInput,
    facts: WorkerFacts,
    tokens: Mapping[int, list[int]],
    *,
    write: Callable[[SeqStep, list[int]], None],
    sample: Callable[[SeqStep], int],
) -> tuple[list[int], dict[int, list[int]]]:
    """Sample the rows of a step, whose tokens follow -> the token of each, and by slot the guesses that hold.

    `tokens` are those of each slot, `write` writes the cache entries of a row.
    """
    rows = [_expand(step, seq, facts, tokens[seq.slot]) if seq.guesses else [seq] for seq in step.seqs]
    if facts.causal:  # all rows write before any of them reads
        for seq in (seq for each in rows for seq in each):
            write(seq, tokens[seq.slot])
    last: list[int] = []
    held: dict[int, list[int]] = {}
    for seq, each in zip(step.seqs, rows, strict=True):
        sampled = _verified(seq, [sample(row) for row in each])
        if seq.samples:
            tokens[seq.slot][seq.start + seq.count :] = sampled
        *right, token = sampled
        last.append(token)
        if right:
            held[seq.slot] = right
    return last, held


def run_drafter(
    step: StepInput,
    tokens: Mapping[int, list[int]],
    has_room: Callable[[int, int], bool],
    draft: Callable[[list[int], int], list[int]],
) -> dict[int, list[int]]:
    """What a drafter guesses behind a step, by slot. `draft` makes so many guesses behind these tokens."""
    asked = [seq for seq in step.seqs if seq.proposes]
    if not all(has_room(seq.slot, seq.start + seq.tokens + seq.proposes) for seq in asked):
        raise ValueError("the drafter has too few blocks")
    return {seq.slot: draft(tokens[seq.slot], seq.proposes) for seq in asked}


def _expand(step: StepInput, seq: SeqStep, facts: WorkerFacts, tokens: list[int]) -> list[SeqStep]:
    """The rows of a row with guesses, which are written behind the tokens of its sequence."""
    if sum(each.samples + len(each.guesses) for each in step.seqs) > facts.most_rows:
        raise ValueError("more rows sample than may")
    if any(each.count > 1 or not each.samples for each in step.seqs) or step.new:
        raise ValueError("guesses are for steps that only decode")
    if len(tokens) <= seq.start:
        raise ValueError("a token before the guesses is not known")
    tokens[seq.start + 1 :] = seq.guesses
    first = replace(seq, guesses=[])
    others = [
        replace(first, start=seq.start + at, blocks=[], output_index=seq.output_index + at)
        for at in range(1, seq.tokens)
    ]
    return [first, *others]


def _verified(seq: SeqStep, sampled: list[int]) -> list[int]:
    """The guesses of a row that hold, and the token behind them, of what its rows have sampled."""
    held = 0
    while held < len(seq.guesses) and seq.guesses[held] == sampled[held]:
        held += 1
    return sampled[: held + 1]
