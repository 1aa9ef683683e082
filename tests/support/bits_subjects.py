"""The tiny models with which same bits are proved. Their dimensions reach the C kernels of attention.

Weights are large enough that tokens vary, and the vocabulary is odd, so that no two rows of logits lie at the
same place within a cache line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shape_files import read_shapes
from tiny import tiny_checkpoint

from worker.protocol import Task

VOCABULARY = 1001
MAX_LEN = 704
"""The most tokens of a sequence: beyond 512, a border at which kernels may change what they do at once."""
WINDOW = 100

_SHAPES = read_shapes("bits")
_DECODERS = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM")
_WINDOWED = ("Gemma3ForCausalLM", "Gemma3nForCausalLM")
_GENERATING = tuple(name for name in _SHAPES if name.endswith("ForCausalLM"))
_OTHER_DECODERS = tuple(name for name in _GENERATING if name not in (*_DECODERS, *_WINDOWED))
_ENCODERS = tuple(name for name in _SHAPES if name.startswith("Bert"))
_EMBED: tuple[Task, ...] = ("embed", "token_embed")
POOLING_TYPES = ("LAST", "MEAN", "CLS", "MAX", "WEIGHTED_MEAN", "MEAN_SQRT_LEN")
QUANTIZATIONS = ("int8", "int8-dynamic", "int4")


@dataclass(frozen=True)
class Subject:
    """A model as it is served: the checkpoint, the number type, and how it pools."""

    architecture: str
    dtype: str
    tasks: tuple[Task, ...]
    """The kinds of pooling that it offers."""
    pooling_type: str = ""
    options: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)
    """Options of the engine."""
    windows: tuple[int, ...] = (0,)
    """The windows of its groups of layers."""

    @property
    def generates(self) -> bool:
        return self.architecture in _GENERATING

    def __str__(self) -> str:
        quantization, cached = self.options.get("quantization"), self.options.get("kv_cache_dtype")
        cache = f"{cached} cache" if cached else None
        return " ".join(filter(None, (self.architecture, self.dtype, quantization, cache, self.pooling_type)))

    def write(self, folder: Path) -> Path:
        """Write the checkpoint below `folder`, if it is not there, and return its own folder."""
        own = folder / self.architecture
        if not own.exists():
            tiny_checkpoint(self.architecture, own, **_SHAPES[self.architecture])
        return own


def decoder(architecture: str, dtype: str, pooling_type: str, quantization: str | None = None) -> Subject:
    """A model that generates, and pools in every way."""
    tasks: tuple[Task, ...] = (*_EMBED, "classify")
    options = {
        "runner": "generate",
        "tasks": ["generate", *tasks],
        "pooler_config": {"pooling_type": pooling_type},
        "quantization": quantization,
        "hf_overrides": {"classifier_from_token": [20, 30, 40], "method": "no_post_processing"},
    }
    return Subject(architecture, dtype, tasks, pooling_type, options)


def _windowed(architecture: str, dtype: str) -> Subject:
    """A model of three groups of layers, which pools last tokens only: others would keep all blocks."""
    options = {
        "runner": "generate",
        "tasks": ["generate", "embed"],
        "pooler_config": {"pooling_type": "LAST"},
    }
    return Subject(architecture, dtype, ("embed",), "LAST", options, (0, WINDOW + 63, WINDOW + 63))


def _encoder(architecture: str, dtype: str, pooling_type: str) -> Subject:
    if architecture == "BertModel":
        return Subject(
            architecture, dtype, _EMBED, pooling_type, {"pooler_config": {"pooling_type": pooling_type}}
        )
    task: Task = "classify" if architecture == "BertForSequenceClassification" else "token_classify"
    return Subject(architecture, dtype, (task,))


def subjects() -> list[Subject]:
    """Every kind of model, so that the first dozen has all families, both number types and MEAN and LAST."""
    quantized = [decoder("LlamaForCausalLM", "bfloat16", "MEAN", each) for each in QUANTIZATIONS]
    return [*_subjects(POOLING_TYPES), *quantized, *other_decoders()]


def other_decoders() -> list[Subject]:
    """A mixture of experts, hybrids, latent attention, groups of layers, some also with caches of 8 bits."""
    types = ("float32", "bfloat16")
    plain = [decoder(architecture, dtype, "MEAN") for architecture in _OTHER_DECODERS for dtype in types]
    quantized = [decoder("Qwen3_5ForCausalLM", "bfloat16", "MEAN", each) for each in ("int8", "int4")]
    windowed = [_windowed(each, dtype) for each in _WINDOWED for dtype in types]
    coded = [decoder("Qwen3ForCausalLM", "float32", "MEAN"), decoder("Gemma2ForCausalLM", "bfloat16", "MEAN")]
    coded += [decoder("Qwen3_5ForCausalLM", "bfloat16", "MEAN"), windowed[-1]]
    return plain + quantized + windowed + [_with_small_cache(each) for each in coded]


def _with_small_cache(subject: Subject) -> Subject:
    return replace(subject, options={**subject.options, "kv_cache_dtype": "int8"})


def _subjects(pooling_types: Sequence[str]) -> Iterator[Subject]:
    for pooling_type in pooling_types:
        for dtype in ("float32", "bfloat16"):
            for architecture in _DECODERS:
                yield decoder(architecture, dtype, pooling_type)
            for architecture in _ENCODERS:
                yield _encoder(architecture, dtype, pooling_type)
