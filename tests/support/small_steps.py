"""Steps of one sequence in the first slot."""

from worker.protocol import NewSeq, Sampling, SeqStep, StepInput


def read(number: int, tokens: list[int]) -> StepInput:
    """A step that reads a prompt and samples a token."""
    new = NewSeq(0, tokens, len(tokens), Sampling(max_tokens=4))
    return StepInput(number, [new], [SeqStep(0, 0, len(tokens), [0, 1], samples=True)])


def follow(number: int, start: int) -> StepInput:
    """A step that samples the next token."""
    return StepInput(number, [], [SeqStep(0, start, 1, [], samples=True, output_index=number - 1)])
