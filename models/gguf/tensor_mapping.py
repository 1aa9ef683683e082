"""Maps tensors of a GGUF file to the model's own checkpoint, and undoes what a converter changed.

No torch.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from models.gguf.file import GgufFile, GgufTensor, Value
from models.gguf.tensor_names import ARCHITECTURES, Architecture
from models.plain_files import FileError, shown
from models.quantization.methods.gguf import CODINGS, PLAIN

_LAYER = re.compile(r"blk\.(\d{1,6})\.((?:nextn\.|shortconv\.)?\w+)(?:\.(\w+))?")
_CONFIG_TENSORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors that say how a rotation is stretched: the config has their numbers."""
_MOST_EXPERTS = 4096
"""Experts of a layer beyond which a file is taken for broken: eight times any model's."""


@dataclass(frozen=True)
class Place:
    """A tensor's name in the checkpoint, and what was changed in it."""

    name: str
    heads: int = 0
    """The heads whose rows were interleaved; 0: rows are as they were."""
    shift: float = 0.0
    """A number that was added."""
    transposed: bool = False
    is_exponent: bool = False
    """Whether the file has minus e to the power of the numbers."""
    first: int = 0
    """The first of the numbers in the file's tensor that belong to this one."""
    shape: tuple[int, ...] | None = None
    """The shape of these numbers; None: that of the file's tensor, all of whose numbers they are."""


def placed_tensors(file: GgufFile) -> Iterator[tuple[Place, GgufTensor]]:
    """All tensors of a file that belong to the model's weights. Raises FileError if one cannot be read."""
    scope = str(file.metadata["general.architecture"])  # `raw_config` has refused those that are not read
    known = ARCHITECTURES[scope]
    for tensor in file.tensors.values():
        if tensor.name.partition(".")[0] in _CONFIG_TENSORS:
            continue
        if tensor.coding not in (*PLAIN, *CODINGS):
            raise FileError(
                f"{tensor.file}: the tensor {shown(tensor.name)} is stored as {tensor.coding}, which is not "
                f"read, but only {', '.join((*PLAIN, *CODINGS))}: use another file of the model, such as "
                "one of Q4_K_M or Q8_0"
            )
        for place in _places(tensor, known, scope, file.metadata):
            yield place, tensor


def _places(
    tensor: GgufTensor, known: Architecture, scope: str, metadata: Mapping[str, Value]
) -> Iterator[Place]:
    """The places of what a tensor holds: one, unless it holds something of each expert of a layer."""
    if tensor.name in known.stacks and len(tensor.shape) == 3 and tensor.shape[0] <= _MOST_EXPERTS:
        for number in range(tensor.shape[0]):
            first, name = number * prod(tensor.shape[1:]), known.stacks[tensor.name].format(number)
            yield Place(name, first=first, shape=tensor.shape[1:])
        return
    found = _LAYER.fullmatch(tensor.name)
    of_all = found is not None and f"{found[2]}.{found[3]}" in known.tensors
    if found is None or found[2] not in known.experts or of_all:
        yield _place(tensor, known, f"{scope}.attention", metadata)
        return
    modules, field = known.experts[found[2]], f"{scope}.expert_count"
    count = next(iter(tensor.shape), 0)
    if metadata.get(field) != count:
        raise FileError(
            f"{tensor.file}: {tensor.name} has something of {count} experts, and {field} is "
            f"{metadata.get(field)}"
        )
    rows, rest = divmod(tensor.shape[1] if len(tensor.shape) > 1 else 0, len(modules))
    divided = len(tensor.shape) < 3 and tensor.coding not in PLAIN  # a block may lie in two modules
    if rest or divided or not prod(tensor.shape) or count > _MOST_EXPERTS:
        raise FileError(
            f"{tensor.file}: {tensor.name} has the shape {list(tensor.shape)}, not one of experts"
        )
    shape = (rows, *tensor.shape[2:])
    for number in range(count):
        for index, module in enumerate(modules):
            name = f"{known.layers}.{found[1]}.{module.format(number)}.{found[3]}"
            yield Place(name, first=(number * len(modules) + index) * prod(shape), shape=shape)


def _place(tensor: GgufTensor, known: Architecture, scope: str, metadata: Mapping[str, Value]) -> Place:
    found = _LAYER.fullmatch(tensor.name)
    shifted = known.shifted_norms and tensor.name.endswith("norm.weight")
    shift = 1.0 if shifted and not (found and found[2] in known.plain_norms) else 0.0
    if found is None:
        module, _, kind = tensor.name.rpartition(".")
        name = f"{known.modules[module]}.{kind}" if module in known.modules else tensor.name
        is_row = module in known.of_one_row and kind == "weight" and len(tensor.shape) == 1
        return Place(name, 0, shift, shape=(1, *tensor.shape) if is_row else None)
    layer, part, kind = found.groups()
    own = part if kind is None else f"{part}.{kind}"
    if own in known.tensors:
        flat = (prod(tensor.shape),) if part in known.flat else None
        name = f"{known.layers}.{layer}.{known.tensors[own]}"
        return Place(name, is_exponent=part in known.exponents, shape=flat)
    if kind is None or part not in known.parts:
        return Place(tensor.name)
    heads = 0
    if part in known.neighbours:
        field = "head_count_kv" if part == "attn_k" else "head_count"
        heads = _heads(metadata, scope, field, int(layer), tensor)
    place = Place(f"{known.layers}.{layer}.{known.parts[part]}.{kind}", heads, shift)
    if part in known.convolutions and len(tensor.shape) == 2:
        return replace(place, shape=(tensor.shape[0], 1, tensor.shape[1]))
    if part in known.flat:
        return replace(place, shape=(prod(tensor.shape),))
    if part in known.of_one_row and len(tensor.shape) == 1:
        return replace(place, shape=(1, *tensor.shape))
    return replace(place, transposed=part in known.transposed and kind == "weight")


def _heads(metadata: Mapping[str, Value], scope: str, field: str, layer: int, tensor: GgufTensor) -> int:
    """The number of heads whose rows a tensor has. Without one for keys, it is that of queries."""
    value = metadata.get(f"{scope}.{field}", metadata.get(f"{scope}.head_count"))
    if isinstance(value, array):  # one for each layer
        value = value[layer] if layer < len(value) else None
    rows = tensor.shape[0]
    if not isinstance(value, int) or value < 1 or rows % (2 * value):
        raise FileError(
            f"{tensor.file}: {tensor.name} has {rows} rows, which are not an even number of rows for each of "
            f"{value} heads ({scope}.{field})"
        )
    return value
