"""The messages from an engine to a worker, and from the worker back.

The engine holds all decisions (who runs, how many tokens, in which blocks); the worker holds all tensors.
A sequence has one slot, a row of the worker's tables, from admission to its end or preemption: a step names
slots, positions and counts, and nothing else. Token values travel down once, with `NewSeq`; tokens that the
worker has sampled itself stay where they are, so a step can be planned before the last one's are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from models.media.item import Kind
from worker.buffers import Buffer

Task = Literal["embed", "token_embed", "classify", "token_classify", "sparse_embed", "ner", "align", "decide"]
"""The kinds of pooling: a vector or scores, for a whole sequence or for each token; weights of tokens; how
much each token attends to each frame of a recording [tokens, frames]; or logits of the options of a question
[options, 1]."""

QUERY_GONE = "the vectors of this query are not kept any more: send the query again"
"""The reason in `StepOutput.failed` if a document cannot be scored: the one failure worth another try."""
REFUSED_ARGUMENTS = "the arguments of the request are refused: "
"""The beginning of a reason in `StepOutput.failed` if the request itself is wrong."""


LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
"""What is told of an answer's tokens: as the model gives it, or behind bounds, masks, bias, penalties,
filters and temperature, where what cannot be drawn has -inf."""


class Timestamps(msgspec.Struct, frozen=True, gc=False):
    """The rules of Whisper's answers with timestamps: tokens from `first` to the end of the vocabulary."""

    first: int
    """The token that stands for 0 seconds."""
    end: int
    """The token that ends the text; all text comes before it in the vocabulary."""
    none: int
    """The token that says that there are no timestamps, which is never sampled."""
    most_first: int | None = None
    """The highest timestamp with which an answer may begin, counted from `first`; None: any."""


class Sampling(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """The options by which a sequence's tokens are sampled. All are resolved: no value means "default".

    The order in which they apply: raw logprobs are taken; allowed_token_ids, bad_words, min_tokens,
    suppressed ids, timestamps and logit_bias mask or shift; penalties; top_n_sigma and typical_p; then
    temperature, min_p, top_k, top_p, and the draw; processed logprobs are taken.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    """0 is off."""
    seed: int = 0
    """The draw for output token i depends on (seed, i) only: not on the batch, the step or the process."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends the text, end-of-sequence ids included. They are masked until min_tokens are out."""
    logit_bias: dict[int, float] = {}
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed: only the last token of a completing sequence is masked."""
    allowed_token_ids: tuple[int, ...] = ()
    """Token ids that may be sampled; empty: all."""
    logprobs: int | None = None
    """The number of most likely tokens to report beside the sampled one; -1 is the whole vocabulary."""
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode | Literal["masked_logprobs"] = "raw_logprobs"
    """What is told of answers as `logprobs`; masked ones are taken behind the masks, before penalties."""
    told: tuple[int, ...] = ()
    """Token ids whose logprobs, before any mask, are told with every token, in this order."""
    suppressed: tuple[int, ...] = ()
    """Token ids that are never sampled."""
    suppressed_first: tuple[int, ...] = ()
    """Token ids that are not sampled as the first token of an answer."""
    timestamps: Timestamps | None = None
    extra_args: dict[str, Any] = {}
    """The arguments that a request gives to the operator's logits processors."""


class Pooling(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """The options by which a sequence's hidden states are pooled, once all of them are computed."""

    task: Task
    use_activation: bool | None = None
    """Whether vectors are normalised, or scores made probabilities; None is the model's own default."""
    dimensions: int | None = None
    """The count of numbers that are kept of each vector, from its beginning; None: all."""
    second_at: int = 0
    """The position of the second text of a pair, for models that distinguish them; 0 if there is one text."""
    skip: int = 0
    """The number of tokens at the beginning, an instruction, that a vector for the whole text leaves out."""
    columns: int = 0
    """The first positions of the source, so many, that count for the task align; 0: all."""
    outputs: tuple[Task, ...] = ()
    """Other tasks that are answered from the same hidden states. All are for vectors then."""
    spans: tuple[tuple[int, int], ...] = ()
    """The task ner: the positions of labels and words, from one to another."""
    labels: int = 0
    """The task ner: the number of labels. The first spans, so many, are theirs, the others those of words."""
    query: bool = False
    """Whether the text is a query and not a document."""
    unseen: int = 0
    """The tokens at the end that none sees, by which a query is filled up. Of encoders only."""
    late_query: str = ""
    """Late interaction, for token_embed: the worker stores the vectors of this query under this name, until
    later ones replace it. The result is the query's score against itself, and how many vectors it has."""
    late_document: str = ""
    """Late interaction: the query against which this document is scored. The result is one number."""


Runs = tuple[tuple[int, int], ...]
"""Runs of positions: the first of each, and their number."""

Grid = tuple[int, int, int]
"""The frames of a media item, and the rows and columns of patches in each."""


class MediaPlace(msgspec.Struct, frozen=True, gc=False):
    """The place of a media item in a sequence."""

    number: int
    """The number of the item, under which `Encode` brings it. Equal items have one number."""
    kind: Kind
    at: int
    """The position of the first token that stands for it."""
    length: int
    """The number of these tokens, some of which may be text, such as the ends of rows."""
    runs: Runs
    """The positions, counted from `at`, in whose place the item's embeddings are put, in order."""
    grid: Grid
    interval: float = 1.0
    """How far the frames of the grid lie apart on the axis of time."""


class Encode(msgspec.Struct, frozen=True, gc=False):
    """A media item that is encoded before a step: its embeddings are kept until `forget` names it."""

    number: int
    kind: Kind
    shape: tuple[int, int, int]
    """The height of all tiles or frames together and the width in pixels, and 3."""
    grid: Grid
    embeddings: int
    pixels: Buffer


class EncodeSource(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A source that is encoded before a step: its keys and values are written to blocks of their own kind."""

    tokens: list[int]
    features: Buffer | None
    """Float32 or float16 values [bands, frames]; None: it has tokens."""
    length: int
    """The positions that the encoder gives."""
    blocks: list[int]
    partly: bool = False
    """Whether only some layers of the encoder are computed in the step that brings it, and others later."""


class NewSeq(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A sequence gets a slot. After a preemption it gets one again, with the tokens it had produced."""

    slot: int
    tokens: list[int]
    prompt_len: int
    """tokens[prompt_len:] were sampled before a preemption; penalties and min_tokens count them as output."""
    params: Sampling | Pooling
    media: tuple[MediaPlace, ...] = ()
    """In the order of their positions, which do not overlap."""
    source_blocks: list[int] = []
    """The blocks of its source, in order."""
    source_len: int = 0
    """The positions of the source; 0: it has none."""
    adapter: int = 0
    """The number under which its adapter was loaded; 0: the model as it is."""
    adapter_from: int = 0
    """The first position that the adapter computes."""


class SeqStep(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The part of a step for one slot: compute positions [start, start + count)."""

    slot: int
    start: int
    count: int
    blocks: list[int]
    """Cache blocks that this slot gained since its last step, in order: as many for each group of layers, one
    group after the other. The scratch block stands for what no query reads any more."""
    samples: bool
    """Whether a token is sampled after the last of these positions: not while a prompt is being read."""
    output_index: int = 0
    """The index of this sample among the output tokens: the counter of the random draw."""
    pools: bool = False
    """Whether these are the last positions of a sequence that is pooled."""
    bound: bool = False
    """Whether the tokens that may be sampled are told by the `StepBounds` of this step."""
    source: int = -1
    """The remembered state from which it goes on; -1: that of its slot, if the model has states."""
    kept: tuple[tuple[int, int], ...] = ()
    """Pairs (count, place), MOST_KEPT at most: the state after so many of them is remembered there."""
    guesses: list[int] = []
    """Tokens that may follow the last of these positions. Each is computed in a row of its own, at its own
    position, and samples too: a guess holds if it is the token sampled before it and all guesses before it
    hold. Blocks are for them too."""
    proposes: int = 0
    """How many guesses the worker's drafter makes behind the token of this step. Blocks reach so many
    positions further, where it writes entries of its own."""

    @property
    def tokens(self) -> int:
        """The tokens that are computed for it in this step."""
        return self.count + len(self.guesses)

    def count_held(self, sampled: Sequence[int]) -> int:
        """How many of its guesses hold, where `sampled` are the tokens that were drawn in their places."""
        held = 0
        for guess, token in zip(self.guesses, sampled, strict=False):
            if guess != token:
                break
            held += 1
        return held


class StepInput(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    number: int
    new: list[NewSeq]
    seqs: list[SeqStep]
    fresh: bool = False
    """Whether it was planned when a failed step and all after it had landed. After a failure no other step is
    computed: its rows may be those of sequences that the failed step was to bring. First the embeddings of
    all media are dropped, because nobody knows which of them the failed step has left."""
    replica_tokens: list[int] = []
    """The tokens that each replica computes in this step, if they share experts. One may have no rows."""
    encode: list[Encode] = []
    """The media items that are encoded before the rows are computed. Later stages do not get them."""
    partly: dict[int, int] = {}
    """number -> of an item of which only some layers of the tower are computed in this step, how many: it is
    one of `encode`, or was that of an earlier step. Its embeddings are there when all layers are computed."""
    forget: list[int] = []
    """The items whose embeddings are dropped before that."""
    sources: list[EncodeSource] = []
    """The sources that are encoded before the rows are computed."""
    source_layers: int = 0
    """How many layers of the encoder are computed of the source that came partly, in this step or last. With
    the last layer its keys and values are written."""
    copies: list[tuple[int, int]] = []
    """Cache blocks that are copied before the rows are computed, with those that they are copied to."""


class Bound(msgspec.Struct, frozen=True, gc=False):
    """The tokens that may be sampled, in one of three forms; a network gets the smallest."""

    form: Literal["bits", "allowed", "forbidden"]
    data: bytes
    """One bit for each token of the vocabulary, in little-endian words of 32 bits; or token ids, as int32."""


class StepBounds(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """The bounds of a step's bound slots, which depend on tokens that were not known when it was planned."""

    number: int
    """The number of the step."""
    rows: dict[int, Bound | None]
    """slot -> what may be sampled there; None is everything. A bound slot that is missing breaks the step."""
    guesses: dict[int, list[Bound | None]] = {}
    """slot -> what may be sampled behind each of its guesses, if it has some."""


class TokenLogprobs(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Logprobs at one position: the sampled or prompt token, then the likeliest ones, falling."""

    ids: list[int]
    values: list[float]
    rank: int
    """The rank of the first token, 1 = most likely."""
    told: list[float] = []
    """The logprobs of `Sampling.told`, in its order."""


class Vectors(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The vectors of one pooled sequence: little-endian float32, row after row."""

    data: bytes
    shape: tuple[int, ...]
    """The shape [D], [tokens, D] or [spans, D]; of a sparse vector [K], the weights of `ids`."""
    ids: bytes = b""  # the tokens of a sparse vector, rising: little-endian int32
    others: dict[Task, Vectors] = {}
    """What answers the other tasks of `Pooling.outputs`."""


class StepOutput(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The output of a step. Lists follow the order of StepInput.seqs."""

    number: int
    tokens: list[int]
    """The sampled tokens, behind the guesses that hold; -1 for a sequence that did not sample."""
    logprobs: list[TokenLogprobs | None]
    """One entry for each sequence; an empty list if none asked for logprobs."""
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    """slot -> one entry for each position p of this step with p + 1 < prompt_len, about token p + 1."""
    failed: dict[int, str] = {}
    """slot -> why its sequence cannot go on, and the others of the step can. Its token is -1."""
    pooled: dict[int, Vectors] = {}
    """slot -> the vectors of a sequence that this step completed."""
    held: dict[int, list[int]] = {}
    """slot -> its guesses that hold, if some do: they come before its token."""
    held_logprobs: dict[int, list[TokenLogprobs]] = {}
    """slot -> an entry for each of those, if its sequence asks for logprobs."""
    drafts: dict[int, list[int]] = {}
    """slot -> what the drafter guesses to follow its token, for sequences for which it was asked."""
    proposing: float = 0.0
    """The seconds that these guesses took."""
    kernel_compilations: int = 0
    """How many kernels the worker has compiled, from its start to the launch of this step."""


class DiskTotals(msgspec.Struct, frozen=True, gc=False):
    """Counts of cache blocks in files: written, read and failed, and the bytes that are held."""

    written: int
    bytes_written: int
    read: int
    """Blocks that came back into the cache."""
    bytes_read: int
    failures: int
    """Files that could not be written, could not be read, or were damaged."""
    held: int
    """The bytes of all files in the folder."""
