"""Adapters beside a model: every kind of layer has PEFT's logits, and other rows keep their bits."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import AdaptedDriver
from adapter_files import Q_PROJ, write_adapter
from drive import Driver, load_ranks, run_in_chunks
from kernel_levels import BY_TURNS, table_of
from peft_adapters import make_adapter
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint
from torch import Tensor

from models import ops
from models.config import read_config
from models.lora_config import TENSORS_FILE, AdapterError

ALL = "all-linear"


@dataclass(frozen=True)
class Case:
    """A base, and the fields of an adapter's config."""

    architecture: str
    fields: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.architecture, *self.fields])


CASES = [
    Case(
        "LlamaForCausalLM",
        {"target_modules": ALL, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"up_proj": 3}},
    ),
    Case("Qwen2ForCausalLM", {"target_modules": ["k_proj", "down_proj"], "use_dora": True}),
    Case("Qwen2ForCausalLM", {"target_modules": ["v_proj"], "bias": "lora_only", "use_rslora": True}),
    Case("GPT2LMHeadModel", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    Case("Phi3ForCausalLM", {"target_modules": ALL}),
    Case(
        "LlamaForCausalLM", {"target_modules": ["lm_head", "o_proj"], "r": 9}, {"tie_word_embeddings": False}
    ),
    Case(
        "LlamaForCausalLM",
        {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
        {"tie_word_embeddings": False},
    ),
]
EMBEDDINGS = [
    Case(
        "LlamaForCausalLM",
        {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
        {"tie_word_embeddings": False},
    ),
    Case(
        "Qwen2ForCausalLM",
        {"target_modules": ["embed_tokens"], "use_dora": True},
        {"tie_word_embeddings": True},
    ),
    Case("GPT2LMHeadModel", {"target_modules": ["wte"], "r": 3}),
    Case("PhiForCausalLM", {"target_modules": ["lm_head"]}),  # PEFT saves the bias of such a head, too
    Case("LlamaForCausalLM", {"target_modules": ["embed_tokens"], "r": 1}),
    Case("Gemma2ForCausalLM", {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}),
]
TIED = Case(
    "Qwen2ForCausalLM",
    {"target_modules": ["lm_head", "v_proj"], "use_dora": True},
    {"tie_word_embeddings": True},
)
"""A head whose matrix is that of the embeddings, which stay what they are."""


PROMPT = random.Random(1).choices(range(5, 300), k=15)


@pytest.fixture(params=["reference", *BY_TURNS])
def operations(request: pytest.FixtureRequest) -> Iterator[None]:
    """The plain operations, or those of a level of C kernels."""
    ops.use({} if request.param == "reference" else table_of(request.param))
    yield
    ops.use({})


def check(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("operations")
@pytest.mark.parametrize("case", [*CASES[:-1], TIED, *EMBEDDINGS], ids=str)
def test_an_adapter_has_the_logits_of_peft(case: Case, tmp_path: Path) -> None:
    base = tiny_checkpoint(case.architecture, tmp_path / "base", **case.overrides)
    made = make_adapter(base, tmp_path / "adapter", **case.fields)
    plain = run_in_chunks(Driver(load_ranks(base)), 0, PROMPT, 7)
    for ranks in (1, 2):
        driver = AdaptedDriver(base, {3: made.folder}, ranks)
        driver.chosen[1] = (3, 0)
        check(run_in_chunks(driver, 1, PROMPT, 7), made.logits(PROMPT))
        if ranks == 1:
            assert torch.equal(run_in_chunks(driver, 0, PROMPT, 7), plain)
            assert driver.facts[0].bytes > 0


@pytest.mark.usefixtures("operations")
def test_a_row_has_the_same_bits_alone_and_in_any_company(tmp_path: Path) -> None:
    """The kernels' promise; torch's own products of other shapes are merely near."""
    base = tiny_checkpoint("Qwen2ForCausalLM", tmp_path / "base")
    fields: list[dict[str, Any]] = [
        {"r": 4, "target_modules": "all-linear"},
        {"r": 16, "target_modules": ["q_proj", "v_proj", "down_proj", "embed_tokens"]},
    ]
    folders = [
        make_adapter(base, tmp_path / f"{seed}", seed, **own).folder for seed, own in enumerate(fields, 1)
    ]
    for dtype in (torch.float32, torch.bfloat16):
        driver = AdaptedDriver(base, dict(enumerate(folders, 1)), dtype=dtype)
        driver.chosen = {0: (1, 0), 1: (2, 0), 3: (1, 0), 4: (2, 6)}
        alone = {row: run_in_chunks(driver, row, PROMPT, 15) for row in (0, 1, 2, 4)}
        again = AdaptedDriver(base, dict(enumerate(folders, 1)), dtype=dtype)
        again.chosen = {5: (1, 0), 6: (2, 0), 3: (1, 0), 7: (2, 6)}
        begun = again.step({3: PROMPT[:2], 6: PROMPT[:9], 2: PROMPT[:3], 5: PROMPT, 7: PROMPT[:8]})
        ended = again.step({6: PROMPT[9:], 7: PROMPT[8:], 2: PROMPT[3:], 3: PROMPT[2:4]})
        together = {0: begun[5], 1: [begun[6], ended[6]], 2: [begun[2], ended[2]], 4: [begun[7], ended[7]]}
        near = 1e-5 if dtype == torch.float32 else 0.3
        for row, pieces in together.items():
            found = pieces if isinstance(pieces, Tensor) else torch.cat(pieces)
            torch.testing.assert_close(found, alone[row], atol=near, rtol=0)
            if ops.linear is not ops.SPECIFIED["linear"]:
                assert torch.equal(found, alone[row])


def test_learned_positions_have_no_adapters(tmp_path: Path) -> None:
    driver = AdaptedDriver(tiny_checkpoint("GPT2LMHeadModel", tmp_path / "base"), {})
    shapes = {"transformer.wpe.lora_embedding_A": (4, 8), "transformer.wpe.lora_embedding_B": (16, 4)}
    with pytest.raises(AdapterError, match=r"no layer for transformer\.wpe of .* If it is this one"):
        driver.held[0].read(1, str(write_adapter(tmp_path / "adapter", shapes)))


def test_numbers_and_ranks_that_cannot_be_computed_with_are_refused(tmp_path: Path) -> None:
    base = tiny_checkpoint("LlamaForCausalLM", tmp_path / "base")
    driver, width = AdaptedDriver(base, {}), read_config(base).hidden_size
    folder = write_adapter(
        tmp_path / "a", {f"{Q_PROJ}.lora_A.weight": (4, width), f"{Q_PROJ}.lora_B.weight": (width, 2)}
    )
    with pytest.raises(AdapterError, match=rf"two ranks, A \[4, {width}\] and B \[{width}, 2\]"):
        driver.held[0].read(1, str(folder))
    shapes = {f"{Q_PROJ}.lora_A.weight": (4, width), f"{Q_PROJ}.lora_B.weight": (width, 4)}
    for number in (float("nan"), float("inf")):
        folder = write_adapter(tmp_path / "b", shapes)
        tensors = load_file(folder / TENSORS_FILE)
        next(iter(tensors.values()))[0, 0] = number
        save_file(tensors, folder / TENSORS_FILE)
        with pytest.raises(AdapterError, match="q_proj has NaN or infinite numbers"):
            driver.held[0].read(1, str(folder))


def test_what_finds_no_place_is_named_and_nothing_of_it_stays(tmp_path: Path) -> None:
    base = tiny_checkpoint("LlamaForCausalLM", tmp_path / "base")
    driver = AdaptedDriver(base, {})
    shapes = {"model.layers.0.mlp.gates.lora_A.weight": (4, 8)}
    with pytest.raises(
        AdapterError, match=r"no layer for model\.layers\.0\.mlp\.gates .*near it is model\.lay"
    ):
        driver.held[0].read(1, str(write_adapter(tmp_path / "a", shapes)))
    with pytest.raises(AdapterError, match=r"is \[8, 8\] in the adapter, and \[\d+, \d+\] in the model"):
        driver.held[0].read(1, str(write_adapter(tmp_path / "b")))
    with pytest.raises(AdapterError, match="only one of the matrices A and B"):
        driver.held[0].read(1, str(write_adapter(tmp_path / "c", {f"{Q_PROJ}.lora_A.weight": (4, 8)})))
    config = read_config(base)
    sizes = {"lora_A": (4, config.hidden_size), "lora_B": (config.vocab_size, 4)}
    sizes["base_layer"] = (config.vocab_size, config.hidden_size)
    shapes = {f"lm_head.{name}.weight": shape for name, shape in sizes.items()}
    with pytest.raises(AdapterError, match=r"it brings a full lm_head .* that is not the base's"):
        driver.held[0].read(1, str(write_adapter(tmp_path / "d", shapes)))
    shapes = {"model.embed_tokens.lora_embedding_A": (4, 8), "model.embed_tokens.lora_embedding_B": (16, 4)}
    with pytest.raises(
        AdapterError, match=r"embed_tokens is \[16, 8\] in the adapter, and \[\d+, \d+\] in the"
    ):
        driver.held[0].read(1, str(write_adapter(tmp_path / "e", shapes)))
    plain = run_in_chunks(Driver(load_ranks(base)), 0, PROMPT, 7)
    driver.chosen[0] = (1, 0)
    assert torch.equal(run_in_chunks(driver, 0, PROMPT, 7), plain)
