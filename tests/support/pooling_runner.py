"""Runners of checkpoints that pool as their files say, and what a step of one gives."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from opened import open_runner

from models.config import read_config
from models.conversion.conversion_choice import resolve_conversion
from models.pooling.config import read_pooling
from worker.protocol import NewSeq, Pooling, SeqStep, StepInput, Vectors
from worker.runner import Runner


def runner_of(folder: Path, **given: object) -> Runner:
    model = read_config(folder)
    return open_runner(
        folder,
        conversion=resolve_conversion(model, folder, runner="pooling"),
        pooling=read_pooling(folder, model, {}),
        num_gpu_blocks_override=64,
        max_model_len=64,
        **given,
    )


def ask(runner: Runner, texts: Sequence[Sequence[int]], params: Sequence[Pooling]) -> list[Vectors]:
    """What a step gives that computes all texts."""
    causal, size = runner.facts.causal, runner.facts.block_size
    blocks = [
        list(range(4 * slot, 4 * slot - -len(text) // size)) if causal else []
        for slot, text in enumerate(texts)
    ]
    new = [
        NewSeq(slot, list(text), len(text), each)
        for slot, (text, each) in enumerate(zip(texts, params, strict=True))
    ]
    seqs = [SeqStep(slot, 0, len(text), blocks[slot], False, pools=True) for slot, text in enumerate(texts)]
    output = runner.launch(StepInput(number=1, new=new, seqs=seqs)).result()
    assert not output.failed, output.failed
    return [output.pooled[slot] for slot in range(len(texts))]


def numbers(vectors: Vectors) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(vectors.data, "<f4").reshape(vectors.shape).copy())
