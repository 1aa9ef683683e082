"""InternLM2: Llama under other names, with queries, keys and values interleaved in one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from models.checkpoint.weights import Reading, Weights
from models.config import ModelConfig
from models.families.decoders.decoder import DecoderForCausalLM
from models.families.decoders.decoder_spec import DecoderFields, DecoderSpec
from models.layers.rotary import Rope
from models.model import ModelSetup
from models.weight_pieces import Cut, WeightsError

_NAMES = {
    "embed_tokens": "tok_embeddings",
    "self_attn": "attention",
    "o_proj": "wo",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "lm_head": "output",
}


class InternLM2Fields(DecoderFields, frozen=True, kw_only=True):
    bias: bool = False
    """Whether the four projections of attention have biases."""

    def spec(self, setup: ModelSetup, rope: Rope) -> DecoderSpec:
        return replace(super().spec(setup, rope), qkv_bias=self.bias, o_bias=self.bias)


class InternLM2ForCausalLM(DecoderForCausalLM):
    fields = InternLM2Fields

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__(setup)
        self.config = setup.config

    def pull(self, weights: Weights) -> None:
        if weights.reading.quantization is not None:
            raise WeightsError(
                "a quantized checkpoint of InternLM2 is not read, because its queries, keys and values are "
                "one matrix: use its unquantized checkpoint with --quantization int8 or int4"
            )
        super().pull(_Renamed(weights.reading, weights.path, self.config))


class _Renamed(Weights):
    """A scope that translates the usual names to those of InternLM2."""

    def __init__(self, reading: Reading, path: str, config: ModelConfig) -> None:
        super().__init__(reading, path)
        self._config = config

    def at(self, path: str) -> Weights:
        return _Renamed(self.reading, path, self._config)

    def __contains__(self, name: str) -> bool:
        return _stored_name(self.join(name)) in self.reading.names

    def take(
        self, name: str, shape: Sequence[int], cut: Cut | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        scope, _, part = self.path.rpartition(".")
        dtype = dtype or self.dtype
        if part not in ("q_proj", "k_proj", "v_proj"):
            return self.reading.take(_stored_name(self.join(name)), tuple(shape), cut, dtype)
        return self._take_interleaved(f"{_stored_name(scope)}.wqkv.{name}", part, shape, cut, dtype)

    def ignore(self, *names: str) -> None:
        for name in names:
            self.reading.ignore(_stored_name(self.join(name)))

    def _take_interleaved(
        self, name: str, part: str, shape: Sequence[int], cut: Cut | None, dtype: torch.dtype
    ) -> Tensor:
        """Read queries, keys or values: the query heads that share a key stand before it and its value."""
        config = self._config
        shared = config.num_heads // config.num_kv_heads
        group = (shared + 2) * config.head_dim  # rows, as all that follows
        mine = (shared if part == "q_proj" else 1) * config.head_dim
        before = {"q_proj": 0, "k_proj": shared, "v_proj": shared + 1}[part] * config.head_dim
        size = (config.num_kv_heads * group, *shape[1:])
        start, stop = (cut.start, cut.stop) if cut else (0, shape[0])
        pieces: list[Tensor] = []
        for index in range(start // mine, -(-stop // mine)):
            first, last = max(start, index * mine), min(stop, (index + 1) * mine)
            stored = index * (group - mine) + before  # rows of other parts that are stored ahead of these
            pieces.append(self.reading.take(name, size, Cut(0, stored + first, stored + last), dtype))
        return torch.cat(pieces)


def _stored_name(path: str) -> str:
    return ".".join(_NAMES.get(part, part) for part in path.split("."))
