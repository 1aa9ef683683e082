"""jina-embeddings-v3, whose checkpoint holds adapters for tasks: a folder in which each is PEFT's. No torch.

The factors of all tasks lie stacked beside the matrices that they change. A task's are written under the
names of transformers' classes, which are those of the model's layers. Texts have one type, so what a task
adds to its embedding is added with the embedding of each token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from models.lora_config import CONFIG_FILE, PREFIX, TENSORS_FILE
from models.made_folder import link, made_once, write_json, write_tensors
from models.plain_files import FileError, read_object, read_tensor_header

_Array = np.ndarray[Any, np.dtype[Any]]

_TASKS = "task_adapters"
"""The folder of the adapters within the one that is made."""
_MODULES, _SETTINGS = "modules.json", "config_sentence_transformers.json"
_OWN_TRANSFORMER = "custom_st.Transformer"
_FACTORS = re.compile(r"(.+)\.parametrizations\.weight\.0\.lora_([AB])")
_WORDS, _TYPES = "embeddings.word_embeddings", "embeddings.token_type_embeddings"
_BYTES = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}
"""The numbers of the types that factors may have, as they are moved, and never computed with."""

_NAME = re.compile(r"(roberta\.)?(?:encoder\.(layers\.\d+\.))?(.+)")
_NAMES = {
    "emb_ln": ("embeddings.LayerNorm",),
    "mixer.Wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mixer.out_proj": ("self_attn.o_proj",),
    "norm1": ("post_attention_layernorm",),
    "norm2": ("post_mlp_layernorm",),
}


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json on tasks."""

    lora_adaptations: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=64)]
    task_instructions: dict[str, str] = {}
    lora_rank: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 4
    lora_alpha: float = 1


def class_names(module: str) -> tuple[str, ...]:
    """The names that transformers has for a published module: three if it is queries, keys and values."""
    found = _NAME.fullmatch(module)
    prefix, layer, own = found.groups(default="") if found else ("", "", module)
    return tuple(f"{prefix}{layer}{name}" for name in _NAMES.get(own, (own,)))


def has_tasks(folder: Path) -> bool:
    """Whether a checkpoint was published with adapters for tasks in it."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    config = read_object(path)
    is_rotary = (
        config.get("model_type") == "xlm-roberta" and config.get("position_embedding_type") == "rotary"
    )
    return is_rotary and bool(config.get("lora_adaptations"))


def task_adapters(folder: Path) -> dict[str, Path]:
    """The folders of the adapters in a folder that was made here, by their tasks; none if it was not."""
    if not (folder / _TASKS).is_dir():
        return {}
    names = _read_fields(folder / "config.json").lora_adaptations
    return {name: folder / _TASKS / str(number) for number, name in enumerate(names)}


def make_folder(folder: Path, cache: Path) -> Path:
    """Make the folder within `cache`, or find the one made before. Raises FileError.

    Without weights it has no adapters, as on a machine that computes nothing.
    """
    saved = _read_fields(folder / "config.json")
    entries = sorted(folder.iterdir())
    weights = [path for path in entries if path.suffix == ".safetensors"]

    def fill(made: Path) -> None:
        link(made, [path for path in entries if path.name not in (_MODULES, _SETTINGS, _TASKS)])
        if (folder / _MODULES).is_file():
            text = (folder / _MODULES).read_text("utf-8")
            known = text.replace(f'"{_OWN_TRANSFORMER}"', '"sentence_transformers.models.Transformer"')
            (made / _MODULES).write_text(known, "utf-8")
        settings = read_object(folder / _SETTINGS) if (folder / _SETTINGS).is_file() else {}
        write_json(made / _SETTINGS, {**settings, "prompts": saved.task_instructions})
        if weights:
            _write_adapters(made / _TASKS, saved, _read_stacks(weights, len(saved.lora_adaptations)))

    return made_once(cache, [path for path in entries if path.is_file()], Path(__file__).parent, fill)


def _read_fields(path: Path) -> _Saved:
    try:
        return msgspec.convert(read_object(path), _Saved)
    except msgspec.ValidationError as error:
        raise FileError(f"{path}: {error}") from None


def _read_stacks(weights: list[Path], tasks: int) -> dict[str, dict[str, tuple[str, _Array]]]:
    """The stacked factors of each module, with the types of their numbers."""
    found: dict[str, dict[str, tuple[str, _Array]]] = {}
    for path in weights:
        try:
            for name, told in read_tensor_header(path).items():
                factors = _FACTORS.fullmatch(name)
                if factors is None or ".pooler." in name:  # the pooler is no part of a vector
                    continue
                shape = told.shape
                stack = np.memmap(path, _BYTES[told.dtype], "r", told.start, shape)
                if len(shape) != 3 or shape[0] != tasks:
                    raise FileError(f"{path}: {name} has the shape {list(shape)}, not [{tasks}, ., .]")
                found.setdefault(factors[1], {})[factors[2]] = told.dtype, stack
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FileError(f"{path}: the factors of its tasks cannot be read: {error}") from None
    if not found or any(len(parts) != 2 for parts in found.values()):
        raise FileError(f"{weights[0].parent} has not both factors of each matrix that its tasks change")
    return found


def _write_adapters(
    folder: Path, saved: _Saved, stacks: Mapping[str, Mapping[str, tuple[str, _Array]]]
) -> None:
    """Write the adapter of each task as PEFT would."""
    rank, alpha = saved.lora_rank, saved.lora_alpha
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
    if any(module.endswith(_TYPES) for module in stacks):
        config |= {"rank_pattern": {_WORDS: 2 * rank}, "alpha_pattern": {_WORDS: 2 * alpha}}
    for number in range(len(saved.lora_adaptations)):
        parts = {
            module: {letter: (kind, stack[number]) for letter, (kind, stack) in own.items()}
            for module, own in stacks.items()
        }
        own = folder / str(number)
        own.mkdir(parents=True)
        write_json(own / CONFIG_FILE, config)
        tensors = {
            PREFIX + name: (kind, array.shape, array.tobytes())
            for name, (kind, array) in _named(folder, rank, parts)
        }
        write_tensors(own / TENSORS_FILE, tensors)


def _named(
    folder: Path, rank: int, parts: Mapping[str, Mapping[str, tuple[str, _Array]]]
) -> list[tuple[str, tuple[str, _Array]]]:
    """The factors of a task under PEFT's names."""
    found: list[tuple[str, tuple[str, _Array]]] = []
    types = next((own for module, own in parts.items() if module.endswith(_TYPES)), None)
    for module, own in parts.items():
        (kind, a), (_, b) = own["A"], own["B"]
        if module.endswith(_WORDS):
            if types is not None:
                a, b = _with_types(folder, a, b, types["A"][1], types["B"][1])
            found += [
                (f"{module}.lora_embedding_A", (kind, a.T)),
                (f"{module}.lora_embedding_B", (kind, b.T)),
            ]
        elif not module.endswith(_TYPES):
            names = class_names(module)
            if a.shape[0] != rank:
                raise FileError(f"{module} has factors of rank {a.shape[0]}, and lora_rank is {rank}")
            for name, rows in zip(names, np.split(b, len(names)), strict=True):
                found += [(f"{name}.lora_A.weight", (kind, a)), (f"{name}.lora_B.weight", (kind, rows))]
    return found


def _with_types(folder: Path, a: _Array, b: _Array, type_a: _Array, type_b: _Array) -> tuple[_Array, _Array]:
    """The factors of tokens' embeddings [vocabulary, rank] and [rank, size] with those of the one type."""
    if len(type_a) != 1:
        raise FileError(f"{folder.parent}: a task changes {len(type_a)} types of tokens, and one is served")
    return np.concatenate([a, np.repeat(type_a, len(a), axis=0)], axis=1), np.concatenate([b, type_b])
