"""Loading: a model is built from its config, then pulls its weights from the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

import msgspec
import torch

from models.checkpoint.mtp import ignore_mtp
from models.checkpoint.weights import Weights, WeightsError, load, no_report, open_weights
from models.config import ConfigError, ModelConfig
from models.conversion.class_adapters import adapt
from models.conversion.served_as import Conversion, looks_ahead
from models.model import ModelSetup, ServedModel
from models.parallel.parallel import Parallel
from models.parallel.shares import most_ranks_of
from models.pooling.config import PoolingConfig
from models.registry import resolve

logger = logging.getLogger(__name__)


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
    parallel: Parallel = field(default_factory=Parallel)
    max_len: int | None = None
    """The length of the longest sequence that will be served; None means the config's."""
    conversion: Conversion | None = None
    """The decision what the model is served as; None means the class that config.json names, unconverted."""
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
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
            trust_remote_code=self.trust_remote_code,
            load_format=self.load_format,
            pooling=self.pooling,
        )


def load_model(options: LoadOptions) -> ServedModel:
    """Build the model from its config, and read its weights."""
    setup = options.setup()
    _refuse_quantized(options)
    model = _model_class(options, setup.config)(setup)
    if looks_ahead(setup.config) and getattr(model, "causal", True):
        raise ConfigError(
            f"config.json of this {setup.config.architecture} says that it attends in both directions, "
            f"and {type(model).__name__} cannot"
        )
    weights = open_weights(
        options.folder,
        options.load_format,
        device=options.device,
        dtype=options.dtype,
        seed=options.seed,
        report=options.report,
    )
    _ignore_mtp(weights, setup)
    load(model, weights)
    weights.reading.finish()
    return model


def _model_class(options: LoadOptions, config: ModelConfig) -> type:
    model_class = resolve(config, options.model_impl, options.trust_remote_code)
    if getattr(model_class, "trusts_config", True):  # all do, but for the one that runs transformers' code
        config.require()
    return model_class if options.conversion is None else adapt(model_class, options.conversion)


def _refuse_quantized(options: LoadOptions) -> None:
    quantization = options.config.raw.get("quantization_config")
    if isinstance(quantization, dict) and options.load_format != "dummy":
        raise WeightsError(
            f"{options.folder}: the weights are quantized "
            f"({quantization.get('quant_method', 'method not named')}), which is not supported; use the "
            "model's unquantized checkpoint"
        )


def _ignore_mtp(weights: Weights, setup: ModelSetup) -> None:
    scopes = ignore_mtp(weights, setup.config)
    if scopes and setup.parallel.rank == setup.parallel.stage == 0:  # of several ranks, one says so
        logger.info("the checkpoint's layers for multi-token prediction are not used: %s", ", ".join(scopes))
