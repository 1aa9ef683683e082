"""A receipt names all that decides answers, apart from what was computed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine_core.config import EngineConfig
from engine_core.resolve_checkpoint import make_worker_config
from models.checkpoint.hub import DEMO
from models.config import read_config
from server.terminal.console import CommandError
from server.terminal.proving import checks, command, receipts
from server.terminal.proving.receipts import (
    Receipt,
    changes,
    difference,
    read_receipt,
    receipt_of,
    receipt_order,
)
from worker.options import WorkerOptions
from worker.proof import compute
from worker.proof.messages import Proof, ProofOrder

NOTHING = Proof("cpu", "avx2", "float32", "digest", [], [])


def order_of(folder: Path, options: WorkerOptions | None = None) -> ProofOrder:
    engine = EngineConfig(model=str(folder), worker=options or WorkerOptions(dtype="float32"))
    return ProofOrder(make_worker_config(engine, read_config(folder), folder), [], 8)


def receipt(folder: Path = DEMO, **changed: Any) -> Receipt:
    return receipt_of("demo", order_of(folder), msgspec.structs.replace(NOTHING, **changed))


def with_file(name: str, folder: Path) -> Receipt:
    """The receipt of a copy in which a file has one byte more."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("adapters"))
    path = folder / name
    path.write_bytes((path.read_bytes() if path.is_file() else b"") + b"\n")
    return receipt(folder)


PLANTED: dict[str, Callable[[Path], Receipt]] = {
    "tokenizer": lambda folder: with_file("tokenizer.json", folder),
    "chat template": lambda folder: with_file("chat_template.jinja", folder),
    "config.json": lambda folder: with_file("config.json", folder),
    "weights": lambda _: receipt(weights="other"),
    "device": lambda _: receipt(device="cuda"),
    "kernels": lambda _: receipt(kernels="amx"),
    "number type": lambda _: receipt(dtype="bfloat16"),
    "threads": lambda _: receipt_of("demo", order_of(DEMO, WorkerOptions(cpu_threads=3)), NOTHING),
    "ranks": lambda _: receipt_of("demo", order_of(DEMO), NOTHING, ranks=2),
}


@pytest.mark.parametrize("named", PLANTED)
def test_what_decides_answers_is_named_where_it_changes(named: str, tmp_path: Path) -> None:
    found = changes(receipt(), PLANTED[named](tmp_path / "demo"))
    assert [each.partition(":")[0] for each in found] == [named]


def test_other_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = receipt()
    monkeypatch.setattr(receipts, "version", lambda name: "9.9")
    monkeypatch.setattr(receipts, "processor_name", lambda path: "another")
    names = [each.partition(":")[0] for each in changes(kept, receipt())]
    assert names == ["processor", "facet-serve", "torch", "transformers"]


def test_models_with_sources_have_no_receipts() -> None:
    order = order_of(DEMO)
    model = msgspec.structs.replace(order.config.model, raw={"is_encoder_decoder": True})
    changed = msgspec.structs.replace(order.config, model=model)
    with pytest.raises(CommandError, match="an encoder for its source"):
        receipt_order(msgspec.structs.replace(order, config=changed))


def test_what_is_no_receipt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(CommandError, match="no receipt"):
        read_receipt(tmp_path / "file")
    with pytest.raises(CommandError, match="cannot be read"):
        read_receipt(tmp_path / "none")
    with pytest.raises(CommandError, match="no stored answers of 'gpt2'"):
        command.run(["gpt2"], "facet prove")


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_one() -> None:
    order = receipt_order(order_of(DEMO))
    order = msgspec.structs.replace(order, prompts=order.prompts[:4])
    one, two = compute.prove(order), checks.compute(order, ranks=2)
    assert difference(receipt_of("demo", order, one), receipt_of("demo", order, two)) == ""
