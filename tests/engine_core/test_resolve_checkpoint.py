"""The start of an engine: the folder of its model, and the sentence in which it says what it holds."""

import logging
from pathlib import Path

import pytest
from fake_worker import FakeExecutor
from model_facts import WORKER, changed

from engine_core.config import EngineConfig
from engine_core.engine import Engine
from engine_core.load_engine import _describe as describe  # pyright: ignore[reportPrivateUsage]
from engine_core.resolve_checkpoint import find_checkpoint
from models.config import ConfigError


def test_a_file_cannot_be_chosen_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match="--quant says which GGUF file is meant, and demo has none"):
        find_checkpoint(EngineConfig(model="demo", quant="Q4_K_M"), lambda done: None)


def test_a_generator_says_what_its_cache_holds() -> None:
    facts = changed(
        WORKER,
        dtype="bfloat16",
        num_blocks=400,
        max_model_len=2048,
        weight_bytes=5 << 29,
        kv_bytes=96 << 20,
        tasks=("generate", "embed"),
    )
    assert describe(facts) == (
        "ready on cpu in bfloat16: 2.5 GiB of weights, 96.0 MiB of KV cache "
        "(6400 tokens of 15.4 KiB, 3.1 requests of the full context length 2048), tasks generate, embed"
    )
    mapped = changed(facts, mapped_bytes=1 << 31)
    assert "2.5 GiB of weights (2.0 GiB mapped as packed before), 96.0" in describe(mapped)


def test_an_encoder_says_how_long_its_texts_may_be() -> None:
    facts = changed(WORKER, causal=False, num_blocks=0, max_model_len=512, weight_bytes=100, tasks=("embed",))
    assert describe(facts) == (
        "ready on cpu in float32: 100 bytes of weights, no KV cache (texts of up to 512 tokens), tasks embed"
    )


def test_people_read_the_sentence_in_the_log(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "engine_core")
    engine = Engine.start(EngineConfig(model=str(model)), lambda _: None, FakeExecutor)
    assert caplog.messages == [describe(engine.ready.worker)]


def test_an_adapter_in_place_of_a_model_is_refused_with_its_base() -> None:
    with pytest.raises(
        ConfigError, match=r"demo/shout is an adapter, .* its base, demo, with --lora-modules"
    ):
        find_checkpoint(EngineConfig(model="demo/shout"), lambda done: None)
