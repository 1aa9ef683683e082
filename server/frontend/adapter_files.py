"""Reads the files of adapters, and makes the facts of the model for requests that name one."""

from __future__ import annotations

import hashlib
from pathlib import Path

from msgspec.structs import replace

from engine_core.adapters.adapter_files import stamp_of
from engine_core.adapters.messages import Adapter, AdapterState, adapted_facts
from models.checkpoint.hub import adapter_folder
from models.lora_config import AdapterConfig, adapter_digest, check_rank, read_adapter
from models.plain_files import ConfigError, check_regular, read_text
from server.errors import BadRequest
from server.model_facts import Facts
from server.options.server_flags import ServerConfig
from server.text.chat_template import compile_template
from server.text.tokenizer import Tokenizer
from worker.worker_facts import WorkerFacts

MOST_TEMPLATE = 1 << 20
"""The longest chat template of an adapter, in bytes."""


def check_modules(config: ServerConfig) -> None:
    """Raises ConfigError if the files of one of --lora-modules say that no model can be served with it.

    Adapters of the hub are downloaded.
    """
    for module in config.adapters.modules:
        try:
            folder = adapter_folder(module.path, config.engine.download_dir)
            _read_files(module.name, folder, config)
        except (ValueError, OSError) as error:
            raise ConfigError(f"--lora-modules: {module.name}: {error}") from error


def read_named(
    name: str, source: str, config: ServerConfig, base: Tokenizer, folder: Path | None = None
) -> Adapter:
    """Read what the files of an adapter say of it. They lie in `folder`, if that is known already.

    `source` is a folder, or a name on the hub, and `base` the model's tokenizer. Raises ValueError or OSError
    if it cannot be served.
    """
    folder = folder or adapter_folder(source, config.engine.download_dir)
    (saved, template), stamp = _read_files(name, folder, config), stamp_of(folder)
    root = source if config.show_root else name
    if not config.skip_tokenizer_init and (path := folder / "tokenizer.json").is_file():
        check_regular(path)
        if difference := base.difference(path):
            raise ConfigError(
                f"{path} is not the tokenizer of the model that is served: {difference}. Merge the adapter "
                "into its own base, or take the file away if the difference means nothing"
            )
    named = name, adapter_digest(folder), str(folder), stamp, root, source
    own = "" if template in base.chat.sources else template
    return Adapter(*named, chat_template=own, invocation=saved.invocation_tokens)


def _read_files(name: str, folder: Path, config: ServerConfig) -> tuple[AdapterConfig, str]:
    """What an adapter says of itself, and its chat template. Raises ConfigError if it cannot be served."""
    saved = read_adapter(folder)
    check_rank(name, saved, config.engine.worker.lora.max_lora_rank)
    return saved, _template(folder) if config.chat_template is None else ""


def _template(folder: Path) -> str:
    """The chat template beside an adapter, if there is one. Raises ConfigError if it cannot be used."""
    path = folder / "chat_template.jinja"
    if not path.is_file():
        return ""
    if check_regular(path) > MOST_TEMPLATE:
        raise ConfigError(f"{path} is longer than {MOST_TEMPLATE >> 20} MiB")
    try:
        compile_template(source := read_text(path))
    except BadRequest as error:
        raise ConfigError(f"{path}: {error.message}") from error
    return source


def is_current(adapter: Adapter, source: str) -> bool:
    """Whether an adapter is the one of a folder, or of a name on the hub, and its files have not been written
    since. Raises OSError."""
    path = Path(source).expanduser()
    is_same = adapter.folder == str(path.resolve()) if path.is_dir() else adapter.source == source
    return is_same and adapter.stamp == stamp_of(Path(adapter.folder))


def _with_own_weights(worker: WorkerFacts, digest: str) -> WorkerFacts:
    """The facts of weights to which an adapter adds something: their fingerprint is another."""
    if not worker.fingerprint:
        return worker
    both = hashlib.sha256(f"{worker.fingerprint} {digest}".encode()).hexdigest()
    return replace(worker, fingerprint=f"fp_{both[:16]}")


def facts_with(base: Facts, state: AdapterState | None) -> Facts:
    """The facts of a model whose requests an adapter computes, if any does, under the adapter's name."""
    if state is None:
        return base
    pooling, adapter, told = base.pooling, state.adapter, state.facts
    worker = _with_own_weights(base.ready.worker, adapter.digest)
    if told is not None:
        worker = adapted_facts(worker, told)
        for width in map(told.widths.get, told.tasks):  # of its own head, if it has one
            labels = adapter.labels or told.labels
            pooling = replace(pooling, num_labels=width or len(labels), labels=labels)
    ready = replace(base.ready, worker=worker)
    own = replace(base, model_names=(adapter.name,), root=adapter.root, ready=ready, pooling=pooling)
    prompt = adapter.prompt or base.default_prompt_name
    return replace(own, chat_template=adapter.chat_template, default_prompt_name=prompt)
