"""The choice of the folder that a model is read from."""

from __future__ import annotations

import pytest

from engine_core.config import EngineConfig
from engine_core.worker_config import find_checkpoint
from models.config import ConfigError


def test_a_file_cannot_be_chosen_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match="--quant says which GGUF file is meant, and demo has none"):
        find_checkpoint(EngineConfig(model="demo", quant="Q4_K_M"), lambda done: None)
