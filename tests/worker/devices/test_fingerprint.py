"""The fingerprint of a worker: what changes it, and what does not."""

import re
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from sizes import worker_config
from tiny import tiny_checkpoint

from models.config import read_config
from models.parallel.experts import Placement
from worker.config import Place, WorkerConfig
from worker.devices.device_choice import open_device
from worker.devices.dtype_choice import choose_dtype
from worker.devices.fingerprint import find_fingerprint
from worker.runner import Runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def configured(folder: Path, **given: object) -> WorkerConfig:
    return worker_config(folder=str(folder), model=read_config(folder), **given)


def printed(config: WorkerConfig, max_len: int = 64) -> str:
    device = open_device(config)
    return find_fingerprint(config, device, choose_dtype(config, device), max_len)


def test_what_does_not_change_it(folder: Path) -> None:
    first = printed(configured(folder))
    assert re.fullmatch("fp_[0-9a-f]{16}", first)
    for given in ({"cpu_threads": 2}, {"max_num_seqs": 3}, {"seed": 7}, {"model_impl": "facet"}):
        assert printed(configured(folder, **given)) == first, given
    for ranks in (2, 4):
        assert printed(configured(folder, place=Place(tensor_size=ranks))) == first
    assert printed(configured(folder, place=Place(stages=2))) == first
    assert printed(configured(folder), max_len=32) == first


def test_what_changes_it(folder: Path, tmp_path: Path) -> None:
    changed = tiny_checkpoint("LlamaForCausalLM", tmp_path)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, changed / "model.safetensors")
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    stretched = msgspec.structs.replace(read_config(folder), raw={"rope_parameters": scaled})
    given = [
        {},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
        {"load_format": "dummy", "place": Place(tensor_size=2)},
        {"model_impl": "transformers"},
        {"dtype": "float16"},
        {"dtype": "float16", "place": Place(tensor_size=2)},
        {"place": Place(tensor_size=2, expert_size=2)},
        {"place": Place(tensor_size=4, expert_size=4)},
        {"place": Place(tensor_size=2, expert_size=2, expert_placement="round_robin")},
        {"place": Place(tensor_size=1, expert_size=2, expert_replicas=2)},
        {"place": Place(tensor_size=1, expert_size=4, expert_replicas=4)},
        {"place": Place(tensor_size=2, expert_size=4, expert_replicas=2)},
        {"place": Place(tensor_size=2, expert_size=2, expert_transport="all_to_all")},
    ]
    found = [printed(configured(folder, **each)) for each in given]
    found += [printed(configured(changed))]
    found += [printed(worker_config(folder=str(folder), model=stretched), length) for length in (64, 128)]
    assert len(set(found)) == len(found)


def test_where_experts_lie_does_not_change_it_if_each_returns_its_result(folder: Path) -> None:
    def places(**given: object) -> set[str]:
        layouts: list[tuple[int, int, Placement]] = [
            *((2, 2, "linear"), (4, 4, "linear"), (2, 2, "round_robin"), (1, 4, "linear"), (2, 4, "linear"))
        ]
        return {
            printed(
                configured(
                    folder,
                    place=Place(
                        tensor_size=tensor,
                        expert_size=size,
                        expert_replicas=size // tensor,
                        expert_placement=placement,
                        expert_transport="all_to_all",
                    ),
                    **given,
                )
            )
            for tensor, size, placement in layouts
        }

    assert len(places()) == 1
    assert len(places(dtype="float16")) == 3, "1, 2 and 4 tensor ranks, whose sums are not exact"
    assert len(places(load_format="dummy")) == 5


def test_kernels_change_it(folder: Path) -> None:
    config = configured(folder)
    device = open_device(config)
    first = find_fingerprint(config, device, torch.float32, 64)
    device.arithmetic += "other kernels"
    assert find_fingerprint(config, device, torch.float32, 64) != first


def test_two_starts_have_the_same(folder: Path) -> None:
    given = {"num_gpu_blocks_override": 16, "max_model_len": 32, "cpu_threads": 1}
    runners = [Runner(configured(folder, max_num_seqs=n, **given), lambda *_: None) for n in (2, 4)]
    first, second = (runner.facts.fingerprint for runner in runners)
    assert first == second == printed(configured(folder))
    for runner in runners:
        runner.close()
