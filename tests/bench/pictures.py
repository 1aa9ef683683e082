"""Measures how many pictures a second a tower of random weights turns into vectors, beside the floor.

python tests/bench/pictures.py [--dtype bfloat16] [--pictures 32] [--rounds 5]

The tower is that of CLIP B/32, and pictures are prepared already: 8-bit pixels of 224 x 224. The floor is
what the products of matrices take, those of attention among them, at the rate at which this machine
multiplied in registers in the same round. Of rounds, each of which measures both, the median ratio counts: by
the clock, and by the time that threads had a processor, which other work on the machine leaves as it is.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import register_rate

from models import ops
from models.config import read_config
from models.conversion.conversion_choice import resolve_conversion
from models.loader import LoadOptions, load_model
from models.vision.tower import TowerInput, finish
from worker.kernels.cpu.operations import open_kernels

_SIDE, _PATCH, _WIDTH, _INNER, _LAYERS, _VECTOR = 224, 32, 768, 3072, 12, 512
_RATES = {"float32": "fp32", "bfloat16": "bf16"}


def operations() -> float:
    """Multiplications and additions of one picture."""
    patches = (_SIDE // _PATCH) ** 2
    rows = patches + 1
    layer = rows * (4 * _WIDTH**2 + 2 * _WIDTH * _INNER) + 2 * rows**2 * _WIDTH
    return 2 * (patches * 3 * _PATCH**2 * _WIDTH + _LAYERS * layer + _WIDTH * _VECTOR)


def load(dtype: torch.dtype) -> Any:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tower = {"model_type": "clip_vision_model", "image_size": _SIDE, "patch_size": _PATCH}
        config = {
            "architectures": ["CLIPModel"],
            "text_config": {"num_hidden_layers": 1},
            "vision_config": tower,
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "preprocessor_config.json").write_text("{}")
        read = read_config(folder)
        served = resolve_conversion(read, folder)
        return load_model(LoadOptions(read, folder, dtype=dtype, load_format="dummy", conversion=served))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=list(_RATES), default="float32")
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    ops.use(open_kernels(os.cpu_count() or 1))
    model = load(getattr(torch, asked.dtype)).base
    made = torch.Generator().manual_seed(0)
    grid = (1, _SIDE // _PATCH, _SIDE // _PATCH)
    pixels = torch.randint(256, (asked.pictures, _SIDE, _SIDE, 3), generator=made, dtype=torch.uint8)
    items = [TowerInput("image", each, grid, 1) for each in pixels]
    finish(model.encode(items))
    threads = os.cpu_count() or 1
    ratios: list[tuple[float, float]] = []
    for _ in range(asked.rounds):
        floor = register_rate(_RATES[asked.dtype]) * 1e12 / operations()
        started, ran = time.perf_counter(), time.process_time()
        finish(model.encode(items))
        seconds = time.perf_counter() - started, (time.process_time() - ran) / threads
        rates = [asked.pictures / each for each in seconds]
        ratios.append((rates[0] / floor, rates[1] / floor))
        print(f"{rates[0]:.1f} pictures/s, {rates[1]:.1f} by processor time, floor {floor:.1f}")
    clock, processor = map(median, zip(*ratios, strict=True))
    print(f"median: {clock:.2f} of the floor, {processor:.2f} by processor time")


if __name__ == "__main__":
    main()
