"""Checkpoints with a file for each rank, `model-rank-R-part-0.safetensors`, of the pieces that it reads.

The metadata of a file says of which tensors these are, and the types and shapes of all tensors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoint.files import Source, Stored, read_safetensors
from models.parallel.parallel import Parallel
from models.weight_pieces import Cut, WeightsError


class _Contents(msgspec.Struct, frozen=True):
    """The metadata of a file: the numbers of ranks in a stage and of stages, the types and shapes of all
    tensors of the checkpoint, and from which of them each piece in the file was cut, and how."""

    ranks: tuple[int, int]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    pieces: dict[str, tuple[str, Cut | None]]


class Pieces(Source):
    """A checkpoint that keeps the pieces that are read of it."""

    def __init__(self, source: Source) -> None:
        self._read: dict[tuple[str, Cut | None], Tensor] = {}
        tensors = {
            name: replace(stored, read=partial(self._note, name, stored))
            for name, stored in source.tensors.items()
        }
        super().__init__(source.place, tensors)

    def _note(self, name: str, stored: Stored, cut: Cut | None) -> Tensor:
        return self._read.setdefault((name, cut), stored.read(cut))

    def write(self, folder: Path, parallel: Parallel) -> None:
        """Write the file of a rank, which has read its pieces."""
        tensors = {name: (stored.dtype, stored.shape) for name, stored in self.tensors.items()}
        pieces = {f"{name}#{number}": (name, cut) for number, (name, cut) in enumerate(self._read)}
        contents = _Contents((parallel.size, parallel.stages), tensors, pieces)
        written = {name: self._read[piece].contiguous() for name, piece in pieces.items()}
        save_file(written, _path(folder, parallel), {"facet": msgspec.json.encode(contents).decode()})


def open_shards(folder: Path, parallel: Parallel) -> Source:
    """Open the file of a rank as the whole checkpoint, of which only its pieces can be read."""
    path, ranks = _path(folder, parallel), (parallel.size, parallel.stages)
    if not path.exists():
        raise WeightsError(f"{folder} has no {path.name}: `facet shard` writes such files")
    stored = read_safetensors(path)
    with safe_open(path, framework="pt") as file:  # pyright: ignore[reportCallIssue]
        metadata: dict[str, str] = file.metadata() or {}
    if "facet" not in metadata:
        raise WeightsError(f"{path} was not written by `facet shard`: others name tensors as their models do")
    contents = msgspec.json.decode(metadata["facet"], type=_Contents)
    if contents.ranks != ranks:
        raise WeightsError(
            f"{path} was written for -tp {contents.ranks[0]} -pp {contents.ranks[1]}: give these"
        )
    found = {piece: stored[name] for name, piece in contents.pieces.items()}

    def read(name: str, cut: Cut | None) -> Tensor:
        if (name, cut) not in found:
            raise WeightsError(f"{name} was cut for another way to serve the model: run `facet shard` again")
        return found[name, cut].read(None)

    tensors = contents.tensors.items()
    return Source(
        path.name,
        {name: Stored(shape, kind, path.name, partial(read, name)) for name, (kind, shape) in tensors},
    )


def _path(folder: Path, parallel: Parallel) -> Path:
    return folder / f"model-rank-{parallel.stage * parallel.size + parallel.rank}-part-0.safetensors"
