"""Quantized checkpoints, written by plain loops over words as the formats' own documents describe them.

Nothing of the code under test is used. A tiny model's matrices are drawn as codes, scales and zero points:
one folder gets them packed, and a second one the plain matrices that they mean, which transformers can read.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_checkpoint
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight neighbours, that each nibble of a word of AWQ holds."""


@dataclass(frozen=True)
class Drawn:
    """A matrix [N, K] of numbers `scale * (code - zero)`, with a scale and a zero for each group of a row."""

    codes: list[list[int]]
    zeros: list[list[int]]
    scales: Tensor  # [N, G]
    group_of: list[int]

    def plain(self) -> Tensor:
        """The matrix [N, K] float32 that the numbers mean."""
        groups = torch.tensor(self.group_of)
        zeros = torch.tensor(self.zeros)[:, groups]
        return (torch.tensor(self.codes) - zeros).float() * self.scales.float()[:, groups]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a checkpoint is quantized."""

    method: str
    bits: int = 4
    group: int = -1
    symmetric: bool = True
    act_order: bool = False
    head: bool = False
    version: int = 1
    channels: bool = True
    """compressed-tensors: a scale for each row, not one for the whole matrix."""
    plain: tuple[str, ...] = ()
    """Ends of the names of modules that stay as they are."""
    other: dict[str, int] = field(default_factory=dict)
    """Bits of modules whose names end so, where they are others'."""
    scales: torch.dtype = torch.float16

    def __str__(self) -> str:
        words = [self.method, f"{self.bits}", f"g{self.group}", "" if self.symmetric else "asym"]
        words += ["order" if self.act_order else "", "head" if self.head else "", f"v{self.version}"]
        return "-".join(word for word in words if word)


def draw(recipe: Recipe, plain: Tensor, made: random.Random, bits: int) -> Drawn:
    """Draw codes near a plain matrix, with scales that suit it."""
    outputs, inputs = plain.shape
    size = recipe.group if recipe.group > 0 else inputs
    groups = -(-inputs // size)
    group_of = [column // size for column in range(inputs)]
    if recipe.act_order:
        made.shuffle(group_of)
    middle = 1 << (bits - 1)
    largest = plain.abs().amax(1, keepdim=True).expand(outputs, groups)
    scales = largest / middle * torch.tensor([[made.uniform(0.8, 1.2)] * groups for _ in range(outputs)])
    if not recipe.channels:
        scales = scales[:1, :1].expand(outputs, groups)
    scales = scales.to(recipe.scales)
    low, high = (1, (1 << bits) - 1) if recipe.version == 1 else (0, (1 << bits) - 1)
    ends = [middle, middle + 1, middle - 2, *((low, high) if bits == 4 else ())]
    zeros = [
        [middle if recipe.symmetric else made.choice(ends) for _ in range(groups)] for _ in range(outputs)
    ]
    if not recipe.channels:
        zeros = [[zeros[0][0]] * groups for _ in range(outputs)]
    steps = plain / scales.float()[:, torch.tensor(group_of)]
    centre = torch.tensor(zeros)[:, torch.tensor(group_of)]
    codes = (steps + centre).round().clamp(0, (1 << bits) - 1).int()
    return Drawn(codes.tolist(), zeros, scales.contiguous(), group_of)


def nearest(recipe: Recipe, plain: Tensor, bits: int) -> Drawn:
    """Round a plain matrix to the nearest codes, with the least scales that hold each group."""
    inputs = plain.shape[1]
    size = recipe.group if recipe.group > 0 else inputs
    if inputs % size:
        raise ValueError(f"{inputs} inputs cannot be divided into groups of {size}")
    groups, most = plain.float().unflatten(1, (-1, size)), (1 << bits) - 1
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    middle = 1 << (bits - 1)
    if recipe.symmetric:
        scales = (torch.maximum(-low, high) / (middle - 0.5)).to(recipe.scales)
        zeros = torch.full_like(low, middle)
    else:
        scales = ((high - low) / most).to(recipe.scales)
        zeros = (-low / scales.float()).round().clamp(recipe.version == 1, most)
    steps = groups / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)
    codes = steps.round().clamp(0, most).int().flatten(1)
    group_of = [column // size for column in range(inputs)]
    return Drawn(codes.tolist(), zeros.int().tolist(), scales.contiguous(), group_of)


def words(codes: Iterable[int], bits: int) -> list[int]:
    """Pack numbers into words of 32 bits, the first into the lowest bits, as signed numbers."""
    packed: list[int] = []
    for place, code in enumerate(codes):
        slot = place % (32 // bits)
        if slot == 0:
            packed.append(0)
        packed[-1] |= (code & ((1 << bits) - 1)) << (bits * slot)
    return [word - (1 << 32) if word >= 1 << 31 else word for word in packed]


def columns(matrix: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*matrix, strict=True)]


def gptq(name: str, drawn: Drawn, recipe: Recipe, bits: int) -> dict[str, Tensor]:
    less = 1 if recipe.version == 1 else 0
    by_inputs = [words(row, bits) for row in drawn.codes]  # [N][K / each]
    zeros = [
        words((zero - less for zero in column), bits) for column in columns(drawn.zeros)
    ]  # [G][N / each]
    return {
        f"{name}.qweight": torch.tensor(columns(by_inputs), dtype=torch.int32),
        f"{name}.qzeros": torch.tensor(zeros, dtype=torch.int32),
        f"{name}.scales": drawn.scales.t().contiguous(),
        f"{name}.g_idx": torch.tensor(drawn.group_of, dtype=torch.int32),
    }


def awq(name: str, drawn: Drawn, recipe: Recipe, bits: int) -> dict[str, Tensor]:
    def by_outputs(column: list[int]) -> list[int]:
        blocks = [column[start : start + 8] for start in range(0, len(column), 8)]
        return words((block[output] for block in blocks for output in AWQ_ORDER), bits)

    return {
        f"{name}.qweight": torch.tensor(
            [by_outputs(each) for each in columns(drawn.codes)], dtype=torch.int32
        ),
        f"{name}.qzeros": torch.tensor(
            [by_outputs(each) for each in columns(drawn.zeros)], dtype=torch.int32
        ),
        f"{name}.scales": drawn.scales.t().contiguous(),
    }


def pack_quantized(name: str, drawn: Drawn, recipe: Recipe, bits: int) -> dict[str, Tensor]:
    outputs, inputs = len(drawn.codes), len(drawn.group_of)
    tensors = {
        f"{name}.weight_packed": torch.tensor([words(row, bits) for row in drawn.codes], dtype=torch.int32),
        f"{name}.weight_scale": drawn.scales,
        f"{name}.weight_shape": torch.tensor([outputs, inputs]),
    }
    if not recipe.symmetric:
        by_outputs = [words(column, bits) for column in columns(drawn.zeros)]  # [G][N / each]
        zeros = torch.tensor(columns(by_outputs), dtype=torch.int32)
        tensors[f"{name}.weight_zero_point"] = zeros
    if recipe.act_order:
        tensors[f"{name}.weight_g_idx"] = torch.tensor(drawn.group_of, dtype=torch.int32)
    return tensors


def int_quantized(name: str, drawn: Drawn, recipe: Recipe, bits: int) -> dict[str, Tensor]:
    middle = 1 << (bits - 1)
    tensors = {
        f"{name}.weight": torch.tensor(
            [[code - middle for code in row] for row in drawn.codes], dtype=torch.int8
        ),
        f"{name}.weight_scale": drawn.scales if recipe.channels else drawn.scales[0, :1].clone(),
    }
    if not recipe.symmetric:
        zeros = torch.tensor([[zero - middle for zero in row] for row in drawn.zeros], dtype=torch.int8)
        tensors[f"{name}.weight_zero_point"] = zeros if recipe.channels else zeros[0, :1].clone()
    return tensors


Writer = Callable[[str, Drawn, Recipe, int], dict[str, Tensor]]
WRITERS: dict[str, Writer] = {
    "gptq": gptq,
    "awq": awq,
    "auto-round": gptq,
    "pack-quantized": pack_quantized,
    "int-quantized": int_quantized,
}


def config_of(recipe: Recipe) -> dict[str, object]:
    """The field `quantization_config`."""
    if recipe.method == "gptq":
        dynamic: dict[str, object] = {f"-:.*{name}$": {} for name in recipe.plain}
        dynamic |= {f"+:.*{name}$": {"bits": bits} for name, bits in recipe.other.items()}
        return {
            "quant_method": "gptq",
            "bits": recipe.bits,
            "group_size": recipe.group,
            "desc_act": recipe.act_order,
            "sym": recipe.symmetric,
            "checkpoint_format": "gptq" if recipe.version == 1 else "gptq_v2",
            "lm_head": recipe.head,
            "dynamic": dynamic,
        }
    if recipe.method == "awq":
        kept = [*recipe.plain, *([] if recipe.head else ["lm_head"])]
        sizes = {"bits": recipe.bits, "group_size": recipe.group, "version": "gemm"}
        return {"quant_method": "awq", "zero_point": True, "modules_to_not_convert": kept, **sizes}
    if recipe.method == "auto-round":
        own = {f".*{name}": {"bits": 16} for name in recipe.plain}
        own |= {f".*{name}": {"bits": bits} for name, bits in recipe.other.items()}
        sizes = {"bits": recipe.bits, "group_size": recipe.group, "sym": recipe.symmetric}
        return {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "extra_config": own,
            **sizes,
        }
    strategy = "group" if recipe.group > 0 else "channel" if recipe.channels else "tensor"

    def group(targets: list[str], bits: int) -> dict[str, object]:
        weights = {"num_bits": bits, "type": "int", "symmetric": recipe.symmetric, "strategy": strategy}
        sizes = {"group_size": recipe.group if recipe.group > 0 else None}
        order = {"actorder": "group" if recipe.act_order else None}
        return {"targets": targets, "weights": weights | sizes | order}

    groups = {"group_0": group(["Linear"], recipe.bits)}
    for index, (name, bits) in enumerate(recipe.other.items(), start=1):
        groups[f"group_{index}"] = group([f"re:.*{name}$"], bits)
    return {
        "quant_method": "compressed-tensors",
        "format": recipe.method,
        "config_groups": groups,
        "ignore": [*([] if recipe.head else ["lm_head"]), *(f"re:.*{name}" for name in recipe.plain)],
    }


@dataclass(frozen=True)
class Pair:
    """Two folders with the same model: packed, and plain."""

    packed: Path
    plain: Path
    recipe: Recipe


def write_pair(folder: Path, recipe: Recipe, arch: str = "LlamaForCausalLM", **shape: object) -> Pair:
    """Write a tiny model of `arch`, quantized by `recipe`, and the plain one that it means."""
    plain, packed = tiny_checkpoint(arch, folder / "plain", **shape), folder / "packed"
    made = random.Random(1)
    meant = _write(plain, packed, recipe, lambda tensor, bits: draw(recipe, tensor, made, bits))
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    return Pair(packed, plain, recipe)


def write_near(plain: Path, folder: Path, recipe: Recipe) -> Path:
    """Quantize a checkpoint as it is, each number to its nearest code."""
    _write(plain, folder, recipe, lambda tensor, bits: nearest(recipe, tensor, bits))
    return folder


def _write(
    plain: Path, packed: Path, recipe: Recipe, choose: Callable[[Tensor, int], Drawn]
) -> dict[str, Tensor]:
    """Write the quantized checkpoint, and return the plain tensors that it means."""
    packed.mkdir()
    for file in plain.iterdir():
        if file.is_file():
            (packed / file.name).write_bytes(file.read_bytes())
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in list(tensors.items()):
        module = name.removesuffix(".weight")
        if tensor.dim() != 2 or not is_quantized(module, recipe):
            stored[name] = tensor
            continue
        bits = next((bits for end, bits in recipe.other.items() if module.endswith(end)), recipe.bits)
        drawn = choose(tensor, bits)
        stored |= WRITERS[recipe.method](module, drawn, recipe, bits)
        tensors[name] = drawn.plain()
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    change_config(packed, quantization_config=config_of(recipe))
    return tensors


def is_quantized(module: str, recipe: Recipe) -> bool:
    if "embed" in module or (module.endswith("lm_head") and not recipe.head):
        return False
    return not module.endswith(recipe.plain) if recipe.plain else True


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


Change = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None]
"""The type of a function that makes stored tensors of a plain one, and the plain one that they mean."""


def write_both(source: Path, folder: Path, config: Mapping[str, object], change: Change) -> tuple[Path, Path]:
    """Write a plain checkpoint as `change` stores its tensors, and the plain one that this means."""
    packed, plain = (shutil.copytree(source, folder / each) for each in ("packed", "plain"))
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        made, meant[name] = change(name, tensor) or ({name: tensor}, tensor)
        stored |= {name: each.contiguous() for name, each in made.items()}
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    change_config(packed, quantization_config=config)
    return packed, plain
