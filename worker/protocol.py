"""What an engine says to a worker, and what the worker answers.

The engine holds all decisions (who runs, how many tokens, in which blocks); the worker holds all tensors.
A sequence lives in one row ("slot") of the worker's tables from admission to its end or preemption, and
rows never move: a step names rows, positions and counts, and nothing else. Token values travel down once,
with `NewSeq`; tokens the worker has sampled itself stay where they are, so a step can be planned before
the last one's tokens are known.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Task = Literal["embed", "token_embed", "classify", "token_classify"]
"""What pooling makes of a sequence: a vector or a row of scores, for all of it or for each of its tokens."""

QUERY_GONE = "the vectors of this query are not kept any more: send the query again"
"""Why a document cannot be scored (`StepOutput.failed`): the one failure after which trying again helps."""

DEVICE_LOST = "AcceleratorError"
"""What torch raises when the device itself has failed: after that, every use of it in this process fails."""


class Sampling(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """How the tokens of one sequence are chosen. All values are checked and resolved: none means "default".

    The order in which they apply: raw logprobs are taken; allowed_token_ids, bad_words, min_tokens and
    logit_bias mask or shift; penalties; then temperature, min_p, top_k, top_p, and the draw.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    min_p: float = 0.0
    seed: int = 0
    """The draw for output token i depends on (seed, i) only: not on the batch, the step or the process."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends the text, end-of-sequence ids included. Masked until min_tokens are out."""
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed: only the last token of a completing sequence is masked."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty means all."""
    logprobs: int | None = None
    """Number of most likely tokens to report beside the sampled one; -1 means the whole vocabulary."""
    prompt_logprobs: int | None = None


class Pooling(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """What is made of the hidden states of one sequence, once all of them are computed."""

    task: Task
    use_activation: bool | None = None
    """Normalise, or turn scores into probabilities; None is the model's own default."""
    dimensions: int | None = None
    """Keep the first so many numbers of each vector."""
    second_at: int = 0
    """Where the second text of a pair begins, for models that tell the two apart; 0 if there is one text."""
    skip: int = 0
    """Tokens at the beginning, an instruction, that a vector for the whole text leaves out."""
    late_query: str = ""
    """Late interaction, for token_embed: the worker keeps the vectors of this query's tokens under this name.

    Others that come later may push them out. The answer is one number, the query's score against itself.
    """
    late_document: str = ""
    """Scores this document against the query of that name, if its vectors are still kept: one number."""


class NewSeq(msgspec.Struct, frozen=True, gc=False):
    """A sequence enters a row. After a preemption it enters again, with the tokens it had produced."""

    slot: int
    tokens: list[int]
    prompt_len: int
    """tokens[prompt_len:] were sampled before a preemption; penalties and min_tokens count them as output."""
    params: Sampling | Pooling


class SeqStep(msgspec.Struct, frozen=True, gc=False):
    """One row's share of a step: compute positions [start, start + count)."""

    slot: int
    start: int
    count: int
    blocks: list[int]
    """Cache blocks that this row gained since its last step, appended to its table in order."""
    samples: bool
    """Sample a token after the last of these positions (false while a prompt is still being read)."""
    output_index: int = 0
    """Which output token this sample is: the counter of the random draw."""
    pools: bool = False
    """These are the last positions of a sequence that is pooled."""


class StepInput(msgspec.Struct, frozen=True, gc=False):
    number: int
    new: list[NewSeq]
    seqs: list[SeqStep]


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Logprobs at one position: the chosen token first, then the most likely ones in falling order.

    The chosen token is repeated among the most likely if it is one of them.
    """

    ids: list[int]
    values: list[float]
    rank: int
    """Rank of the chosen token, 1 = most likely."""


class Vectors(msgspec.Struct, frozen=True, gc=False):
    """What pooling gave: little-endian float32, row after row."""

    data: bytes
    shape: tuple[int, ...]
    """[D], or [tokens, D]."""


class StepOutput(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Lists follow the order of StepInput.seqs."""

    number: int
    tokens: list[int]
    """-1 for a row that did not sample."""
    logprobs: list[TokenLogprobs | None]
    """Empty when no row asked."""
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    """slot -> one entry for each position p of this step with p + 1 < prompt_len, about token p + 1."""
    failed: dict[int, str] = {}
    """slot -> why its sequence cannot go on; the others of the step are not concerned. Its token is -1."""
    pooled: dict[int, Vectors] = {}
    """slot -> what was made of the sequence that this step completed."""


class WorkerFacts(msgspec.Struct, frozen=True, gc=False):
    """What became true when the worker was loaded: everything the engine must know to plan steps."""

    device: str
    dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weight_bytes: int
    kv_bytes: int
    tasks: tuple[str, ...] = ("generate",)
    """What requests may ask of this model: generate, and any of Task."""
    widths: dict[str, int] = {}
    """Task -> numbers in each of its vectors, before any cut."""
    whole_tasks: tuple[str, ...] = ()
    """Those tasks that read all hidden states of a sequence, not its last one only."""
    causal: bool = True
    """False: a sequence is computed whole, in one step, and holds no cache blocks (num_blocks is 0)."""
