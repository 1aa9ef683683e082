"""The facts that a worker tells of itself when it has loaded its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from models.pooling.representations import CosineScores

TimedSteps = tuple[tuple[int, float], ...]
"""The tokens of steps that were run, and the seconds that each took."""


class WorkerFacts(msgspec.Struct, frozen=True, gc=False):
    """The facts about a loaded worker that the engine must know to plan steps."""

    device: str
    dtype: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weight_bytes: int
    kv_bytes: int
    mapped_bytes: int = 0
    """The bytes of weights that are mapped as an earlier start has packed them."""
    device_bytes: int = 0
    """The bytes that the worker takes at most of the memory of a card; 0 if it computes in the host's."""
    tasks: tuple[str, ...] = ("generate",)
    """The tasks that requests may ask for: generate, and any of Task."""
    widths: dict[str, int] = {}
    """Task -> the numbers in each of its vectors, before any cut."""
    whole_tasks: tuple[str, ...] = ()
    """The tasks that read all hidden states of a sequence, not its last one only."""
    windows: tuple[int, ...] = (0,)
    """The positions that queries of each group of layers read, their own among them; 0: all, and is first."""
    causal: bool = True
    """False for encoders: a sequence is computed in one step, without cache blocks (num_blocks is 0)."""
    remembered_states: int | None = None
    """The number of states that can be remembered for prompts that begin alike; None: no layer has states."""
    fingerprint: str = ""
    """A digest of everything that decides the bits of answers (`worker/devices/fingerprint.py`)."""
    has_idle_work: bool = False
    """Whether there is work to do while no step runs, that makes later steps quicker (`Executor.idle`)."""
    timed_steps: TimedSteps = ()
    """The tokens and the seconds of steps that were run at warm-up."""
    kernel_compilations: int = 0
    """How many kernels the worker compiled at its start."""
    most_embeddings: int = 0
    """The most embeddings that a media item may have; 0: the model is served for text only."""
    row_width: int = 0
    """The numbers in each embedding of a prompt that has these in place of tokens; 0: none may have."""
    media_width: int = 0
    """The numbers in each embedding of a picture, with those for deeper layers; 0: there is no tower."""
    tower_layers: int = 0
    """The layers of the tower. Behind each, the encoding of an item may go on in a later step."""
    kept_embeddings: int = 0
    """The embeddings of media that the worker has room for beside so many."""
    whole_media: bool = False
    """Whether all tokens of an item must be computed in one step, because they see each other."""
    most_rows: int = 0
    """The rows of a step that may sample, guesses among them; 0: the model takes no guesses."""
    drafts: int = 0
    """The most guesses that a drafter makes for a sequence when a step asks for them; 0: there is none."""
    whole_prompts: bool = False
    """Whether all tokens of a prompt see each other. It is computed in one step, together with what of its
    answer is known, and shares its blocks only with equal prompts."""
    cosine_scores: CosineScores | None = None
    """Learned with vectors of pictures and texts; None: the model was not trained to compare them."""
    source_layers: int = 0
    """The layers of the encoder of sources behind each of which it may pause; 0: it does not."""
    source_kind: Literal["", "tokens", "audio"] = ""
    """What the encoder of the model reads, if it is an encoder-decoder."""
    source_len: int = 0
    """The most positions that it gives of a source, to which its answers attend."""
    source_shape: tuple[int, int] = (0, 0)
    """The bands and frames of a recording's features, if it reads recordings."""
    num_source_blocks: int = 0
    """The blocks that hold keys and values of sources."""
    processes_logits: bool = False
    """Whether there are logits processors, to which requests may give arguments."""

    @property
    def held_embeddings(self) -> int:
        """The most embeddings of media that the worker holds at a time."""
        return self.most_embeddings + self.kept_embeddings

    @property
    def cuts_prompts(self) -> bool:
        """Whether the tokens of a prompt may be computed in several steps."""
        return self.causal and not self.whole_prompts

    @property
    def keeps_prefixes(self) -> bool:
        """Whether a sequence can go on from what an earlier one has left in the cache."""
        return self.causal and self.remembered_states != 0

    @property
    def cached_tokens(self) -> int:
        """The tokens that the cache holds of sequences of the greatest length."""
        if not any(self.windows):
            return self.num_blocks * self.block_size
        each = blocks_held(self.max_model_len, 1, self.block_size, self.windows)
        return self.num_blocks * self.max_model_len // each


def blocks_held(tokens: int, step: int, block_size: int, windows: Sequence[int]) -> int:
    """The most blocks that a sequence of so many tokens holds while steps compute up to `step` of them.

    `windows`: those of `WorkerFacts`. What a group with a window reads may begin anywhere in a block.
    """
    held, whole = 0, -(-tokens // block_size)
    for window in windows:
        held += min(whole, (window + step + block_size - 3) // block_size + 1) if window else whole
    return held
