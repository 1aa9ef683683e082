"""`facet kernels compile` makes what a server would ask for, and neither takes more cores than it may."""

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("interpreted")  # before any kernel is imported
from packed import change_config
from tiny import tiny_checkpoint

from models.config import read_config
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.compiling import command, model_variants


@pytest.mark.parametrize(("checkpoint", "made"), [({}, True), ({"quant_method": "fp8"}, False)])
def test_plain_matrices_of_an_fp8_checkpoint_stay_plain(
    checkpoint: dict[str, object], made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path)
    if checkpoint:
        change_config(folder, quantization_config=checkpoint)
    bound: list[bool] = []

    def bind(card: Card, *, fp8: bool) -> dict[str, object]:
        bound.append(fp8)
        return {}

    monkeypatch.setattr(command, "cuda_operations", bind)
    for name in ("opening_calls", "calls_of_ranks"):
        monkeypatch.setattr(command, name, lambda *given, **named: [])
    given = Namespace(
        folder=folder,
        dtype="auto",
        kv_cache_dtype="auto",
        block_size=64,
        quantization="fp8",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        enable_expert_parallel=False,
        enable_lora=False,
        max_lora_rank=16,
        all2all_backend="allgather_reducescatter",
    )
    assert command.all_calls(read_config(folder), given, 90) == []
    assert set(bound) == {made}


def test_ranks_share_the_cores_that_a_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, most: int, **given: Any) -> None:
            threads.append(most)
            super().__init__(most, **given)

    monkeypatch.setattr(model_variants, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr(model_variants, "usable_cores", lambda: 5)
    for ranks in (1, 2):
        with model_variants.compiling(list, None, (0, ranks)):
            pass
    assert threads == [4, 2]
