"""A logits processor that forbids n-grams which an answer has had shortly before.

Models that read pages repeat themselves without end otherwise. A request asks for it by `vllm_xargs`, in the
words of vLLM's processor for DeepSeek-OCR: `ngram_size`, `window_size` and `whitelist_token_ids`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import torch
from torch import Tensor

from worker.config import WorkerConfig
from worker.features.processors.custom_processors import BatchUpdate, LogitsProcessor
from worker.protocol import Sampling

_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Ban(msgspec.Struct, frozen=True):
    """The arguments of a request. Others may be for other processors."""

    ngram_size: _Count | None = None
    """The tokens of an n-gram; None: nothing is forbidden."""
    window_size: _Count = 100
    """The number of the answer's last tokens among which an n-gram begins that may not be repeated."""
    whitelist_token_ids: frozenset[int] | None = None
    """Tokens that are never forbidden, such as those of tables."""

    def forbidden(self, output: list[int]) -> list[int]:
        """The tokens that would end an n-gram that the window has already."""
        before, length = (self.ngram_size or 1) - 1, len(output)
        last, starts = output[length - before :], range(max(0, length - self.window_size), length - before)
        found = {output[at + before] for at in starts if output[at : at + before] == last}
        return [*found.difference(self.whitelist_token_ids or ())]


class RepeatedNgrams(LogitsProcessor):
    """Forbids repeated n-grams in the answers of the requests that ask for it."""

    @classmethod
    def validate_params(cls, sampling_params: Sampling) -> None:
        try:
            msgspec.convert(sampling_params.extra_args, _Ban)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None

    def __init__(self, vllm_config: WorkerConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[_Ban, list[int]]] = {}
        """The arguments and the output of each request that asks for it, by its place in the batch."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._rows.pop(place, None)
        for place, params, _, output in batch_update.added:
            self._rows.pop(place, None)
            ban = msgspec.convert(params.extra_args, _Ban)
            if ban.ngram_size is not None:
                self._rows[place] = ban, output
        for source, place, _ in batch_update.moved:  # nobody is there
            if source in self._rows:
                self._rows[place] = self._rows.pop(source)

    def apply(self, logits: Tensor) -> Tensor:
        for place, (ban, output) in self._rows.items():
            if forbidden := ban.forbidden(output):
                logits[place, forbidden] = -torch.inf
        return logits
