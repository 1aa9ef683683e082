"""`facet shard`: writes a checkpoint with a file for each rank, which --load-format sharded_state reads."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from models.checkpoint.files import open_source
from models.checkpoint.hub import resolve
from models.checkpoint.sharded import Pieces
from models.config import read_config
from models.conversion.conversion_choice import resolve_conversion
from models.loader import LoadOptions, load_model
from models.parallel.parallel import Parallel
from models.parallel.rank_shares import check_cut


def run(arguments: Sequence[str], command: str) -> int:
    """Write what a command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=command, description="Write a checkpoint with a file for each rank."
    )
    parser.add_argument("model", metavar="MODEL", help="A folder or a hub id.")
    parser.add_argument("--output", type=Path, required=True, help="A folder that is not there yet.")
    for flag, short in (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp")):
        parser.add_argument(flag, short, type=int, default=1, metavar="N", help="As for serve (1).")
    given = parser.parse_args(arguments)
    try:
        folder = resolve(given.model, None, None, lambda part: None)
        shard(folder, given.output, given.tensor_parallel_size, given.pipeline_parallel_size)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def shard(folder: Path, output: Path, ranks: int, stages: int) -> None:
    """Load a model as each rank does, and write what that reads; all other files are copied."""
    config = read_config(folder)
    if min(ranks, stages) < 1:
        raise ValueError(f"there cannot be {min(ranks, stages)} ranks or stages: give 1 or more")
    check_cut(config, ranks, stages)
    weights = shutil.ignore_patterns("model*.safetensors*", "*.bin", "*.bin.index.json", "*.pt", "*.gguf")
    shutil.copytree(folder, output, ignore=lambda at, names: weights(at, names) if at == str(folder) else ())
    conversion, dtype = resolve_conversion(config, folder), getattr(torch, config.dtype)
    for rank in range(ranks * stages):
        parallel = Parallel(rank % ranks, ranks, stage=rank // ranks, stages=stages)
        options = LoadOptions(config, folder, dtype=dtype, parallel=parallel, conversion=conversion)
        pieces = Pieces(open_source(folder, "auto"))
        load_model(options, source=pieces)
        pieces.write(output, parallel)
        print(f"rank {rank} of {ranks * stages} is written", flush=True)
