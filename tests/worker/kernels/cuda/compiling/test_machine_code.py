"""All kernels compile for cards that are not here, fit them, and multiply as these cards multiply fastest.

The interpreter runs kernels in the process of these tests, so the compiler has one of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packed import change_config
from shape_files import read_shapes
from tiny import tiny_config
from uninterpreted import ROOT, run_uninterpreted

SECONDS = 800
CAPABILITIES = (80, 86, 89, 90, 100, 120)
SHARES = 8
"""A test compiles every eighth variant: all of them take minutes, for each capability."""
LEAST_E4M3 = 89
"""The first capability that knows numbers of 8 bits in e4m3."""
LEAST_ROWS = 64
"""The rows of a tile from which on the matrix units of 9.0 and 10.0 read it from shared memory."""
LARGE = {90: "HGMMA", 100: "UTCHMMA"}
"""The instructions that do so."""
VOCABULARY = 151_936
MODELS = read_shapes("compiled")
"""Configs that together start all kernels, by their architectures and what is special in them."""
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@dataclass(frozen=True)
class Variant:
    """What became of one variant of a kernel."""

    kernel: str
    constants: dict[str, Any]
    matrix_unit: list[str] | None
    """None: it was not compiled, for it belongs to another share."""
    fault: str


Model = tuple[str, list[str], bool]
"""A folder, the number types of a cache, and whether it is served in fp8."""


def written(folder: Path, architecture: str, **fields: object) -> str:
    """A folder with a config: nothing else is read."""
    made = folder / str(len([*folder.iterdir()]))
    tiny_config(architecture, **fields).save_pretrained(made)
    return str(made)


def decoder(folder: Path) -> str:
    return written(folder, "Qwen3ForCausalLM", **MODELS["decoder"], vocab_size=VOCABULARY)


def quantized(folder: Path, method: str, **fields: object) -> str:
    made = written(folder, "Qwen3ForCausalLM", **MODELS["decoder"])
    change_config(Path(made), quantization_config={"quant_method": method, **fields})
    return made


def models_in(folder: Path, capability: int) -> list[Model]:
    """Models that start all kernels."""
    types = ["bfloat16", "float8_e5m2", *["float8_e4m3fn"] * (capability >= LEAST_E4M3)]
    plain = decoder(folder)
    others = [
        *(written(folder, name.partition(":")[0], **MODELS[name]) for name in MODELS if name[0].isupper()),
        quantized(folder, "awq", bits=4, group_size=128, zero_point=True, version="gemm"),
        quantized(folder, "fp8", weight_block_size=[128, 128], activation_scheme="dynamic"),
    ]
    return [(plain, types, False), (plain, types[:1], True), *((each, types[:1], False) for each in others)]


def compiled(capability: int, share: int, models: list[Model]) -> list[Variant]:
    """Every variant that these models start on a card, of which one share is compiled."""
    program = ROOT / "tests" / "support" / "compiled_ahead.py"
    run = run_uninterpreted(program, capability, share, SHARES, json.dumps(models), timeout=SECONDS)
    return [Variant(*json.loads(line)) for line in run.stdout.splitlines()]


def expected_unit(variant: Variant, capability: int) -> list[str]:
    """The instruction of the matrix unit that a kernel should multiply with."""
    constants = variant.constants
    if variant.kernel in ("multiply", "multiply_pairs"):
        rows = constants["BN"]  # the matrix is the left side of it
    elif variant.kernel.startswith("attend"):
        rows = constants["BM"]
    elif variant.kernel == "shrink" or variant.kernel in JOINED:  # `expand` multiplies in float32
        rows = 16
    elif variant.kernel.endswith("_tiles"):
        rows = constants["TILE"]
        if rows < LEAST_ROWS and capability in LARGE and variant.kernel != "solve_tiles":
            return sorted({"HMMA", LARGE[capability]})  # states have more rows than a tile has tokens
    else:
        return []
    if rows < LEAST_ROWS:
        return ["HMMA"]
    return [LARGE.get(capability, "HMMA")]


def assert_right(variants: list[Variant], capability: int) -> None:
    assert [variant for variant in variants if variant.fault] == []
    made = [each for each in variants if each.matrix_unit is not None]
    assert [each for each in made if each.matrix_unit != expected_unit(each, capability)] == []
    assert len(made) >= len(variants) // SHARES


CODE = """
        /*0000*/                   STL [R1], R2 ;                       /* 0x0000000201007387 */
                                                                        /* 0x000fe20000100800 */
        /*0010*/                   IADD3 R3, R3, 0x1, RZ ;              /* 0x0000000103037810 */
        /*0020*/                   LDL.LU R2, [R1] ;                    /* 0x0000000001027983 */
        /*0030*/              @!P0 BRA 0x10 ;                           /* 0xfffffffc00008947 */
        /*0040*/                   LDL R2, [R1+0x4] ;                   /* 0x0000040001027983 */
        /*0050*/                   BRA 0x50;                            /* 0xfffffff000007947 */
"""


def test_registers_that_are_spilled_in_loops_are_told_from_others() -> None:
    count = import_module("machine_code")._count_spills
    assert count(CODE) == (1, 2)
    assert count(CODE.replace("BRA 0x10", "BRA 0x40")) == (0, 3)


DRAWS = {"survey_groups", "narrow", "draw_row"}
LAYOUTS = {"lay_out_any", "lay_out_entries", "lay_out_rows", "lay_out_samples", "merge_rows"}
HEADS = {"prepare_and_cache", "turn", "attend", "join"}
LATENTS = {"norm_front", "prepare_latent", "attend_latent"}
EXPERTS = {"choose", "sort_pairs", "multiply_pairs", "add_pairs"}
STATES = {"convolve", "learn", "scan", "open_gates", "add_squares"}
ADAPTERS = {"shrink", "expand", "gather"}
JOINED = {"project_heads", "project_gates", "add_product"}
SMALL = {"find_angles", "find_tops"}
"""Kernels of joined steps that multiply nothing."""
TILES = {"solve_tiles", "learn_tiles", "scan_tiles"}
QUANTIZED = {"multiply", "join_splits", "widen_rows"}
ROUNDED = {"round_rows"}
"""Kernels of e4m3, which cards before 8.9 do not start: they widen what is stored in it."""


@pytest.mark.timeout(SECONDS + 100)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_ahead(tmp_path: Path, capability: int, share: int) -> None:
    """Variants of e4m3 are left out below 8.9: its caches, and rows that are rounded to it."""
    variants = compiled(capability, share, models_in(tmp_path, capability))
    known = {"norm", "activate"} | HEADS | LATENTS | DRAWS | LAYOUTS | EXPERTS | STATES | TILES | QUANTIZED
    known |= ADAPTERS | JOINED | SMALL
    largest = {0, 57344}  # of caches, and 0 for those of 16 bits
    if capability >= LEAST_E4M3:
        known, largest = known | ROUNDED, largest | {448}
    assert {variant.kernel for variant in variants} == known
    assert {each.constants["MOST"] for each in variants if each.kernel == "prepare_and_cache"} == largest
    assert_right(variants, capability)
