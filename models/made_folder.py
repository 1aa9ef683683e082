"""Folders that look like any other checkpoint, made once of files in another layout, and kept. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from models.plain_files import FileError


def made_once(cache: Path, files: list[Path], code: Path, fill: Callable[[Path], None]) -> Path:
    """A folder within `cache` that `fill` has filled from these files, now or before.

    It is filled anew if a file changes, or the code in the folder `code` that reads them. Raises FileError.
    """
    target = cache / _digest(files, code)
    if not (target / "config.json").is_file():
        try:
            with tempfile.TemporaryDirectory(dir=cache) as aside:
                made = Path(aside) / "made"
                made.mkdir()
                fill(made)
                if target.is_dir() and not (target / "config.json").is_file():
                    shutil.rmtree(target)  # something has removed a part of it
                with suppress(FileExistsError, OSError):  # another process was faster
                    made.rename(target)
        except OSError as error:
            raise FileError(
                f"{cache} cannot be written ({error.strerror}), which is needed to read {files[0].name}: let "
                "XDG_CACHE_HOME name another folder"
            ) from None
    return target


def link(made: Path, paths: Iterable[Path]) -> None:
    """Put links to files or folders into a folder, under their own names."""
    for path in paths:
        (made / path.name).symlink_to(os.path.abspath(path))


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Write a file of safetensors, of the types, shapes and bytes of tensors."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape, content) in tensors.items():
        start, end = end, end + len(content)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    told = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        file.writelines(content for _, _, content in tensors.values())


def _digest(files: list[Path], code: Path) -> str:
    """A name that changes with the files, and with the code that reads them."""
    digest = hashlib.sha256()
    for source in sorted(code.rglob("*.py")):
        digest.update(source.read_bytes())
    for file in files:
        found = file.stat()
        digest.update(f"{os.path.abspath(file)} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]
