"""Experts in mxfp4, as gpt-oss has them, have the logits of the plain matrices that they mean."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drive import Driver, assert_logits, load_ranks
from packed import write_both
from safetensors.torch import load_file, save_file
from tiny import hf_logits, tiny_checkpoint
from torch import Tensor
from transformers.utils.quantization_config import Mxfp4Config

from models import ops
from models.config import read_config
from models.loader import LoadOptions, load_model
from models.ops.grouped_matrix import Grouped, Matrix
from models.parallel.experts import Placement
from models.weight_slices import WeightsError

PROMPT = [7, 80, 300, 12, 55, 9, 9]
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the three lower bits of a code mean; the fourth is the sign."""


def write_pair(folder: Path) -> tuple[Path, Path]:
    """Write a tiny gpt-oss whose experts are drawn as codes, and the plain one that they mean."""
    made = random.Random(1)

    def change(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return None
        blocks, scales, meant = drawn(tensor.shape, made)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}, meant

    shape = {"hidden_size": 64, "intermediate_size": 64}
    source = tiny_checkpoint("GptOssForCausalLM", folder / "of", **shape)
    return write_both(source, folder, {"quant_method": "mxfp4"}, change)


def drawn(shape: torch.Size, made: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales, and the plain tensor [E, inputs, outputs] that they mean."""
    members, inputs, outputs = shape
    blocks = torch.zeros(members, outputs, inputs // 32, 16, dtype=torch.uint8)
    scales = torch.zeros(members, outputs, inputs // 32, dtype=torch.uint8)
    plain = torch.zeros(members, inputs, outputs)
    for member in range(members):
        for output in range(outputs):
            for group in range(inputs // 32):
                power = made.randint(122, 126)
                codes = [made.randrange(16) for _ in range(32)]
                scales[member, output, group] = power
                packed = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
                blocks[member, output, group] = torch.tensor(packed, dtype=torch.uint8)
                meant = [SIZES[code & 7] * (-1) ** (code >> 3) * 2.0 ** (power - 127) for code in codes]
                plain[member, 32 * group : 32 * group + 32, output] = torch.tensor(meant)
    return blocks, scales, plain


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize(("ranks", "placement"), [(1, None), (4, None), (2, "linear")])
def test_logits_are_those_of_the_plain_checkpoint(
    pair: tuple[Path, Path], ranks: int, placement: Placement | None
) -> None:
    """Pieces of 4 ranks end within groups."""
    packed, plain = pair
    assert_logits(packed, hf_logits(plain, PROMPT), PROMPT, ranks, placement=placement)


def test_dummy_weights_are_packed_as_real_ones(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack, forms = ops.pack, []

    def note(*parts: Matrix, **how: Any) -> Tensor:
        forms.append([(part.kind, part.codes.shape) for part in parts if isinstance(part, Grouped)])
        return pack(*parts, **how)

    monkeypatch.setattr(ops, "pack", note)
    options = LoadOptions(read_config(pair[0]), pair[0], dtype=torch.float32)
    load_model(options)
    real, forms = forms, []
    logits = Driver([load_model(replace(options, load_format="dummy"))]).step({0: PROMPT})[0]
    assert forms == real
    assert sum(map(len, forms)) == 3 * 6 * 3  # layers, experts, and gate, up and down of each
    assert logits.isfinite().all()
    assert logits.std() > 0


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="transformers 5.18 makes other numbers of mxfp4",
)
def test_transformers_computes_the_same_from_the_packed_checkpoint(pair: tuple[Path, Path]) -> None:
    packed, plain = pair
    model = transformers.AutoModelForCausalLM.from_pretrained(
        packed,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )
    with torch.inference_mode():
        found = model.eval()(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(found, hf_logits(plain, PROMPT), atol=1e-5, rtol=1e-5)


def test_scales_that_are_no_numbers_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    packed, _ = pair
    for file in packed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.experts.down_proj_scales"][0, 3, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=r"model.safetensors: .*down_proj_scales has .* NaN; download"):
        load_ranks(tmp_path)
