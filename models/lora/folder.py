"""Makes a folder in which an adapter and its base look like one checkpoint, to be merged. No torch."""

from __future__ import annotations

from pathlib import Path

from models.lora_config import (
    CONFIG_FILE,
    MERGED,
    TENSORS_FILE,
    AdapterConfig,
    AdapterError,
    label_names,
    read_adapter,
)
from models.made_folder import link, made_once, write_json
from models.plain_files import read_object

_OWN = ("chat_template.jinja",)
"""Files that count in place of the base's if they lie beside the adapter."""
_CLASSES = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, and no whole model."""
    weights = (path.name for kind in ("*.safetensors", "*.bin", "*.gguf") for path in folder.glob(kind))
    return (folder / CONFIG_FILE).is_file() and all(name.startswith("adapter_model.") for name in weights)


def make_folder(adapter: Path, base: Path, cache: Path) -> Path:
    """Make the folder within `cache`, or find the one made before. Raises AdapterError, FileError."""
    config = read_adapter(adapter)
    if config.invocation_tokens:
        raise AdapterError(
            f"{adapter} is active only behind its invocation tokens (aLoRA), so it cannot be merged into its "
            "base: serve the base with --enable-lora --lora-modules"
        )
    beside = [
        adapter / name
        for name in (CONFIG_FILE, TENSORS_FILE, *_OWN, "config.json")
        if (adapter / name).is_file()
    ]
    whole = sorted(path for path in base.iterdir() if path.name != "config.json")
    own = {path.name for path in beside if path.name in _OWN}

    def fill(made: Path) -> None:
        (made / MERGED).mkdir()
        link(made / MERGED, [path for path in beside if path.name not in own])
        link(made, [path for path in beside if path.name in own])
        link(made, [path for path in whole if path.name not in own])
        fields = {**read_object(base / "config.json"), **_as_classifier(adapter, config, base)}
        write_json(made / "config.json", fields)

    files = [base / "config.json", *beside, *(path for path in whole if path.is_file())]
    return made_once(cache, files, Path(__file__).parent, fill)


def _as_classifier(adapter: Path, config: AdapterConfig, base: Path) -> dict[str, object]:
    """The fields of config.json that make a base the classifier to which an adapter brings the head."""
    if not config.head:
        return {}
    names = read_object(base / "config.json").get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if not name.endswith("Classification"):
        stem = name.removesuffix("ForCausalLM").removesuffix("ForMaskedLM").removesuffix("Model")
        name = stem + _CLASSES.get(config.task_type, _CLASSES["SEQ_CLS"])
    labels = label_names(adapter, config.labels)
    return {
        "architectures": [name],
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "num_labels": config.labels,
    }
