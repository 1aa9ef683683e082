"""What a model is to requests that an adapter computes, and what the files of an adapter say."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from engine_core.adapters.adapter_files import stamp_of
from engine_core.adapters.messages import Adapter, AdapterState, adapted_facts
from models.checkpoint.hub import adapter_folder
from models.lora_config import adapter_digest, check_rank, read_adapter
from server.model_facts import Facts
from server.options.server_config import ServerConfig


def read_named(name: str, source: str, config: ServerConfig, folder: Path | None = None) -> Adapter:
    """Read what the files of an adapter say of it. They lie in `folder`, if that is known already.

    `source` is a folder, or a name on the hub. Raises ValueError or OSError if it cannot be served.
    """
    folder = folder or adapter_folder(source, config.engine.download_dir)
    saved, stamp = read_adapter(folder), stamp_of(folder)
    check_rank(name, saved, config.engine.worker.lora.max_lora_rank)
    root = source if config.show_root else name
    named = name, adapter_digest(folder), str(folder), stamp, root, source
    return Adapter(*named, invocation=saved.invocation_tokens)


def is_current(adapter: Adapter, source: str) -> bool:
    """Whether an adapter is the one of a folder, or of a name on the hub, and its files have not been written
    since. Raises OSError."""
    path = Path(source).expanduser()
    is_same = adapter.folder == str(path.resolve()) if path.is_dir() else adapter.source == source
    return is_same and adapter.stamp == stamp_of(Path(adapter.folder))


def facts_with(base: Facts, state: AdapterState | None) -> Facts:
    """The facts of a model whose requests an adapter computes, if any does, under the adapter's name."""
    if state is None:
        return base
    worker, pooling, adapter, told = base.ready.worker, base.pooling, state.adapter, state.facts
    if told is not None:
        worker = adapted_facts(worker, told)
        for width in map(told.widths.get, told.tasks):  # of its own head, if it has one
            labels = adapter.labels or told.labels
            pooling = replace(pooling, num_labels=width or len(labels), labels=labels)
    ready = replace(base.ready, worker=worker)
    return replace(base, model_names=(adapter.name,), root=adapter.root, ready=ready, pooling=pooling)
