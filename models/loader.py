"""Loading: a model is built from its config, then pulls its weights from the checkpoint.

Headers come first: a config and weights that do not fit each other are refused before a weight is read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from models import ops
from models.checkpoint.files import Dummy, Source, Upload, open_source
from models.checkpoint.weights import Reading, Weights, load, no_report
from models.composites import COMPOSITES
from models.config import ConfigError, ModelConfig
from models.conversion.conversion_choice import Conversion, looks_ahead
from models.conversion.pooling_models import convert_class
from models.ctranslate2.folder import made_weights
from models.ctranslate2.tensors import open_ctranslate2
from models.families.decoders.decoder import TrunkForCausalLM
from models.families.drafters.eagle import Eagle, Eagle3
from models.families.drafters.head import DraftHead
from models.families.drafters.next_token import NextToken, ScopedNextToken
from models.families.encoders import rotary_roberta
from models.gguf.folder import gguf_parts
from models.gguf.tensors import open_gguf
from models.layers.experts import describe_experts
from models.mistral.folder import was_made
from models.mistral.tensors import renamed
from models.model import ModelSetup, ServedModel
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import most_ranks_of
from models.pooling.config import PoolingConfig
from models.quantization.config import read_quantization
from models.registry import resolve
from models.towers.model import find_tower, with_tower_of
from models.weight_coding import Quantization
from models.weight_slices import WeightsError

logger = logging.getLogger(__name__)

_DRAFTERS: tuple[type[DraftHead], ...] = (Eagle, Eagle3, NextToken)
_HEADS = {each.method: each for each in _DRAFTERS}


@dataclass(frozen=True, slots=True)
class EarlierLoad:
    """What an earlier load of the same files has done for this one."""

    is_checked: bool = False
    """Whether it has found that the files fit the config and that all numbers are finite."""
    has_packed: bool = False
    """Whether the matrices that it packed are there, so that not all that was packed need be read."""


@dataclass(frozen=True)
class LoadOptions:
    """Everything that decides which model is loaded, and how."""

    config: ModelConfig
    folder: Path
    _: KW_ONLY
    dtype: torch.dtype
    device: torch.device = field(default=torch.device("cpu"))
    load_format: str = "auto"
    seed: int = 0
    """The seed of dummy weights."""
    model_impl: str = "auto"
    trust_remote_code: bool = False
    language_model_only: bool = False
    """Whether the tower of a composite checkpoint is left out."""
    parallel: Parallel = field(default_factory=Parallel)
    max_len: int | None = None
    """The length of the longest sequence that will be served; None means the config's."""
    conversion: Conversion | None = None
    """The decision what the model is served as; None means the class that config.json names, unconverted."""
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    target: ServedModel | None = None
    """The model for which a drafter guesses that reads its hidden states; None: it is none."""
    method: str = ""
    """The way in which it guesses."""
    earlier: EarlierLoad = field(default_factory=EarlierLoad)
    """What need not be done again."""
    report: Callable[[float], None] = no_report
    """This is called with fractions up to 1 while weights are read."""

    @property
    def architecture(self) -> str:
        """The architecture whose class is built, and then converted if there is a conversion."""
        return self.config.architecture if self.conversion is None else self.conversion.architecture

    def setup(self) -> ModelSetup:
        most_ranks = most_ranks_of(self.config.num_heads, self.config.num_kv_heads)
        return ModelSetup(
            config=msgspec.structs.replace(self.config, architecture=self.architecture),
            folder=self.folder,
            max_len=self.max_len or self.config.max_len,
            parallel=replace(self.parallel, most_ranks=most_ranks),
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            load_format=self.load_format,
            pooling=self.pooling,
            target=self.target,
        )


def load_model(options: LoadOptions, upload: Upload | None = None) -> ServedModel:
    """Build the model from its config, and read its weights.

    `upload`: what brings them to a device that has memory of its own.
    """
    setup = options.setup()
    quantization = read_quantization(options.config)
    source = _open(options)
    _check_layers(setup.config, source)
    model_class = _model_class(options, setup.config)
    if quantization is not None and not _trusts_config(model_class):
        raise ConfigError(
            f"{options.folder}: a checkpoint of {quantization.method} needs model code of our own, and "
            f"{setup.config.architecture} has none here: use the model's unquantized checkpoint"
        )
    if source.tensors and _trusts_config(model_class) and not options.earlier.is_checked:
        _compare_headers(_build(model_class, setup), setup, source, options.dtype, quantization)
    model = _build(model_class, setup)
    if looks_ahead(setup.config) and getattr(model, "causal", True):
        raise ConfigError(
            f"config.json of this {setup.config.architecture} says that it attends in both directions, "
            f"and {type(model).__name__} cannot"
        )
    reading = Reading(
        source,
        device=options.device,
        dtype=options.dtype,
        quantization=quantization,
        report=options.report,
        upload=upload,
        is_checked=options.earlier.is_checked,
        has_packed=options.earlier.has_packed,
    )
    weights = Weights(reading)
    unused = _ignore_unused(weights, model, setup.config, quantization)
    if setup.parallel.rank == setup.parallel.stage == 0:  # of several ranks, one says so
        for line in unused:
            logger.info("%s", line)
        for warning in setup.config.warnings:
            logger.warning("%s", warning)
    load(model, weights)
    reading.finish()
    if options.earlier.has_packed:
        _check_memory(model)
    if setup.parallel.rank == setup.parallel.stage == 0 and (line := describe_experts(model)):
        logger.info("%s", line)
    return model


def compare_weights(options: LoadOptions, folder: str) -> str:
    """Compare the headers of a folder's files with the model of these options, which stays as it is.

    Returns what does not fit of names, shapes and types; empty if they may replace its weights.
    """
    form = "auto" if options.load_format == "dummy" else options.load_format
    options = replace(options, folder=Path(folder), load_format=form)
    setup, model_class = options.setup(), _model_class(options, options.setup().config)
    if not _trusts_config(model_class):
        return "weights of models that run on transformers' code are not replaced: start the server again"
    try:
        quantization, source = read_quantization(options.config), _open(options)
        _compare_headers(_build(model_class, setup), setup, source, options.dtype, quantization)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def open_base(options: LoadOptions) -> Weights:
    """Open the weights of a model that is loaded, to read some of them again in float32."""
    quantization = read_quantization(options.config)
    return Weights(
        Reading(_open(options), device=torch.device("cpu"), dtype=torch.float32, quantization=quantization)
    )


def _check_memory(model: nn.Module) -> None:
    """Refuse a model in which numbers are made of what nobody has read."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError("a matrix was read to be packed, and is not packed")


def _ignore_unused(
    weights: Weights, model: object, config: ModelConfig, quantization: Quantization | None
) -> list[str]:
    """Leave tensors unread that the model has no use for, and say which they are."""
    lines: list[str] = []
    if find_tower(model) is None and (beside := ignore_beside_text(weights, config)):
        lines.append(f"text alone is served: {beside / (1 << 30):.2f} GiB of weights for images are not read")
    if not isinstance(model, DraftHead) and (scopes := ignore_mtp(weights, config)):
        what = "the checkpoint's layers for multi-token prediction are not a part of the model itself"
        lines.append(f"{what}: {', '.join(scopes)}")
    if quantization is not None and (scales := ignore_scales_of_tensors(weights)):
        lines.append(f"{len(scales)} scales of inputs are used only where inputs of fp8 are rounded, on CUDA")
    return lines


def _open(options: LoadOptions) -> Source:
    if options.load_format != "dummy" and (parts := gguf_parts(options.folder)):
        return open_gguf(parts[0])
    if options.load_format != "dummy" and (files := made_weights(options.folder)):
        return open_ctranslate2(files[0])
    if options.load_format != "dummy" and was_made(options.folder):
        return renamed(open_source(options.folder, "auto"), options.config)
    if options.load_format != "dummy" and rotary_roberta.is_rotary(options.config):
        return rotary_roberta.renamed(open_source(options.folder, options.load_format))
    if options.load_format == "dummy" and options.device.type == "meta":
        return Dummy(options.seed, options.device, _stored_types(options))
    return open_source(options.folder, options.load_format, options.seed, options.device)


def _stored_types(options: LoadOptions) -> Mapping[str, str]:
    """The number types of a quantized checkpoint's tensors by name; none where its files are not there."""
    if options.config.quantization is None:
        return {}
    try:
        return open_source(options.folder, "auto").types
    except WeightsError:
        return {}


def _check_layers(config: ModelConfig, source: Source) -> None:
    """Refuse a number of layers for which there are not even tensors: to build them might never end."""
    shares = "num_hidden_groups" in config.raw  # ALBERT has the same weights in all layers
    if source.tensors and not shares and config.num_layers > len(source.tensors):
        raise ConfigError(
            f"config.json says that there are {config.num_layers} layers, and {source.place} holds "
            f"{len(source.tensors)} tensors in all"
        )


def _compare_headers(
    model: nn.Module,
    setup: ModelSetup,
    source: Source,
    dtype: torch.dtype,
    quantization: Quantization | None,
) -> None:
    """Have a model that is not used otherwise ask for its tensors, and compare with what there is."""
    reading = Reading(
        source, device=torch.device("cpu"), dtype=dtype, headers_only=True, quantization=quantization
    )
    weights = Weights(reading)
    _ignore_unused(weights, model, setup.config, quantization)
    try:
        with ops.unpacked():
            load(model, weights)
    except WeightsError:
        raise
    except Exception:  # others' classes may need numbers: what is wrong then shows when weights are read
        logger.debug("%s was not compared with the headers", type(model).__name__, exc_info=True)
    else:
        reading.finish()


def _build(model_class: type, setup: ModelSetup) -> Any:
    try:
        return model_class(setup)
    except (ValueError, OSError):
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"config.json does not describe a {setup.config.architecture}: {problem}"
        ) from error


def _trusts_config(model_class: type) -> bool:
    """Whether the class is built by the config alone: all are, but for the one that runs others' code."""
    return getattr(getattr(model_class, "base_class", model_class), "trusts_config", True)


def _model_class(options: LoadOptions, config: ModelConfig) -> type:
    if options.target is not None:
        config.require()
        base, head = getattr(options.target, "base", options.target), _HEADS[options.method]
        is_scoped = head is NextToken and getattr(base, "next_token_scope", "")
        return ScopedNextToken if is_scoped else head
    model_class = resolve(config, options.model_impl, options.trust_remote_code)
    if _trusts_config(model_class):
        config.require()
    if issubclass(model_class, TrunkForCausalLM):
        text_only = options.language_model_only
        model_class = with_tower_of(model_class, config.architecture, options.folder, text_only=text_only)
    return model_class if options.conversion is None else convert_class(model_class, options.conversion)


def begin_reading(options: LoadOptions) -> None:
    """Let this stage of the target of these options give out the streams that its drafter reads."""
    setup = options.setup()
    head = _model_class(options, setup.config)
    if issubclass(head, DraftHead):
        head.begin_reading(setup)


_NAMED = re.compile(r"(?:.+?\.)?mtp(?:_\w+)?(?=\.)")
_NUMBERED = re.compile(r"(?:.+?\.)?layers\.(\d+)(?=\.)")

_ENDINGS = (*(f".{name}_scale" for name in ("q", "k", "v", "kv", "input", "output")), "activation_scale")
"""Layers of attention read those of the cache, and matrices in fp8 those of their inputs, if they have a use
for them."""
_OF_INPUTS = (".input_scale", "activation_scale")


def ignore_beside_text(weights: Weights, config: ModelConfig) -> int:
    """Leave the weights for images unread, and return the number of their bytes."""
    composite = COMPOSITES.get(config.architecture)
    if composite is None:
        return 0
    weights.ignore(*composite.beside)
    starts = tuple(f"{scope}." for scope in composite.beside)
    reading = weights.reading
    return sum(_size(weights, name) for name in reading.names if name.startswith(starts))


def _size(weights: Weights, name: str) -> int:
    shape, kind = weights.reading.stored_shape(name), weights.reading.stored_type(name)
    dtype = getattr(torch, kind or "", None)
    return prod(shape or ()) * (dtype.itemsize if isinstance(dtype, torch.dtype) else 1)


def ignore_scales_of_tensors(weights: Weights) -> Collection[str]:
    """Let all scales but those of weights go unread; returns the names of those of inputs."""
    names = [name for name in weights.reading.names if name.endswith(_ENDINGS)]
    weights.ignore(*names)
    return [name for name in names if name.endswith(_OF_INPUTS)]


def ignore_mtp(weights: Weights, config: ModelConfig) -> list[str]:
    """Leave layers for multi-token prediction unread, and return their scopes, such as "model.layers.61".

    Qwen3-Next and MiMo call them `mtp` or `mtp_layers`; DeepSeek, GLM and Step number them on after the last
    layer of the model, and config.json says how many there are.
    """
    scopes = sorted(set(_scopes(weights.reading.names, config)))
    weights.ignore(*scopes)
    return scopes


def _scopes(names: Iterable[str], config: ModelConfig) -> Iterator[str]:
    count = config.raw.get("num_nextn_predict_layers")
    extra = range(config.num_layers, config.num_layers + count if isinstance(count, int) else 0)
    for name in names:
        if named := _NAMED.match(name):
            yield named[0]
        elif (numbered := _NUMBERED.match(name)) and int(numbered[1]) in extra:
            yield numbered[0]
