"""Quantized checkpoints of common shapes whose codes are random: for timings, at any size, in seconds.

    python tests/bench/random_codes.py gptq qwen3-0.6b FOLDER

All layers hold the same numbers, for to draw gigabytes takes minutes and nothing depends on them. Sizes of
scales are such that activations stay as large as those of a trained model.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import checkpoints
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig

_GROUP, _BLOCK = 128, 128
_DEVIATION = 0.02
_LAYERS_IN_FILE = 10

Matrix = dict[str, Tensor]


def gptq(outputs: int, inputs: int, bits: int = 4) -> Matrix:
    each, groups = 32 // bits, inputs // _GROUP
    zero = sum((1 << (bits - 1)) - 1 << (bits * slot) for slot in range(each))
    return {
        "qweight": _words(inputs // each, outputs),
        "qzeros": torch.full((groups, outputs // each), zero, dtype=torch.int32),
        "scales": _scales(bits, groups, outputs).half(),
        "g_idx": (torch.arange(inputs) // _GROUP).int(),
    }


def awq(outputs: int, inputs: int) -> Matrix:
    groups = inputs // _GROUP
    return {
        "qweight": _words(inputs, outputs // 8),
        "qzeros": _words(groups, outputs // 8),
        "scales": _scales(4, groups, outputs).half(),
    }


def packed(outputs: int, inputs: int) -> Matrix:
    return {
        "weight_packed": _words(outputs, inputs // 8),
        "weight_scale": _scales(4, outputs, inputs // _GROUP).bfloat16(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


def whole(outputs: int, inputs: int) -> Matrix:
    return {
        "weight": torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8),
        "weight_scale": _scales(8, outputs, 1).bfloat16(),
    }


def floats(outputs: int, inputs: int) -> Matrix:
    weight = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    blocks = (-(-outputs // _BLOCK), -(-inputs // _BLOCK))
    return {"weight": weight, "weight_scale_inv": torch.full(blocks, _DEVIATION)}


def plain(outputs: int, inputs: int) -> Matrix:
    return {"weight": (torch.randn(outputs, inputs) * _DEVIATION).bfloat16()}


def _words(rows: int, columns: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (rows, columns), dtype=torch.int32)


def _scales(bits: int, rows: int, columns: int) -> Tensor:
    """Scales with which codes that are spread evenly have the deviation of a trained model's weights."""
    return torch.full((rows, columns), _DEVIATION * 12**0.5 / (1 << bits))


_GPTQ = {"quant_method": "gptq", "group_size": _GROUP, "desc_act": False, "sym": True}


def _compressed(format: str, inputs: int | None = None, **weights: object) -> dict[str, object]:
    group: dict[str, object] = {
        "targets": ["Linear"],
        "weights": {"type": "int", "symmetric": True, "dynamic": False, **weights},
    }
    if inputs is not None:
        rounded = {"num_bits": inputs, "type": "int", "strategy": "token", "dynamic": True}
        group["input_activations"] = rounded
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


METHODS: Mapping[str, tuple[Callable[[int, int], Matrix], dict[str, object] | None]] = {
    "plain": (plain, None),
    "gptq": (gptq, {**_GPTQ, "bits": 4}),
    "gptq-8": (lambda outputs, inputs: gptq(outputs, inputs, 8), {**_GPTQ, "bits": 8}),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"},
    ),
    "w4a16": (packed, _compressed("pack-quantized", num_bits=4, strategy="group", group_size=_GROUP)),
    "w8a8": (whole, _compressed("int-quantized", inputs=8, num_bits=8, strategy="channel")),
    "fp8": (
        floats,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]},
    ),
}
"""How a matrix [outputs, inputs] of each kind is drawn, and what config.json says of it."""


def make(method: str, shape: str, folder: Path) -> None:
    """Write a checkpoint; one that is there already is left as it is."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = checkpoints.SHAPES[shape]
    draw, saved = METHODS[method]
    checkpoints.write_tokenizer(folder, config.vocab_size)
    layer = _layer(config, draw)
    files = [layer_numbers(config, first) for first in range(0, config.num_hidden_layers, _LAYERS_IN_FILE)]
    places: dict[str, str] = {}
    for number, numbers in enumerate(files, start=1):
        tensors = {
            f"model.layers.{i}.{name}": tensor.clone() for i in numbers for name, tensor in layer.items()
        }
        tensors |= _ends(config) if number == 1 else {}
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    dtype = "bfloat16" if saved is None else "float16"
    fields = config.to_dict() | {"architectures": [_ARCHITECTURES[config.model_type]], "dtype": dtype}
    fields |= {} if saved is None else {"quantization_config": saved}
    (folder / "config.json").write_text(json.dumps(fields, default=str))


_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def layer_numbers(config: PretrainedConfig, first: int) -> range:
    """The layers that lie in one file with the layer `first`."""
    return range(first, min(first + _LAYERS_IN_FILE, config.num_hidden_layers))


def _layer(config: PretrainedConfig, draw: Callable[[int, int], Matrix]) -> Matrix:
    """The tensors of a layer, by their names within it."""
    width, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    sizes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    tensors = {
        f"{name}.{part}": tensor for name, size in sizes.items() for part, tensor in draw(*size).items()
    }
    norms = {"input_layernorm": width, "post_attention_layernorm": width}
    if config.model_type == "qwen3":
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    return tensors | {f"{name}.weight": torch.ones(size).half() for name, size in norms.items()}


def _ends(config: PretrainedConfig) -> Matrix:
    """Embeddings, the last norm, and the head if it is not the embeddings."""
    width = config.hidden_size
    table = (torch.randn(config.vocab_size, width) * _DEVIATION).half()
    tensors = {"model.embed_tokens.weight": table, "model.norm.weight": torch.ones(width).half()}
    return tensors | ({} if config.tie_word_embeddings else {"lm_head.weight": table.clone()})


if __name__ == "__main__":
    make(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
