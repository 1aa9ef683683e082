"""What GGUF calls a model's tensors, and what its converter changes in them: a table for each architecture.

No torch. A tensor whose name is in no table keeps it; loading tells that it has no place in the model.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from models.gguf import gemma_names
from models.gguf.file import GgufFile, GgufTensor, Value
from models.plain_files import FileError, shown
from models.quantization.methods.gguf import CODINGS, PLAIN

_LAYER = re.compile(r"blk\.(\d{1,6})\.((?:nextn\.)?\w+)(?:\.(\w+))?")
_CONFIG_TENSORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors that say how a rotation is stretched: the config has their numbers."""
_MOST_EXPERTS = 4096
"""Experts of a layer beyond which a file is taken for broken: eight times any model's."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The names of modules in the checkpoints of a family, by those of GGUF, and the changes to undo."""

    modules: Mapping[str, str]
    """The modules outside of layers."""
    layers: str = "model.layers"
    """The scope of the layers."""
    parts: Mapping[str, str]
    """The modules of a layer."""
    neighbours: tuple[str, ...] = ()
    """Parts whose rows are ordered for a rotation of neighbours: halves of each head are interleaved."""
    shifted_norms: bool = False
    """Whether 1 was added to the weights of norms."""
    plain_norms: tuple[str, ...] = ()
    """Norms to which it was not added all the same."""
    exponents: tuple[str, ...] = ()
    """Parts of which the file has the negated exponentials."""
    convolutions: tuple[str, ...] = ()
    """Parts [channels, taps] that the checkpoint stores as [channels, 1, taps]."""
    transposed: tuple[str, ...] = ()
    """Parts that the checkpoint stores as [inputs, outputs] and GGUF as [outputs, inputs]."""
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """The modules of an expert by the parts that hold those of all. If two, each has half of the rows."""
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of tensors in a layer by their parts and kinds, where the kind is not the last word."""
    stacks: Mapping[str, str] = field(default_factory=dict[str, str])
    """The names of matrices that lie in one tensor outside of layers, by its name; {} is a number."""
    of_one_row: tuple[str, ...] = ()
    """Parts that are a matrix of one row, which some files have as a vector."""


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


_DECODER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    # Latent attention. Older files have one matrix of keys and values, newer ones two (see `tensors.py`).
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    # Layers for multi-token prediction, which files number on after the last layer of the model.
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
"""The parts of decoders' layers, of which each has some. Families change names in it."""


def _experts(scope: str = "mlp", *names: str) -> dict[str, tuple[str, ...]]:
    """The modules of an expert, in whose names {} stands for its number; `names` are of gate, up and down."""
    names = names or ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (f"{scope}.experts.{{}}.{name}" for name in names)
    return {
        "ffn_gate_exps": (gate,),
        "ffn_up_exps": (up,),
        "ffn_gate_up_exps": (gate, up),
        "ffn_down_exps": (down,),
    }


_PLAIN = Architecture(modules=_DECODER, parts=_PARTS)
_LLAMA = replace(_PLAIN, neighbours=("attn_q", "attn_k"))
_GEMMA = replace(_PLAIN, shifted_norms=True)
_SANDWICHED = replace(_GEMMA, parts={**_PARTS, "ffn_norm": "pre_feedforward_layernorm"})
_GEMMA4 = Architecture(
    modules={**_DECODER, **gemma_names.MODULES},
    parts={**_PARTS, **gemma_names.PARTS},
    stacks=gemma_names.STACKS,
    experts=gemma_names.EXPERTS,
    tensors=gemma_names.TENSORS,
)
_MIXTURE = replace(_PLAIN, experts=_experts())
_CORRECTED = replace(_MIXTURE, tensors={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"})
_BLOCK_SPARSE = {**_PARTS, "ffn_gate_inp": "block_sparse_moe.gate"}
_BLOCK_SPARSE_EXPERTS = _experts("block_sparse_moe", "w1", "w3", "w2")
_SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_LINEAR_ATTENTION = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_HYBRID = replace(
    _PLAIN,
    shifted_norms=True,
    plain_norms=("ssm_norm",),
    tensors={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    exponents=("ssm_a",),
    convolutions=("ssm_conv1d",),
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": replace(_LLAMA, parts=_BLOCK_SPARSE, experts=_BLOCK_SPARSE_EXPERTS),
    "arcee": _LLAMA,
    "ernie4_5": _PLAIN,
    "seed_oss": _PLAIN,
    "granite": _LLAMA,
    "internlm2": _LLAMA,  # its converter takes the one matrix of q, k and v apart
    "smollm3": _LLAMA,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN,
    "gemma": _GEMMA,
    "gemma2": _SANDWICHED,
    "gemma3": _SANDWICHED,
    "gemma3n": _GEMMA4,
    "gemma4": _GEMMA4,
    "olmo2": _PLAIN,
    "phi3": replace(_PLAIN, parts={**_PARTS, "ffn_up": "mlp.gate_up_proj"}),
    "gpt2": Architecture(
        modules={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h",
        parts={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
    ),
    "bert": Architecture(
        modules={
            "token_embd": "embeddings.word_embeddings",
            "position_embd": "embeddings.position_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
            "cls": "pooler.dense",
            "cls.output": "classifier",
        },
        layers="encoder.layer",
        of_one_row=("cls.output",),
        parts={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
    ),
    "nomic-bert": Architecture(
        modules={
            "token_embd": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "emb_ln",
        },
        layers="encoder.layers",
        parts={
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_up": "mlp.fc11",
            "ffn_gate": "mlp.fc12",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
    ),
    "qwen2moe": replace(
        _MIXTURE,
        parts={**_PARTS, **_SHARED_EXPERT},
        of_one_row=("ffn_gate_inp_shexp",),
    ),
    "qwen3moe": _MIXTURE,
    "qwen35": replace(_HYBRID, parts={**_PARTS, **_LINEAR_ATTENTION}),
    "qwen35moe": replace(
        _HYBRID,
        parts={**_PARTS, **_SHARED_EXPERT, **_LINEAR_ATTENTION},
        experts=_experts(),
        of_one_row=("ffn_gate_inp_shexp",),
    ),
    "olmoe": _MIXTURE,
    "granitemoe": replace(
        _LLAMA,
        parts={
            **_PARTS,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_gate_shexp": "shared_mlp.gate_proj",
            "ffn_up_shexp": "shared_mlp.up_proj",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        experts=_experts("block_sparse_moe"),
    ),
    "gpt-oss": replace(
        _MIXTURE,
        parts={**_PARTS, "ffn_gate_inp": "mlp.router"},
        tensors={"attn_sinks.weight": "self_attn.sinks"},
    ),
    "glm4moe": _CORRECTED,
    "deepseek2": _CORRECTED,
    "dots1": _CORRECTED,
    "ernie4_5-moe": replace(
        _MIXTURE, tensors={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}
    ),
    "minimax-m2": replace(
        _PLAIN,
        parts=_BLOCK_SPARSE,
        experts=_BLOCK_SPARSE_EXPERTS,
        tensors={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
    ),
}
"""The architectures that are read, by the name that the field `general.architecture` has."""


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
        name = f"{known.layers}.{layer}.{known.tensors[own]}"
        return Place(name, is_exponent=part in known.exponents)
    if kind is None or part not in known.parts:
        return Place(tensor.name)
    heads = 0
    if part in known.neighbours:
        field = "head_count_kv" if part == "attn_k" else "head_count"
        heads = _heads(metadata, scope, field, int(layer), tensor)
    place = Place(f"{known.layers}.{layer}.{known.parts[part]}.{kind}", heads, shift)
    if part in known.convolutions and len(tensor.shape) == 2:
        return replace(place, shape=(tensor.shape[0], 1, tensor.shape[1]))
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
            f"{tensor.file}: {tensor.name} has {rows} rows, which are no even number of rows for each of "
            f"{value} heads ({scope}.{field})"
        )
    return value
