"""`facet prove` and receipts name faults that are planted in weights, settings and kernels."""

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import kernel_levels
import msgspec
import published
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_core.config import EngineConfig
from engine_core.resolve_checkpoint import find_checkpoint, make_worker_config
from models.checkpoint.hub import DEMO
from models.config import read_config
from server.terminal.console import CommandError
from server.terminal.proving import command
from server.terminal.proving.checks import Check, Facts, check_answers, check_layers, check_operations
from server.terminal.proving.receipts import Receipt, changes, difference, receipt_of
from server.terminal.proving.sounds import features
from server.terminal.proving.sounds import sound as sung
from worker.kernels.cpu import operations
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


def checked(name: str, folder: Path) -> tuple[list[Check], Receipt]:
    """The checks of a model, and its receipt."""
    facts = facts_of(name)
    order = order_of(folder, facts)
    proof = compute.prove(order)
    checks = [check_layers(name, facts, proof.computed), check_answers(name, facts, proof.computed)]
    return checks, receipt_of(name, order, proof)


@cache
def sound(name: str) -> tuple[list[Check], Receipt]:
    """The same of a model as it was published."""
    return checked(name, DEMO if name == "demo" else published.short_named(name))


def assert_named(name: str, folder: Path, named: str, changed: str) -> None:
    """Both ways name where a model differs, and the receipt says what has changed."""
    checks, receipt = checked(name, folder)
    assert named in next(check.found for check in checks if not check.is_right)
    kept = sound(name)[1]
    assert named in difference(kept, receipt)
    assert [change.partition(":")[0] for change in changes(kept, receipt)] == [changed]


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
    checks, receipt = checked("demo", DEMO)
    assert [check.is_right for check in checks] == [True, True]
    kept = sound("demo")[1]
    assert difference(kept, receipt) == "" == "".join(changes(kept, receipt))


@pytest.mark.parametrize("number", range(len(DEMO_FAULTS)))
def test_a_fault_of_the_demo_model_is_named(number: int, tmp_path: Path) -> None:
    named, fault = DEMO_FAULTS[number]
    assert_named("demo", damaged(DEMO, tmp_path / "demo", fault), named, "weights")


@pytest.mark.parametrize("number", range(len(MINILM_FAULTS)))
def test_a_fault_of_an_encoder_is_named(number: int, tmp_path: Path) -> None:
    named, fault = MINILM_FAULTS[number]
    assert_named(
        "minilm", damaged(published.short_named("minilm"), tmp_path / "minilm", fault), named, "weights"
    )


@pytest.mark.slow
def test_what_whisper_hears_is_compared_from_its_first_layer_on() -> None:
    """The second sound is a little louder in its higher bands than that of which answers are stored."""
    facts = facts_of("whisper-tiny.en")
    heard = [features(sung(prompt.pitch)) for prompt in facts.prompts[:2]]
    heard[1][40:] *= 1.02
    engine = EngineConfig(model="whisper-tiny.en", worker=WorkerOptions(dtype="float32", cpu_threads=1))
    published.short_named("whisper-tiny.en")
    folder = find_checkpoint(engine, lambda _: None)
    order = msgspec.structs.replace(
        order_of(folder, facts), prompts=[prompt.ids for prompt in facts.prompts[:2]]
    )
    computed = compute.prove(
        msgspec.structs.replace(order, features=[each.tobytes() for each in heard])
    ).computed
    of_first, of_second = (msgspec.structs.replace(facts, prompts=[each]) for each in facts.prompts[:2])
    assert check_layers("it", of_first, computed[:1]).is_right
    assert check_answers("it", of_first, computed[:1]).is_right
    assert "layer 0 is the first" in check_layers("it", of_second, computed[1:]).found


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_a_wrong_setting_is_named(number: int, tmp_path: Path) -> None:
    named, settings = SETTINGS[number]
    folder = damaged(DEMO, tmp_path / "demo", lambda weights: None)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {**config.get("rope_parameters", {}), **settings}
    (folder / "config.json").write_text(json.dumps(config | settings))
    assert_named("demo", folder, named, "config.json")


@pytest.mark.parametrize("name", ("linear", "gated_linear", "rms_norm", "add_rms_norm", "attention", "embed"))
def test_a_kernel_that_is_wrong_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, table = operations.choose_kernels()
    if name not in table:
        pytest.skip("this machine has no kernels of ours")

    def wrong(*given: Any, **options: Any) -> Any:
        found = table[name](*given, **options)
        return tuple(each * 1.5 for each in found) if isinstance(found, tuple) else found * 1.5

    monkeypatch.setattr(operations, "choose_kernels", lambda: (library, {**table, name: wrong}))
    found = list(compute.compare_operations(16, torch.device("cpu")))
    check = check_operations(Proof("cpu", "some level", "float32", "", [], found))
    assert not check.is_right and f"{name} (" in check.found
    assert {each.name for each in found if each.difference > 1} == {name}


def test_operations_that_agree_are_right() -> None:
    found = [OperationCheck("linear", "float32", 0.3), OperationCheck("add", "float32", 0.0)]
    check = check_operations(Proof("cpu", "avx2", "float32", "", [], found))
    assert check.is_right and "linear, 30% of what is allowed" in check.found


def test_a_type_of_numbers_and_a_level_of_kernels_are_named() -> None:
    """All answers differ in some bit, though few tokens do."""
    kept, facts = sound("demo")[1], facts_of("demo")
    wider = order_of(DEMO, facts, dtype="bfloat16")
    found = {"number type": receipt_of("demo", wider, compute.prove(wider))}
    if "avx2" in kernel_levels.NAMES[1:]:
        order = order_of(DEMO, facts)
        with kernel_levels.only_level("avx2"):
            found["kernels"] = receipt_of("demo", order, compute.prove(order))
    for name, receipt in found.items():
        assert "4 of 4 answers differ; layer 0 is the first" in difference(kept, receipt)
        assert [change.partition(":")[0] for change in changes(kept, receipt)] == [name]


@pytest.mark.parametrize(
    "given",
    (
        ["--receipt", "a", "--against", "b"],
        ["--dtype", "float32"],
        ["-tp", "2"],
        ["--receipt", "a", "-tp", "0"],
    ),
    ids=str,
)
def test_options_that_do_not_fit_are_refused(given: list[str]) -> None:
    with pytest.raises(CommandError, match=r"give one of them|for receipts|1 or more"):
        command.run(given, "facet prove")


def test_the_command_computes_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["demo"], "facet prove") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["right"] * 4
