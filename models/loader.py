"""From a folder to a model that is ready to run: build it from its config, then let it pull its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from models.config import ModelConfig
from models.model import CausalLM, ModelSetup
from models.parallel import Parallel
from models.registry import resolve
from models.weights import WeightsError, load, no_report, open_weights


def load_model(
    config: ModelConfig,
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    model_impl: str = "auto",
    trust_remote_code: bool = False,
    parallel: Parallel = Parallel(),
    max_len: int | None = None,
    report: Callable[[float], None] = no_report,
) -> CausalLM:
    """`max_len`: the longest sequence to be served, if not the config's; `report` hears fractions up to 1."""
    quantization = config.raw.get("quantization_config")
    if isinstance(quantization, dict) and load_format != "dummy":
        raise WeightsError(
            f"{folder}: the weights are quantized ({quantization.get('quant_method', 'method not named')}), "
            "which is not supported; use the model's unquantized checkpoint"
        )
    setup = ModelSetup(
        config=config,
        folder=folder,
        max_len=max_len or config.max_len,
        parallel=parallel,
        trust_remote_code=trust_remote_code,
    )
    model = resolve(config.architecture, model_impl, trust_remote_code)(setup)
    weights = open_weights(folder, load_format, device=device, dtype=dtype, report=report)
    load(model, weights)
    weights.reading.finish()
    return model
