"""A checkpoint's text files, and frontends on a scripted engine."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zoo
from fake_client import FakeClient

from server.frontend.frontend import Frontend
from server.metrics.server_metrics import Metrics
from server.options.parse_server_options import parse

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 450,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 100,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": 7,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder with all that the server reads; there are no weights."""
    zoo.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [7, 8]}')
    return tmp_path


@pytest.fixture
async def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def make(client: FakeClient) -> Callable[..., Frontend]:
    """Makes a frontend whose engine has not answered yet."""

    def build(*flags: str) -> Frontend:
        config = parse(["some/model", "--served-model-name", "m", "other", *flags], {})
        return Frontend(config, client, Metrics("m"))  # pyright: ignore[reportArgumentType]

    return build


@pytest.fixture
def ready(
    client: FakeClient, folder: Path, make: Callable[..., Frontend]
) -> Callable[..., Awaitable[Frontend]]:
    """Makes a frontend whose engine is ready."""

    async def build(*flags: str) -> Frontend:
        frontend = make(*flags)
        client.locate(folder)
        client.become_ready()
        await frontend.start()
        return frontend

    return build


@pytest.fixture
async def frontend(ready: Callable[..., Awaitable[Frontend]]) -> Frontend:
    return await ready()
