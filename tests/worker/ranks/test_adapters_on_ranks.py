"""Adapters of models that are spread over real ranks and stages: each rank takes of them what is its own."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from drafted import SIZES, answer, opened
from fake_adapters import adapter
from peft_adapters import make_adapter
from ranks import Layout, Ranks, make
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint

from engine_core.adapters.messages import Adapter
from engine_core.engine import Engine
from engine_core.protocol import AddRequest
from models.lora_config import TENSORS_FILE
from worker.protocol import Sampling

PROMPTS = [list(range(20 + 5 * row, 20 + 5 * row + 4 + 6 * row)) for row in range(4)]
LORA: dict[str, Any] = {"enable_lora": True, "max_cpu_loras": 4}


def load(engine: Engine, adapters: list[Adapter]) -> list[str]:
    """Load adapters, and return the errors."""
    table = engine.intake.adapters
    assert table is not None
    for each in adapters:
        table.load(each)
    errors: list[str] = []
    while table.is_busy:
        engine.step()
        errors += [state.error for state in table.take_states() if state.error]
    return errors


def write_other_layers(folder: Path, to: Path) -> None:
    """Write an adapter whose last layer is one that the model has not."""
    shutil.copytree(folder, to)
    tensors = load_file(to / TENSORS_FILE)
    save_file(
        {name.replace("layers.3.", "layers.4."): each for name, each in tensors.items()}, to / TENSORS_FILE
    )


def asked(adapters: list[Adapter]) -> list[AddRequest]:
    """Each prompt for the base and for each adapter."""
    params = Sampling(max_tokens=5, temperature=0, logprobs=0)
    chosen = ["", *(each.digest for each in adapters)]
    pairs = [(prompt, digest) for prompt in PROMPTS for digest in chosen]
    return [
        AddRequest(id=id, tokens=tokens, params=params, adapter=by) for id, (tokens, by) in enumerate(pairs)
    ]


@pytest.mark.parametrize("layout", [Layout(2), Layout(1, 2), Layout(2, 2)], ids=str)
def test_sequences_with_adapters_have_the_answers_of_one_worker(
    layout: Layout, ranks: Ranks, tmp_path: Path
) -> None:
    base = tiny_checkpoint("LlamaForCausalLM", tmp_path / "base", num_hidden_layers=4)
    fields = ({"target_modules": "all-linear"}, {"target_modules": ["v_proj"], "layers_to_transform": [3]})
    folders = [
        make_adapter(base, tmp_path / f"a{seed}", seed, **each).folder for seed, each in enumerate(fields, 1)
    ]
    adapters = [adapter(folder) for folder in folders]
    unfit = tmp_path / "unfit"
    write_other_layers(folders[1], unfit)
    with opened(base, **SIZES, **LORA) as engine:
        assert not load(engine, adapters)
        expected = answer(engine, asked(adapters))
    assert len({tuple(tokens) for tokens, _ in expected}) > len(PROMPTS), "adapters change answers"
    cut = {"pipeline_parallel_size": layout.stages, "tensor_parallel_size": layout.tensor}
    with opened(base, None, make(ranks, layout, []), **SIZES, **LORA, **cut) as engine:
        [error] = load(engine, [adapter(unfit)])
        assert "the model has no layer for model.layers.4.self_attn.v_proj" in error
        assert not load(engine, adapters)
        found = answer(engine, asked(adapters))
    for (tokens, logprobs), (others, wanted) in zip(found, expected, strict=True):
        assert tokens == others
        for one, other in zip(logprobs, wanted, strict=True):
            assert one.values == pytest.approx(other.values, abs=1e-5)
