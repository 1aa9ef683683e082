"""An adapter that is merged into its base as weights are read: the logits are PEFT's."""

import random
from pathlib import Path

import pytest
import torch
from adapter_files import write_adapter
from drive import Driver, load_ranks, run_in_chunks
from lora_cases import CASES, Case
from peft_adapters import make_adapter
from tiny import tiny_checkpoint

from models.lora.folder import is_adapter, make_folder
from models.lora_config import AdapterError

PROMPT = random.Random(1).choices(range(5, 300), k=15)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_sum_has_the_logits_of_peft(case: Case, tmp_path: Path) -> None:
    base = tiny_checkpoint(case.architecture, tmp_path / "base", **case.overrides)
    made = make_adapter(base, tmp_path / "adapter", **case.fields)
    assert is_adapter(made.folder)
    assert not is_adapter(base)
    folder = make_folder(made.folder, base, tmp_path)
    for ranks in (1, 2):
        logits = run_in_chunks(Driver(load_ranks(folder, ranks)), 0, PROMPT, 7)
        expected = made.logits(PROMPT).log_softmax(-1)
        torch.testing.assert_close(logits.log_softmax(-1), expected, atol=1e-4, rtol=0)


def test_what_finds_no_place_is_named(tmp_path: Path) -> None:
    base = tiny_checkpoint("LlamaForCausalLM", tmp_path / "base")
    module = "model.layers.0.self_attn.query_proj"
    shapes = {f"{module}.lora_A.weight": (4, 8), f"{module}.lora_B.weight": (8, 4)}
    folder = make_folder(write_adapter(tmp_path / "a", shapes), base, tmp_path)
    near = (
        r"has no layer for model\.layers\.0\.self_attn\.query_proj .*near it is model\.layers\.0\.self_attn\."
    )
    with pytest.raises(AdapterError, match=near):
        load_ranks(folder)
    folder = make_folder(write_adapter(tmp_path / "b"), base, tmp_path)
    with pytest.raises(AdapterError, match=r"is \[8, 8\] in the adapter, and \[\d+, \d+\] in the base"):
        load_ranks(folder)
