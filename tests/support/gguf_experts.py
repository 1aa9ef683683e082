"""Tensors of checkpoints as llama.cpp's converter has them where it does more than to rename them: experts.

Nothing of the code under test is used.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_EXPERT = re.compile(r"(?:model|backbone)\.layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight")
_ALL = re.compile(
    r"model\.layers\.(\d+)\.(?:block_sparse_moe|mlp\.experts)"
    r"\.(input_linear|output_linear|gate_up_proj|down_proj)(?:\.weight|(_bias))?"
)
_SHARED = re.compile(r"model\.layers\.(\d+)\.shared_mlp\.input_linear\.weight")
_CORRECTION = re.compile(r"(?:model|backbone)\.layers\.(\d+)\..*e_score_correction_bias")
_SINKS = re.compile(r"model\.layers\.(\d+)\.self_attn\.sinks")
_STREAMS = re.compile(r"model\.(altup_\w+)\.(\d+)\.weight")
_PARTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


@dataclass(frozen=True)
class Stack:
    """A tensor of the file: one of the checkpoint's, a part of one, or several."""

    name: str
    """The name in the file."""
    views: list[Tensor]
    """Views of the checkpoint's tensors. Several are laid on each other."""

    @property
    def tensor(self) -> Tensor:
        return self.views[0] if len(self.views) == 1 else torch.stack(self.views)

    def write(self, meant: Tensor) -> None:
        """Write into the checkpoint what the file means."""
        for view, each in zip(self.views, [meant] if len(self.views) == 1 else meant, strict=True):
            view.copy_(each.view(view.shape))


_GEMMA4 = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
}
"""Gemma 3n's and 4's tensors whose names end otherwise than in a kind."""


def take_stacks(tensors: Mapping[str, Tensor], fused: bool) -> tuple[set[str], list[Stack]]:
    """Find the tensors that the converter renames or puts together: their names, and what becomes of them."""
    stacks: dict[str, dict[int, Tensor]] = {}
    taken: set[str] = set()
    for name, tensor in tensors.items():
        for number, (stored, view) in _found(name, tensor):
            taken.add(name)
            stacks.setdefault(stored, {})[number] = view
    found = [Stack(name, [views[number] for number in sorted(views)]) for name, views in stacks.items()]
    return taken, list(_fused(found)) if fused else found


def _found(name: str, tensor: Tensor) -> Iterator[tuple[int, tuple[str, Tensor]]]:
    if match := _EXPERT.fullmatch(name):
        yield int(match[2]), (f"blk.{match[1]}.ffn_{_PARTS[match[3]]}_exps.weight", tensor)
    elif match := _ALL.fullmatch(name):
        kind = "bias" if match[3] else "weight"
        if kind == "weight" and match[2] in ("gate_up_proj", "down_proj"):
            tensor = tensor.transpose(1, 2)
        halves = {"down": tensor}
        if match[2] == "input_linear":
            halves = dict(zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True))
        elif match[2] == "gate_up_proj":
            halves = {"gate": tensor[:, ::2], "up": tensor[:, 1::2]}
        for part, view in halves.items():
            yield 0, (f"blk.{match[1]}.ffn_{part}_exps.{kind}", view)
    elif match := _STREAMS.fullmatch(name):
        short = match[1].replace("unembed", "unembd").replace("projections", "proj")
        yield int(match[2]), (f"{short}.weight", tensor)
    elif match := _SHARED.fullmatch(name):
        for part, view in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield 0, (f"blk.{match[1]}.ffn_{part}_shexp.weight", view)
    elif match := _CORRECTION.fullmatch(name):
        yield 0, (f"blk.{match[1]}.exp_probs_b.bias", tensor.view(-1))
    elif match := _SINKS.fullmatch(name):
        yield 0, (f"blk.{match[1]}.attn_sinks.weight", tensor)
    elif (own := ".".join(name.split(".")[3:])) in _GEMMA4:
        yield 0, (f"blk.{name.split('.')[2]}.{_GEMMA4[own]}", tensor)
    elif name.endswith("shared_expert_gate.weight"):
        layer = name.split(".")[2]
        yield 0, (f"blk.{layer}.ffn_gate_inp_shexp.weight", tensor.view(-1))


class _Pair(Stack):
    """Gates and ups in one tensor, the gate of an expert before its up."""

    @property
    def tensor(self) -> Tensor:
        count = len(self.views) // 2
        return torch.cat([torch.stack(self.views[:count]), torch.stack(self.views[count:])], dim=1)

    def write(self, meant: Tensor) -> None:
        both = [each for half in meant.chunk(2, dim=1) for each in half]
        for view, each in zip(self.views, both, strict=True):
            view.copy_(each)


def _fused(stacks: list[Stack]) -> Iterator[Stack]:
    ups = {stack.name: stack for stack in stacks if "ffn_up_exps" in stack.name}
    for stack in stacks:
        if "ffn_gate_exps" in stack.name:
            up = ups[stack.name.replace("gate", "up")]
            yield _Pair(stack.name.replace("gate", "gate_up"), [*stack.views, *up.views])
        elif stack.name not in ups:
            yield stack
