"""GGUF files of latent attention, of now and of before, are read as the checkpoints they mean."""

from pathlib import Path

import pytest
import torch
from gguf_metadata import Fields
from gguf_pairs import (
    Pair,
    Recipe,
    assert_dummy_weights_are_alike,
    assert_same_logits,
    load_pair,
    write_pair,
)
from gguf_writer import Blob, write_gguf
from safetensors.torch import load_file

from models.gguf.config import raw_config
from models.gguf.file import read_gguf
from models.gguf.tensors import open_gguf
from models.plain_files import FileError
from models.weight_slices import Cut, WeightsError

WIDTHS: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
}
"""Widths of whole blocks of 32."""
EXPERTS: dict[str, object] = {**WIDTHS, "moe_intermediate_size": 64}
FAMILIES = {
    "DeepseekV2ForCausalLM": EXPERTS,
    "DeepseekV3ForCausalLM": EXPERTS,
    "Glm4MoeLiteForCausalLM": EXPERTS,
    "YoutuForCausalLM": WIDTHS,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
SCOPE = "model.layers.0.self_attn"


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_family_in_halves(arch: str, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, arch, Recipe("Q8_0", {"attn_v_b": "F16"}), **FAMILIES[arch])
    assert "blk.0.attn_k_b.weight" in read_gguf(pair.file).tensors
    assert_same_logits(pair, 1, 2)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_0", "Q5_1", "IQ4_NL"])
def test_halves_in_other_codings(kind: str, tmp_path: Path) -> None:
    assert_same_logits(write_pair(tmp_path, "DeepseekV3ForCausalLM", Recipe(kind), **EXPERTS), 1, 4)


@pytest.mark.parametrize("lora", [None, 32])
def test_one_matrix_of_keys_and_values(lora: int | None, tmp_path: Path) -> None:
    recipe = Recipe("Q8_0", joined=True)
    pair = write_pair(tmp_path, "DeepseekV2ForCausalLM", recipe, **{**EXPERTS, "q_lora_rank": lora})
    tensors = read_gguf(pair.file).tensors
    assert "blk.0.attn_kv_b.weight" in tensors
    assert ("blk.0.attn_q.weight" in tensors) == (lora is None)
    assert_same_logits(pair, 1, 2)


def test_halves_beside_the_whole_matrix_are_left_out(tmp_path: Path) -> None:
    halves = tuple(
        Blob(f"blk.{layer}.attn_{name}_b.weight", (4,), 0, bytes(16)) for layer in range(3) for name in "kv"
    )
    recipe = Recipe("F32", joined=True, blobs=halves)
    assert_same_logits(write_pair(tmp_path, "DeepseekV3ForCausalLM", recipe, **EXPERTS), 1)


def test_yarn_sharpens_scores(tmp_path: Path) -> None:
    """The tenth that the file has of `mscale_all_dim` becomes what V2's config says."""
    pair = write_pair(tmp_path, "DeepseekV2ForCausalLM", Recipe("F32"), **EXPERTS, rope_parameters=YARN)
    scaling = {name: value for name, value in YARN.items() if name in raw_scaling(pair)}
    assert raw_scaling(pair) == {"rope_type": "yarn", **scaling}
    (model,) = load_pair(pair)
    (layer, *_) = model.attention_layers()
    assert layer.scale == pytest.approx(40**-0.5 * 1.5896, rel=1e-4)
    assert_same_logits(pair, 1)


def raw_scaling(pair: Pair) -> dict[str, object]:
    scaling = raw_config(read_gguf(pair.file))["rope_scaling"]
    assert isinstance(scaling, dict)
    return scaling


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("v3"), "DeepseekV3ForCausalLM", Recipe("Q8_0"), **EXPERTS)


def test_any_piece_is_that_of_the_whole(v3: Pair) -> None:
    plain = load_file(v3.plain / "model.safetensors")[f"{SCOPE}.kv_b_proj.weight"]
    stored = open_gguf(v3.file).tensors[f"{SCOPE}.kv_b_proj.weight"]
    assert stored.shape == plain.shape == (4 * 48, 64)
    for cut in (None, Cut(0, 48, 144), Cut(0, 37, 90), Cut(1, 5, 40)):
        torch.testing.assert_close(
            stored.read(cut), plain if cut is None else cut.of(plain), rtol=1e-6, atol=0
        )


def test_dummy_weights_have_the_same_bytes(v3: Pair) -> None:
    assert_dummy_weights_are_alike(v3)


def metadata(pair: Pair, folder: Path, changed: Fields, rows: int = 0) -> dict[str, object]:
    """The config of the same file with other fields (None: left out) and so many rows of embeddings."""
    file = read_gguf(pair.file)
    fields = {
        name: value for name, value in file.metadata.items() if name.startswith(("general", "deepseek2"))
    }
    fields |= {f"deepseek2.{name}": value for name, value in changed.items()}
    kept = {name: value for name, value in fields.items() if value is not None}
    embeddings = Blob("token_embd.weight", (rows or 1, 1), 0, bytes(4 * (rows or 1)))
    return raw_config(read_gguf(write_gguf(folder / "model.gguf", kept, [embeddings])))


def test_a_file_without_the_function_of_scores(v3: Pair, tmp_path: Path) -> None:
    """V2's first files name none; neither do those of GLM-4.7-Flash, which is told by its vocabulary."""
    unnamed: Fields = {"expert_gating_func": None}
    assert metadata(v3, tmp_path, unnamed)["architectures"] == ["DeepseekV2ForCausalLM"]
    glm = metadata(v3, tmp_path, {**unnamed, "block_count": 47}, rows=154_880)
    assert glm["architectures"] == ["DeepseekV3ForCausalLM"]


def test_layers_that_look_further_ahead_are_counted_apart(v3: Pair, tmp_path: Path) -> None:
    found = metadata(v3, tmp_path, {"nextn_predict_layers": 1})
    assert (found["num_hidden_layers"], found["num_nextn_predict_layers"]) == (2, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"expert_gating_func": 3}, r"deepseek2\.expert_gating_func is 3, but only 1 \(softmax\) and 2"),
        ({"attention.temperature_scale": 0.1}, r"temperature_scale is 0\.1, and queries that grow"),
        ({"attention.kv_lora_rank": None}, r"attention\.kv_lora_rank is missing; convert the model again"),
        ({"rope.dimension_count": 40}, r"rope\.dimension_count is 40, which must be less than a head's 40"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            r"rope\.scaling\.yarn_log_multiplier is missing",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_field(v3: Pair, fields: Fields, message: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=message):
        metadata(v3, tmp_path, fields)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"k": (4, 8, 6)}, r"self_attn has k_b_proj, and v_b_proj is missing"),
        ({"v": (4, 5, 8)}, r"self_attn has v_b_proj, and k_b_proj is missing"),
        (
            {"k": (4, 8, 6), "v": (4, 5, 7)},
            r"keys of the shape \[4, 8, 6\] and values of \[4, 5, 7\], which are no",
        ),
        ({"k": (32, 6), "v": (4, 5, 8)}, r"keys of the shape \[32, 6\] and values"),
    ],
)
def test_halves_that_do_not_fit_are_refused(
    shapes: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    blobs = [
        Blob(f"blk.0.attn_{name}_b.weight", shape, 0, torch.zeros(shape).numpy().tobytes())
        for name, shape in shapes.items()
    ]
    file = write_gguf(tmp_path / "model.gguf", {"general.architecture": "deepseek2"}, blobs)
    with pytest.raises(WeightsError, match=message):
        open_gguf(file)
