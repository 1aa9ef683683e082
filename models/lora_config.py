"""Reads what an adapter says of itself: adapter_config.json, names and shapes of tensors. No torch.

Whatever would make an adapter compute something else than PEFT does is refused here, before a tensor is read.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from models.plain_files import ConfigError, FileError, check_regular, read_object, read_tensor_header, shown

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What the names of all tensors of an adapter begin with."""
DECISION_HEAD = "head.pt"
"""The head of a decision model that is kept beside an adapter, as Kev's checkpoints have it."""
HEADS = ("score", "classifier")
"""The names of heads that an adapter may bring whole."""

Rank = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Bias = Literal["none", "lora_only", "all"]

MERGE = "merge it into its base (PEFT's merge_and_unload, then save_pretrained) and serve the result"
_SUFFIXES = {
    "A": ".lora_A.weight",
    "B": ".lora_B.weight",
    "B_bias": ".lora_B.bias",
    "magnitude": ".lora_magnitude_vector",
    "embedding_A": ".lora_embedding_A",
    "embedding_B": ".lora_embedding_B",
    "base_bias": ".base_layer.bias",
    "base_weight": ".base_layer.weight",
    "bias": ".bias",
}
"""The kinds of tensors, by what their names end with. The first that fits counts. PEFT saves the weights of
embeddings and heads that have factors; they must be the base's own."""

_CONVERTIBLE = ("pissa", "olora", "corda", "lora_ga", "loftq")
_REFUSED = {
    "layer_replication": "repeats layers of the base",
    "target_parameters": "changes parameters that are not layers of their own, such as experts",
    "trainable_token_indices": "trains embeddings of single tokens",
    "use_qalora": "is a QALoRA adapter",
    "use_bdlora": "has block-diagonal factors (BD-LoRA)",
    "arrow_config": "routes among other adapters (Arrow)",
    "kasa_config": "is a KaSA adapter",
    "monteclora_config": "is a MonteCLoRA adapter",
}
"""Fields that change what an adapter computes, and what it is then."""
_TRAINING = frozenset(
    [
        *(
            "auto_mapping",
            "fan_in_fan_out",
            "peft_version",
            "revision",
            "inference_mode",
            "target_modules",
            "exclude_modules",
        ),
        *("lora_dropout", "layers_to_transform", "layers_pattern", "megatron_config"),
        *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
        *("qalora_group_size", "runtime_config", "ensure_weight_tying"),
    ]
)
"""Fields that say how an adapter was trained: its tensors are the truth."""


class AdapterError(ConfigError):
    """An adapter cannot be served; the message names what is wrong with it, and the way out."""


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of adapter_config.json that say what the adapter computes."""

    peft_type: str | None = None
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    r: Rank = 8
    lora_alpha: float = 8
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool | None = False
    use_dora: bool | None = False
    bias: Bias | None = "none"
    lora_bias: bool | None = False
    modules_to_save: list[str] | None = None
    init_lora_weights: bool | str | None = True
    alora_invocation_tokens: list[int] | None = None


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an adapter, as its files say: it computes y = W x + scale B (A x)."""

    base: str
    """The name or folder of the model that it was trained on; "" if it does not say."""
    task_type: str
    """PEFT's name of the task, such as CAUSAL_LM or SEQ_CLS; "" if it does not say."""
    alpha: float
    alpha_pattern: dict[str, float]
    """Expressions of modules' names -> their alpha, where it is not `alpha`."""
    rslora: bool
    """Whether the scale is alpha / sqrt(rank), not alpha / rank."""
    invocation_tokens: tuple[int, ...]
    """The tokens from whose last occurrence in a prompt on it is active (aLoRA); empty: everywhere."""
    head: str
    """The name of the head that it brings: one of HEADS; "" if there is none."""
    labels: int
    """The number of outputs of its head; 0 if there is none."""
    decides: bool
    """Whether a head for typed questions lies beside it (`models/lora/decision_head.py`)."""
    most_rank: int
    """The largest rank of a module, by the shapes of its tensors."""
    tensors: dict[str, tuple[int, ...]]
    """The shapes of its tensors, by names without PREFIX."""

    def scale(self, module: str, rank: int) -> float:
        """The factor of a module's B A; `module` is its name without PREFIX."""
        found = (key for key in self.alpha_pattern if re.match(rf"(.*\.)?({key})$", module))
        alpha = next((self.alpha_pattern[key] for key in found), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, and no whole model."""
    weights = (path.name for kind in ("*.safetensors", "*.bin", "*.gguf") for path in folder.glob(kind))
    return (folder / CONFIG_FILE).is_file() and all(name.startswith("adapter_model.") for name in weights)


def read_adapter(folder: Path) -> AdapterConfig:
    """Read what an adapter says of itself. Raises AdapterError if it cannot be served."""
    path = folder / CONFIG_FILE
    if not path.exists():
        raise AdapterError(
            f"{folder} has no {CONFIG_FILE}: give the folder of an adapter that PEFT has saved"
        )
    raw = read_object(path)
    saved = _read_fields(path, raw)
    tensors = _read_shapes(folder)
    for name in tensors:
        _check_name(folder, name, saved)
    head = next((part for name in tensors for part in name.split(".") if part in HEADS), "")
    ranks = [shape[0] for name, shape in tensors.items() if name.endswith((".lora_A.weight", "embedding_A"))]
    return AdapterConfig(
        base=saved.base_model_name_or_path or "",
        task_type=saved.task_type or "",
        alpha=saved.lora_alpha,
        alpha_pattern=saved.alpha_pattern or {},
        rslora=bool(saved.use_rslora),
        invocation_tokens=tuple(saved.alora_invocation_tokens or ()),
        head=head,
        labels=_count_labels(folder, head, tensors) if head else 0,
        decides=(folder / DECISION_HEAD).is_file(),
        most_rank=max(ranks, default=0),
        tensors=tensors,
    )


def check_rank(name: str, config: AdapterConfig, most: int) -> None:
    """Refuse an adapter of a larger rank than the operator allows."""
    if config.most_rank > most:
        raise AdapterError(
            f"LoRA rank {config.most_rank} is greater than max_lora_rank {most}: start the server with "
            f"--max-lora-rank {config.most_rank} to serve {name}"
        )


def check_modules(folder: Path, config: AdapterConfig, allowed: Collection[str]) -> None:
    """Refuse an adapter of modules that the operator does not allow; if none is named, all are allowed."""
    modules = (split_name(name)[0] for name in config.tensors if not is_of_head(name))
    others = sorted({module.rpartition(".")[2] for module in modules} - set(allowed))
    if allowed and others:
        raise AdapterError(
            f"{folder} changes {', '.join(others)}, and --lora-target-modules allows "
            f"{', '.join(sorted(set(allowed)))} only"
        )


def adapter_digest(folder: Path) -> str:
    """A digest of all that decides what an adapter computes: its config and its tensors."""
    digest = hashlib.sha256()
    for path in files_of(folder):
        check_regular(path)
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]


def files_of(folder: Path) -> list[Path]:
    """The files that decide what an adapter computes."""
    head = [folder / DECISION_HEAD] if (folder / DECISION_HEAD).exists() else []
    return [folder / CONFIG_FILE, folder / TENSORS_FILE, *head]


def label_names(folder: Path, count: int) -> tuple[str, ...]:
    """The names of the outputs of an adapter's head, from the config.json beside it if that has some."""
    path = folder / "config.json"
    found = read_object(path).get("id2label") if path.is_file() else None
    names = {str(number): str(name) for number, name in found.items()} if isinstance(found, dict) else {}
    if names.keys() != {str(number) for number in range(count)}:
        return tuple(f"LABEL_{number}" for number in range(count))
    return tuple(names[str(number)] for number in range(count))


def problem_type(folder: Path) -> str:
    """What the config.json beside an adapter says of its labels, such as regression; "" if nothing."""
    path = folder / "config.json"
    found = read_object(path).get("problem_type") if path.is_file() else None
    return found if isinstance(found, str) else ""


def split_name(name: str) -> tuple[str, str]:
    """The module and the kind of a tensor, of whose name PREFIX was taken; the kind of others is ""."""
    for kind, suffix in _SUFFIXES.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), kind
    return name, ""


def is_of_head(name: str) -> bool:
    """Whether a tensor is part of a head that an adapter brings whole."""
    return split_name(name)[1] in ("", "bias") and any(part in HEADS for part in name.split("."))


def _read_fields(path: Path, raw: Mapping[str, object]) -> _Saved:
    try:
        saved = msgspec.convert(raw, _Saved)
    except msgspec.ValidationError as error:
        raise AdapterError(f"{path}: {error}") from None
    if saved.peft_type != "LORA":
        raise AdapterError(f"{path}: peft_type is {saved.peft_type!r}, and LORA alone is served: {MERGE}")
    for field, what in _REFUSED.items():
        if raw.get(field):
            raise AdapterError(f"{path}: {field} is set, so this {what}, which is not served: {MERGE}")
    known = {*_Saved.__struct_fields__, *_REFUSED, *_TRAINING}
    for field in raw.keys() - known:
        if raw[field]:
            near = get_close_matches(field, known, 2)
            meant = f"; near it are {' and '.join(near)}" if near else ""
            raise AdapterError(
                f"{path}: the field {shown(field)!r} is not known here{meant}: it may change what the "
                f"adapter computes, so {MERGE}, or remove the field if it does not"
            )
    start = saved.init_lora_weights
    if isinstance(start, str) and start.startswith(_CONVERTIBLE):
        raise AdapterError(
            f"{path}: init_lora_weights is {start!r}, so the adapter replaces a part of its base's weights: "
            "save it with path_initial_model_for_weight_conversion, which makes it a plain LoRA"
        )
    for key in (*(saved.rank_pattern or ()), *(saved.alpha_pattern or ())):
        _check_pattern(path, key)
    return saved


def _check_pattern(path: Path, key: str) -> None:
    """Refuse expressions that cannot be compiled, or whose matching might take very long."""
    try:
        re.compile(key)
    except (re.error, RecursionError, OverflowError) as error:
        raise AdapterError(
            f"{path}: the pattern {shown(key)!r} is not a regular expression: {error}"
        ) from None
    if len(key) > 4096 or re.search(r"\)[*+{]", key) or len(re.findall(r"(?<!\\)[*+{]", key)) > 4:
        raise AdapterError(
            f"{path}: the pattern {shown(key)!r} repeats too much: write modules' names, with up to four "
            "repetitions and none of a group"
        )


def _read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of an adapter's tensors by their names, of which only the header is read."""
    path = folder / TENSORS_FILE
    if not path.exists():
        if (folder / "adapter_model.bin").exists():
            raise AdapterError(
                f"{folder} holds its tensors as adapter_model.bin only, a pickle, which is not read: load it "
                "with PEFT and save it again, with safe_serialization=True"
            )
        raise AdapterError(f"{folder} doesn't contain tensors: it has no {TENSORS_FILE}")
    check_regular(path)
    try:
        shapes = {name: tensor.shape for name, tensor in read_tensor_header(path).items()}
    except FileError as error:
        raise AdapterError(str(error)) from None
    if not shapes:
        raise AdapterError(f"{folder} doesn't contain tensors: {TENSORS_FILE} is empty")
    if wrong := next((name for name in shapes if not name.startswith(PREFIX)), None):
        raise AdapterError(
            f"{path}: {shown(wrong)} does not begin with {PREFIX}, as names in PEFT's adapters do: load it "
            "where it was made, and save it with PEFT"
        )
    return {name.removeprefix(PREFIX): shape for name, shape in shapes.items()}


def _check_name(folder: Path, name: str, saved: _Saved) -> None:
    """Refuse a tensor that is no part of a LoRA adapter as it is served."""
    module, kind = split_name(name)
    replaces = kind == "bias"
    if is_of_head(name) or (kind and not replaces) or (replaces and saved.bias not in (None, "none")):
        if kind == "magnitude" and not saved.use_dora:
            raise AdapterError(f"{folder}: {shown(name)} is for DoRA, and {CONFIG_FILE} has no use_dora")
        return
    path = folder / TENSORS_FILE
    last = module.removesuffix(".weight").rpartition(".")[2]
    if "token_adapter" in name or "trainable_tokens" in name:
        raise AdapterError(f"{path}: {shown(name)} holds embeddings of added tokens: {MERGE}")
    if last in ("lm_head", "embed_tokens", "wte", "word_embeddings", "embed_out", "embed_in"):
        raise AdapterError(
            f"{path}: {shown(name)} is a full {last} of its own, which is not served beside the base's: "
            f"{MERGE}, or train it as LoRA (target_modules) without resized vocabulary"
        )
    raise AdapterError(
        f"{path}: {shown(name)} is not a tensor of LoRA, and of whole modules only {' and '.join(HEADS)} may "
        f"come with an adapter: {MERGE}"
    )


def _count_labels(folder: Path, head: str, tensors: Mapping[str, tuple[int, ...]]) -> int:
    """The outputs of the last matrix of a head."""
    ends = (f"{head}.weight", f"{head}.out_proj.weight")
    for name, shape in tensors.items():
        if name.endswith(ends) and len(shape) == 2:
            return shape[0]
    raise AdapterError(
        f"{folder / TENSORS_FILE} has a head {head} without a matrix {head}.weight or {head}.out_proj.weight"
    )
