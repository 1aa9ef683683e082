"""A stand-in for the hub: one repository, of which files are downloaded or in the cache."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.utils import filter_repo_objects

REPOSITORY = {
    "README.md": 100,
    "config.json": 10,
    "generation_config.json": 10,
    "model-00001-of-00002.safetensors": 1000,
    "model-00002-of-00002.safetensors": 1000,
    "model.safetensors.index.json": 20,
    "consolidated.safetensors": 2000,
    "pytorch_model.bin": 2000,
    "training_args.bin": 5,
    "tokenizer.json": 50,
    "tokenizer.model": 50,
    "tokenizer_config.json": 10,
    "merges.txt": 10,
    "chat_template.jinja": 10,
    "model-q4.gguf": 700,
    "onnx/model.onnx": 700,
    "onnx/config.json": 10,
    "original/params.json": 10,
    "1_Pooling/config.json": 10,
    "2_Dense/config.json": 10,
    "2_Dense/model.safetensors": 30,
    "2_Dense/pytorch_model.bin": 30,
}
"""The files of a repository, and their sizes."""


@dataclass
class File:
    filename: str
    file_size: int
    will_download: bool


@dataclass
class FakeHub:
    """A stand-in for snapshot_download: one repository, partly cached, and perhaps a reason to fail."""

    snapshot: Path
    cached: set[str] = field(default_factory=set)
    failure: Exception | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    repository: dict[str, int] = field(default_factory=lambda: REPOSITORY)
    downloaded: set[str] = field(default_factory=set)

    def snapshot_download(self, *, dry_run: bool = False, **call: Any) -> list[File] | str:
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure
        patterns = {k: v for k, v in call.items() if "patterns" in k}
        names = set(filter_repo_objects(self.repository, **patterns))
        if dry_run:
            return [File(name, self.repository[name], name not in self.cached) for name in sorted(names)]
        self.downloaded = names - self.cached
        self.transfer(call["tqdm_class"])
        return str(self.snapshot)

    def transfer(self, bar_class: Callable[..., Any]) -> None:
        with bar_class(total=0, unit="B") as received, bar_class(total=3, desc="Fetching 3 files") as files:
            for name in sorted(self.downloaded):
                received.total += self.repository[name]
                received.update(self.repository[name] // 2)
                received.update(self.repository[name] - self.repository[name] // 2)
                files.update()
            received.set_description("done")
