"""The options of Ollama's requests, which its clients send to other endpoints, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from server.request_limits import LIMITS
from server.schemas.body import Body, Bounds, ForeignField, Neutral, no_effect, optional
from server.schemas.sampling_fields import NO_ENTRIES, Int64, Strings
from server.schemas.unknown_fields import FieldNotes

_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("seed", "presence_penalty", "frequency_penalty"),
)
"""Options that chat completions has under the same name."""


def penalty_window(repetition: str) -> ForeignField:
    """The field `repeat_last_n`, the tokens that penalties count. `repetition` names the field of one."""
    off: dict[str, Any] = {repetition: 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}

    def read(value: Any, notes: FieldNotes) -> dict[str, Any] | None:
        return {0: off, -1: {}}.get(value) if type(value) is int else None

    meaning = "0 switches all penalties off, and -1 is what happens anyway: they are over the whole text."
    return ForeignField(read, meaning)


class OllamaOptions(Body):
    """The options that have a meaning here. Those of the machine, such as num_gpu, have none."""

    unsupported: ClassVar[Mapping[str, Neutral]] = {"mirostat": (0,)}
    foreign: ClassVar[Mapping[str, ForeignField]] = {
        "penalize_newline": no_effect(neutral=True),
        "tfs_z": no_effect(neutral=1),
        "repeat_last_n": penalty_window("repeat_penalty"),
    }
    client_names: ClassVar[Mapping[str, str]] = {
        "max_tokens": "num_predict",
        "max_completion_tokens": "num_predict",
        "repetition_penalty": "repeat_penalty",
    }
    meaningless = frozenset(
        {
            "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta", "mirostat_tau",
            "num_batch", "num_gpu", "num_keep", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only",
        }
    )  # fmt: skip
    bounds: ClassVar[Bounds] = {"stop": (LIMITS.stop_strings, "strings")}

    num_predict: Annotated[int, Field(ge=-2)] | None = optional(
        "Maximum number of tokens of the answer; -1 is no limit."
    )
    num_ctx: Annotated[int, Field(ge=2)] | None = optional(
        "Context length: tokens of prompt and answer together, up to the model's own."
    )
    temperature: float | None = optional("0 is greedy. null: the checkpoint's default.")
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: Int64 | None = None
    stop: Strings = NO_ENTRIES
    repeat_penalty: float | None = optional("repetition_penalty of chat completions, over the whole text.")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def window(self, most: int) -> int:
        """The tokens that fit, of at most `most`: more is as much as there is, as in Ollama."""
        return most if self.num_ctx is None else min(self.num_ctx, most)

    def as_ours(self) -> dict[str, Any]:
        """The options that were given, in the words of chat completions."""
        asked = {name: getattr(self, name) for name in _SAME}
        asked |= {"stop": self.stop or None, "repetition_penalty": self.repeat_penalty}
        if self.top_p == 0:  # the likeliest token alone, as in Ollama
            asked |= {"top_p": None, "top_k": 1}
        if (self.num_predict or 0) > 0:
            asked["max_tokens"] = self.num_predict
        return {name: value for name, value in asked.items() if value is not None}
