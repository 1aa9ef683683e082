"""What the comparison writes and counts; what it measures needs a quiet machine, and no test."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MACHINE = {
    "processor": "A CPU",
    "cores": 2,
    "instructions": ["avx2"],
    "memory_gib": 24,
    "read_gb_s": 40.0,
    "bf16_tflop_s": 1.0,
    "fp32_tflop_s": 0.5,
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script of this folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return import_module


def record(side: str, round: int, tokens: float, **more: object) -> dict[str, Any]:
    where = {"part": "generation", "model": "llama-135m, bfloat16", "side": side, "round": round}
    figures = {"concurrency": 1, "failed": 0, "output_tokens_per_second": tokens, "tpot_ms": 20.0}
    return {**where, "case": "256 in, 64 out, 1 at once", **figures, **more}


def known(*records: dict[str, Any]) -> dict[str, Any]:
    sides = {"facet": "1", "vLLM": "2 as installed", "Infinity": "3"}
    return {"records": [*records], "machine": MACHINE, "date": "today", "sides": sides}


RECORDS = [
    *(record("facet", 0, 60), record("facet", 1, 90), record("facet", 2, 70)),
    *(record("vLLM", 0, 30), record("vLLM", 1, 30), record("vLLM", 2, 20, failed=2)),
]


def test_ratios_are_taken_within_a_round(load) -> None:
    ratios = load("page")._ratios(RECORDS, "vLLM", "output_tokens_per_second")
    assert ratios == [2.0, 3.0, 3.5]


def test_only_what_stands_between_the_marks_is_written_anew(load, tmp_path: Path) -> None:
    page = load("page")
    target = tmp_path / "performance.md"
    target.write_text(f"# Before\n\n{page.BEGIN}\nold\n{page.END}\n\n## After\n")
    for _ in range(2):
        page.write(target, known(*RECORDS))
    text = target.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("\n\n## After\n")
    assert (text.count(page.BEGIN), text.count(page.END), text.count("old")) == (1, 1, 0)
    assert "| vLLM | 30 (**3.00**) |" in text
    assert "has read 40.0 GB/s, and multiplied 1.00 TFLOP/s in bfloat16 and 0.50 in float32" in text
    assert "- facet: 1\n- vLLM: 2 as installed\n" in text
    assert "Infinity" not in text, "it was not measured"
    assert "vLLM, 256 in, 64 out, 1 at once, round 3: 2 requests failed." in text
    pictures = sorted(path.name for path in (tmp_path / "performance").glob("*.svg"))
    assert len(pictures) == 2
    assert all(f"performance/{name}" in text for name in pictures)


def test_a_side_that_did_not_start_is_told(load, tmp_path: Path) -> None:
    page = load("page")
    failure = record("vLLM", 0, 0, case="start", failure="it ended with 1:\nno memory")
    page.write(tmp_path / "p.md", known(record("facet", 0, 60), failure))
    text = (tmp_path / "p.md").read_text()
    assert "vLLM did not start: it ended with 1:\n    no memory" in text
    assert "| facet | 60 |" in text


def test_eight_bits_stand_beside_eight_bits(load, tmp_path: Path) -> None:
    page = load("page")
    sides = {"facet": 60, "facet int8": 90, "llama.cpp": 30, "llama.cpp Q8_0": 45}
    page.write(tmp_path / "p.md", known(*(record(side, 0, tokens) for side, tokens in sides.items())))
    text = (tmp_path / "p.md").read_text()
    assert "| facet int8 | 90 |" in text
    assert "| llama.cpp | 30 (**2.00**) |" in text
    assert "| llama.cpp Q8_0 | 45 (**2.00**) |" in text


def checkpoint(folder: Path, **config: int) -> Path:
    """One layer of 8 x 8 and 4 x 8, 10 tokens."""
    layer = {"layer.0.out.weight": [8, 8], "layer.0.down.weight": [4, 8], "layer.0.norm.weight": [8]}
    sizes = {"word_embeddings.weight": [10, 8], **layer}
    head = json.dumps({"__metadata__": {}, **{name: {"shape": size} for name, size in sizes.items()}})
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head.encode())
    sized = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 10, **config}
    (folder / "config.json").write_text(json.dumps(sized))
    return folder


def test_the_floor_of_a_generation_counts_products_and_bytes(load, tmp_path: Path) -> None:
    floor, work = load("floor"), load("work")
    shape = floor.Shape.read(checkpoint(tmp_path, num_key_value_heads=1))
    assert (shape.width, shape.kv_width, shape.linear, shape.head) == (8, 4, 64 + 32, 80)
    machine = {"bf16_tflop_s": 1e-9, "read_gb_s": 1e-6}  # 1,000 operations and 1,000 bytes a second

    def values(at_once: int) -> dict[str, float]:
        case = work.Case("", at_once, {"random_input_len": 20, "random_output_len": 4})
        return floor.Floor(shape, work.Model("m"), machine).values(case)

    prompt = 2 * (20 * 96 + 20 * 10 * 16 + 80) / 1000
    read = 2 * (96 + 80 + 22 * 8) / 1000
    multiplied = 2 * (96 + 80 + 22 * 16) / 1000
    alone = values(1)
    assert alone["ttft_ms"] == pytest.approx(1000 * prompt)
    assert alone["tpot_ms"] == pytest.approx(1000 * max(read, multiplied))
    assert alone["output_tokens_per_second"] == pytest.approx(4 / (prompt + 3 * multiplied))
    four = values(4)
    assert four["output_tokens_per_second"] == pytest.approx(16 / (4 * prompt + 3 * 4 * multiplied))
    assert "ttft_ms" not in four
    slow = floor.Floor(shape, work.Model("m"), {**machine, "read_gb_s": 1e-7})
    assert slow.values(work.Case("", 1, {"random_input_len": 20, "random_output_len": 4}))["tpot_ms"] == (
        pytest.approx(10_000 * read)
    )


def test_the_floor_reads_the_experts_that_are_touched(load, tmp_path: Path) -> None:
    floor = load("floor")
    folder = checkpoint(tmp_path, num_local_experts=4, num_experts_per_tok=1)
    path = folder / "model.safetensors"
    sizes = {"layer.0.out.weight": [8, 8], "layer.0.experts.0.w1.weight": [6, 8], "layer.0.all": [3, 6, 8]}
    head = json.dumps({name: {"shape": size} for name, size in sizes.items()})
    path.write_bytes(len(head).to_bytes(8, "little") + head.encode())
    shape = floor.Shape.read(folder)
    assert (shape.linear, shape.routed, shape.chosen) == (64, 4 * 48, 0.25)
    assert shape.multiplied == shape.touched(1) == 64 + 48
    assert shape.touched(2) == 64 + 48 * 4 * (1 - 0.75**2)


def test_the_floor_of_an_embedding_counts_every_pair_of_tokens(load, tmp_path: Path) -> None:
    floor, work = load("floor"), load("work")
    shape = floor.Shape.read(checkpoint(tmp_path))
    machine = {"fp32_tflop_s": 1e-9, "read_gb_s": 1.0}
    case = work.Case("", 2, {}, texts=(6, 3))
    values = floor.Floor(shape, work.Model("m", "float32"), machine).values(case)
    text = 2 * 6 * (96 + 2 * 8 * 6) / 1000
    assert values["inputs_per_second"] == pytest.approx(1 / text)
    assert values["e2el_ms"] == pytest.approx(1000 * text * 3 * 2)


def test_every_side_serves_the_folder_at_the_port_that_it_is_given(load, tmp_path: Path) -> None:
    peers, work = load("peers"), load("work")
    for kind in ("bf16", "q8_0", "f32"):
        (tmp_path / f"m.{kind}.gguf").touch()
    others = (*peers.vllm(tmp_path), *peers.llama(tmp_path), *peers.infinity(tmp_path))
    found = [*peers.ours(["--more"]), *others]
    commands = {side.name: side.command(tmp_path / "m", work.Model("any"), 4321) for side in found}
    for name, command in commands.items():
        assert any(str(word).startswith(str(tmp_path / "m")) for word in command), name
        assert command[command.index("--port") + 1] == "4321"
    assert commands["facet int8"] == [*commands["facet"], "--quantization", "int8"]
    served = commands["vLLM eager"].index("serve") + 1
    assert commands["vLLM eager"][served] == str(tmp_path / "m"), "it takes no option before the folder"
    taking = {part: [side.name for side in found if part in side.parts] for part in work.PARTS}
    assert taking["embeddings"] == ["facet", "vLLM", "vLLM tuned", "llama.cpp", "Infinity"]
    assert taking["startup"] == ["facet", "vLLM", "vLLM eager"]


@pytest.mark.parametrize("quick", [True, False])
def test_every_case_is_a_load_that_can_be_asked_for(load, quick: bool) -> None:
    work = load("work")
    for part, cases in work.CASES.items():
        for case in cases(quick):
            file = Path("texts.jsonl") if case.texts else None
            options = case.options("http://h", 1, quick=quick, file=file)
            assert (options.dataset_name == "custom") == (options.dataset_path is not None)
            assert options.max_concurrency == (case.concurrency,)
            assert options.num_prompts is not None or options.duration is not None
            assert (options.kind == "embeddings") == (part == "embeddings")
