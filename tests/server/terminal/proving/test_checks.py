"""`facet prove` names faults that are planted in weights, settings and kernels; receipts tell changes."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import published
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_core.config import EngineConfig
from engine_core.resolve_checkpoint import make_worker_config
from models.checkpoint.hub import DEMO
from models.config import read_config
from server.terminal.console import CommandError
from server.terminal.proving import command
from server.terminal.proving.checks import Check, Facts, check_answers, check_layers, check_operations
from server.terminal.proving.receipts import changes, difference, read_receipt, receipt_of, receipt_order
from worker.options import WorkerOptions
from worker.proof import compute
from worker.proof.messages import OperationCheck, Proof, ProofOrder

pytestmark = pytest.mark.slow(4)

Weights = dict[str, Tensor]


def order_of(folder: Path, facts: Facts | None = None, dtype: str = "float32") -> ProofOrder:
    engine = EngineConfig(model=str(folder), worker=WorkerOptions(dtype=dtype, cpu_threads=1))
    config = make_worker_config(engine, read_config(folder), folder)
    prompts = [] if facts is None else [prompt.ids for prompt in facts.prompts]
    return ProofOrder(config, prompts, 12, operations=False)


def facts_of(name: str) -> Facts:
    return msgspec.json.decode((command.FACTS / f"{name}.json").read_bytes(), type=Facts)


def checks_of(name: str, folder: Path) -> list[Check]:
    facts = facts_of(name)
    computed = compute.prove(order_of(folder, facts)).computed
    return [check_layers(name, facts, computed), check_answers(name, facts, computed)]


def scaled(name: str, factor: float, weights: Weights) -> None:
    weights[name] = weights[name] * factor


def rolled(name: str, by: int, dim: int, weights: Weights) -> None:
    weights[name] = weights[name].roll(by, dim).contiguous()


def swapped(one: str, other: str, weights: Weights) -> None:
    weights[one], weights[other] = weights[other], weights[one]


def lost(name: str, weights: Weights) -> None:
    weights[name] = torch.zeros_like(weights[name])


def of_layer(number: int, name: str) -> str:
    return f"model.layers.{number}.{name}.weight"


def of_encoder(number: int, name: str) -> str:
    return f"encoder.layer.{number}.{name}"


ATTENDS = "attention.self"
DEMO_FAULTS: list[tuple[str, Callable[[Weights], None]]] = [
    ("layer 2 is", partial(scaled, of_layer(2, "input_layernorm"), 1.05)),
    ("layer 4 is", partial(scaled, of_layer(4, "post_attention_layernorm"), 1.1)),
    ("layer 1 is", partial(rolled, of_layer(1, "self_attn.q_proj"), 16, 0)),
    ("layer 3 is", partial(rolled, of_layer(3, "self_attn.o_proj"), 1, 1)),
    ("layer 5 is", partial(swapped, of_layer(5, "mlp.gate_proj"), of_layer(5, "mlp.up_proj"))),
    ("layer 0 is", partial(scaled, of_layer(0, "mlp.down_proj"), -1.0)),
    ("layer 0 is", partial(rolled, "model.embed_tokens.weight", 1, 0)),
    ("the head differs", partial(rolled, "model.norm.weight", 9, 0)),
]
MINILM_FAULTS: list[tuple[str, Callable[[Weights], None]]] = [
    ("layer 2 is", partial(lost, of_encoder(2, "attention.self.query.bias"))),
    ("layer 0 is", partial(rolled, "embeddings.position_embeddings.weight", 1, 0)),
    ("layer 4 is", partial(scaled, of_encoder(4, "output.LayerNorm.weight"), 1.02)),
    ("layer 1 is", partial(swapped, *(of_encoder(1, f"{ATTENDS}.{at}.weight") for at in ("key", "value")))),
]  # fmt: skip
SETTINGS = [("layer 0 is", {"rope_theta": 12_000.0}), ("layer 0 is", {"rms_norm_eps": 0.5})]


def damaged(source: Path, target: Path, fault: Callable[[Weights], None]) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("adapters"))
    weights = load_file(target / "model.safetensors")
    fault(weights)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def test_the_demo_model_is_right() -> None:
    assert [check.is_right for check in checks_of("demo", DEMO)] == [True, True]


@pytest.mark.parametrize("number", range(len(DEMO_FAULTS)))
def test_a_fault_of_the_demo_model_is_named(number: int, tmp_path: Path) -> None:
    named, fault = DEMO_FAULTS[number]
    checks = checks_of("demo", damaged(DEMO, tmp_path / "demo", fault))
    assert named in next(check.found for check in checks if not check.is_right)


@pytest.mark.parametrize("number", range(len(MINILM_FAULTS)))
def test_a_fault_of_an_encoder_is_named(number: int, tmp_path: Path) -> None:
    named, fault = MINILM_FAULTS[number]
    checks = checks_of("minilm", damaged(published.short_named("minilm"), tmp_path / "minilm", fault))
    assert named in next(check.found for check in checks if not check.is_right)


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_a_wrong_setting_is_named(number: int, tmp_path: Path) -> None:
    named, settings = SETTINGS[number]
    folder = damaged(DEMO, tmp_path / "demo", lambda weights: None)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {**config.get("rope_parameters", {}), **settings}
    (folder / "config.json").write_text(json.dumps(config | settings))
    checks = checks_of("demo", folder)
    assert named in next(check.found for check in checks if not check.is_right)


@pytest.mark.parametrize("name", ("linear", "gated_linear", "rms_norm", "add_rms_norm", "attention", "embed"))
def test_a_kernel_that_is_wrong_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, table = compute.choose_kernels()
    if name not in table:
        pytest.skip("this machine has no kernels of ours")

    def wrong(*given: Any, **options: Any) -> Any:
        found = table[name](*given, **options)
        return tuple(each * 1.5 for each in found) if isinstance(found, tuple) else found * 1.5

    monkeypatch.setattr(compute, "choose_kernels", lambda: (library, {**table, name: wrong}))
    found = list(compute.compare_operations(16, torch.device("cpu")))
    check = check_operations(Proof("cpu", "some level", "float32", "", [], found))
    assert not check.is_right and f"{name} (" in check.found
    assert {each.name for each in found if each.difference > 1} == {name}


def test_operations_that_agree_are_right() -> None:
    found = [OperationCheck("linear", "float32", 0.3), OperationCheck("add", "float32", 0.0)]
    check = check_operations(Proof("cpu", "avx2", "float32", "", [], found))
    assert check.is_right and "linear, 30% of what is allowed" in check.found


def test_a_receipt_tells_what_has_changed(tmp_path: Path) -> None:
    def receipt(folder: Path, dtype: str) -> Any:
        order = receipt_order(order_of(folder, dtype=dtype))
        order = msgspec.structs.replace(order, prompts=order.prompts[:6])
        return receipt_of("demo", order, compute.prove(order))

    kept = receipt(DEMO, "bfloat16")
    assert difference(kept, receipt(DEMO, "bfloat16")) == "" == "".join(changes(kept, kept))
    other = receipt(damaged(DEMO, tmp_path / "demo", DEMO_FAULTS[0][1]), "bfloat16")
    assert difference(kept, other) == "6 of 6 answers differ; layer 2 is the first that differs"
    assert [change.partition(":")[0] for change in changes(kept, other)] == ["weights"]
    wider = receipt(DEMO, "float32")
    assert "layer 0" in difference(kept, wider) and "number type" in "".join(changes(kept, wider))


def test_what_is_no_receipt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(CommandError, match="no receipt"):
        read_receipt(tmp_path / "file")
    with pytest.raises(CommandError, match="cannot be read"):
        read_receipt(tmp_path / "none")
    with pytest.raises(CommandError, match="no stored answers of 'gpt2'"):
        command.run(["gpt2"], "facet prove")


@pytest.mark.parametrize("given", (["--receipt", "a", "--against", "b"], ["--dtype", "float32"]), ids=str)
def test_options_that_do_not_fit_are_refused(given: list[str]) -> None:
    with pytest.raises(CommandError, match=r"give one of them|for receipts"):
        command.run(given, "facet prove")


def test_the_command_computes_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["demo"], "facet prove") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["right"] * 4
