"""From a folder to a model that is ready to run: build it from its config, then let it pull its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from models.checkpoint.mtp import ignore_mtp
from models.checkpoint.weights import WeightsError, load, no_report, open_weights
from models.config import ConfigError, ModelConfig
from models.conversion.class_adapters import adapt
from models.conversion.served_as import Conversion, looks_ahead
from models.model import ModelSetup, ServedModel
from models.parallel.parallel import Parallel
from models.pooling.config import PoolingConfig
from models.registry import resolve

logger = logging.getLogger(__name__)


def load_model(
    config: ModelConfig,
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    seed: int = 0,
    model_impl: str = "auto",
    trust_remote_code: bool = False,
    parallel: Parallel = Parallel(),
    max_len: int | None = None,
    conversion: Conversion | None = None,
    pooling: PoolingConfig | None = None,
    report: Callable[[float], None] = no_report,
) -> ServedModel:
    """`conversion`: what the model is to be, and `pooling` how; without, it is what config.json names.

    `max_len`: the longest sequence to be served, if not the config's; `report` hears fractions up to 1;
    `seed`: of dummy weights.
    """
    quantization = config.raw.get("quantization_config")
    if isinstance(quantization, dict) and load_format != "dummy":
        raise WeightsError(
            f"{folder}: the weights are quantized ({quantization.get('quant_method', 'method not named')}), "
            "which is not supported; use the model's unquantized checkpoint"
        )
    if conversion is not None:
        config = msgspec.structs.replace(config, architecture=conversion.architecture)
    model_class = resolve(config, model_impl, trust_remote_code)
    if conversion is not None:
        model_class = adapt(model_class, conversion)
    setup = ModelSetup(
        config=config,
        folder=folder,
        max_len=max_len or config.max_len,
        parallel=parallel,
        trust_remote_code=trust_remote_code,
        load_format=load_format,
        pooling=pooling or PoolingConfig(),
    )
    model = model_class(setup)
    if looks_ahead(config) and getattr(model, "causal", True):
        raise ConfigError(
            f"config.json of this {config.architecture} says that it attends in both directions, "
            f"and {model_class.__name__} cannot"
        )
    weights = open_weights(folder, load_format, device=device, dtype=dtype, seed=seed, report=report)
    if (scopes := ignore_mtp(weights, config)) and parallel.rank == parallel.stage == 0:
        logger.info("the checkpoint's layers for multi-token prediction are not used: %s", ", ".join(scopes))
    load(model, weights)
    weights.reading.finish()
    return model
