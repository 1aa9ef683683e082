"""GGUF files have the logits that transformers computes from the plain checkpoints they mean."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from drive import ThreadGroup
from encoded import TEXTS, assert_near, hf_hidden, run
from gguf_blocks import KINDS
from gguf_metadata import FAMILIES
from gguf_pairs import Pair, Recipe, assert_same_logits, load_pair, write_pair
from gguf_writer import Blob
from safetensors.torch import load_file
from tiny_shapes import EXPERTS_BESIDE, SHARED_CACHES

from models.checkpoint.files import open_source
from models.checkpoint.weights import Reading, Weights
from models.config import read_config
from models.gguf.file import read_gguf
from models.gguf.folder import make_folder
from models.gguf.tensors import open_gguf
from models.loader import LoadOptions, load_model
from models.ops.grouped_matrix import widen
from models.parallel.parallel import Parallel
from models.quantization.matrices import FORMATS, read_matrix
from models.quantization.methods.gguf import CODINGS, GGML_TYPES, Gguf, GgufFields
from models.weight_coding import SavedQuantization
from models.weight_slices import Cut, WeightsError

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Sizes of whole blocks of 256, which pieces of ranks divide."""

Q4_K_M = Recipe("Q4_K", {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output.": "Q6_K"})
RECIPES = [Recipe("F32"), Recipe("F16"), Recipe("BF16"), *map(Recipe, KINDS), Q4_K_M]
LATENT = [name for name, family in FAMILIES.items() if family.arch == gguf.MODEL_ARCH.DEEPSEEK2]
"""The families with latent attention, which test_latent.py is about."""
DECODERS = [name for name in FAMILIES if name.endswith(("CausalLM", "LMHeadModel")) and name not in LATENT]
HYBRIDS = [name for name in DECODERS if name.startswith("Qwen3_5")]
ENCODERS = [name for name in FAMILIES if name.endswith("BertModel")]
WITH_WIDTHS: dict[str, dict[str, object]] = {
    "Qwen2MoeForCausalLM": {"shared_expert_intermediate_size": 64},
    "Qwen3MoeForCausalLM": {},
    "Qwen3_5MoeForCausalLM": {"shared_expert_intermediate_size": 64},
    "Qwen3NextForCausalLM": {"shared_expert_intermediate_size": 64},
    "Lfm2MoeForCausalLM": {},
    "GraniteMoeHybridForCausalLM": {"shared_intermediate_size": 64, "mamba_d_head": 16},
    # With a smaller epsilon, norms of groups magnify rounding errors.
    "NemotronHForCausalLM": {"moe_shared_expert_intermediate_size": 64, "layer_norm_epsilon": 1e-2},
    "Glm4MoeForCausalLM": {},
    "Dots1ForCausalLM": {},
    "Ernie4_5_MoeForCausalLM": {},
    "GraniteMoeSharedForCausalLM": {"shared_intermediate_size": 64, "attention_multiplier": 0.2},
}
"""The mixtures whose experts have widths of their own, and shared experts too."""


def test_all_codings_that_are_read_are_written() -> None:
    assert set(KINDS) == set(CODINGS) == {name for name in FORMATS if name.startswith(("Q", "IQ", "MX"))}
    assert all(GGML_TYPES[number].name == name for name, number in KINDS.items())


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_every_coding(recipe: Recipe, tmp_path: Path) -> None:
    """Logits reach 34: in float32 transformers' are off by up to 5e-4 on some processors, and so are ours."""
    pair = write_pair(tmp_path, "LlamaForCausalLM", recipe, **SHAPE)
    assert_same_logits(pair, 1, 4, dtype=torch.float64)


@pytest.mark.parametrize("arch", DECODERS)
def test_every_family_of_decoders(arch: str, tmp_path: Path) -> None:
    blobs = [turned(16)] if arch == "Gemma4ForCausalLM" else []
    pair = write_pair(tmp_path, arch, Recipe("Q8_0", {"ffn_down": "F16"}, blobs=blobs), **sizes(arch))
    assert_same_logits(pair, 2)


def test_gemma_4_without_values(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96}
    pair = write_pair(tmp_path, "Gemma4ForCausalLM", Recipe("Q8_0", blobs=[turned(16)]), **shape)
    assert_same_logits(pair, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stage_has_the_vectors_of_tokens_for_its_own_layers(ranks: int, tmp_path: Path) -> None:
    """Ranks of a stage have rows of the table, and stages columns."""
    pair = write_pair(tmp_path, "Gemma3nForCausalLM", Recipe("Q8_0"), **sizes("Gemma3nForCausalLM"))
    ids, embedded = torch.tensor([5, 300, 77, 5]), torch.randn(4, 64)
    (whole,) = load_pair(pair)
    found: list[torch.Tensor] = []
    for stage in range(2):
        group, folder = ThreadGroup(ranks), make_folder(pair.file, pair.file.parent)
        places = [Parallel(rank, ranks, group.at(rank), stage=stage, stages=2) for rank in range(ranks)]
        given = LoadOptions(read_config(folder), folder, dtype=torch.float32)
        models = [load_model(replace(given, parallel=place)) for place in places]
        with ThreadPoolExecutor(ranks) as pool:
            of_ranks = list(pool.map(lambda model: model.model.rows(ids, embedded), models))
        found += of_ranks[-1]
    for mine, expected in zip(found, whole.model.rows(ids, embedded), strict=True):
        torch.testing.assert_close(mine, expected)


VARIANTS: list[tuple[str, bool, dict[str, object]]] = [
    ("FalconForCausalLM", False, {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    (
        "FalconForCausalLM",
        False,
        {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1},
    ),
    ("Qwen3NextForCausalLM", True, {}),
    ("GraniteMoeHybridForCausalLM", False, {"num_local_experts": 0, "position_embedding_type": "rope"}),
    ("FalconH1ForCausalLM", False, {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    ("NemotronHForCausalLM", False, {"layers_block_type": ["full_attention", "mlp", "linear_attention"]}),
    ("NemotronHForCausalLM", False, {"use_bias": True, "moe_latent_size": 32}),
    ("Lfm2MoeForCausalLM", False, {"use_expert_bias": False}),
]
"""Families that differ from those above: whether matrices are whole, and fields of config.json."""


@pytest.mark.parametrize(("arch", "joined", "fields"), VARIANTS)
def test_variants_of_families(arch: str, joined: bool, fields: dict[str, object], tmp_path: Path) -> None:
    pair = write_pair(tmp_path, arch, Recipe("Q8_0", joined=joined), **{**sizes(arch), **fields})
    assert_same_logits(pair, 1)


def turned(pairs: int) -> Blob:
    """The factors of a rotation of which a quarter of so many pairs turns."""
    factors = np.full(pairs, 1e30, np.float32)
    factors[: pairs // 4] = 1
    return Blob("rope_freqs.weight", (pairs,), 0, factors.tobytes())


@pytest.mark.parametrize("arch", HYBRIDS)
@pytest.mark.parametrize(("keys", "values"), [(2, 2), (4, 8), (2, 8)])
def test_value_heads_that_take_turns_on_ranks(arch: str, keys: int, values: int, tmp_path: Path) -> None:
    """Ranks hold the key heads of their value heads, which are all of them, or some that others have too."""
    heads = {"linear_num_key_heads": keys, "linear_num_value_heads": values}
    pair = write_pair(tmp_path, arch, Recipe("Q8_0"), **heads, **sizes(arch))
    assert_same_logits(pair, 1, min(keys * values // 2, 4))


def test_value_heads_that_cannot_take_turns_are_refused(tmp_path: Path) -> None:
    arch = "Qwen3_5ForCausalLM"
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 12}
    pair = write_pair(tmp_path, arch, Recipe("Q8_0"), **heads, **sizes(arch))
    with pytest.raises(ValueError, match=r"the 6 value heads .* cannot take turns of 4 key heads"):
        load_pair(pair, 2)


def sizes(arch: str) -> dict[str, object]:
    """Sizes of whole blocks of 32."""
    if arch == "GPT2LMHeadModel":
        return {"n_embd": 64, "n_inner": 96}
    if arch in ("BloomForCausalLM", "FalconForCausalLM"):
        return {"hidden_size": 64, **({"ffn_hidden_size": 96} if arch == "FalconForCausalLM" else {})}
    if arch == "MptForCausalLM":
        return {"d_model": 64}
    found: dict[str, object] = {"hidden_size": 64, "intermediate_size": 96}
    if arch == "Gemma4ForCausalLM":
        found |= {**SHARED_CACHES, **EXPERTS_BESIDE, "hidden_size_per_layer_input": 32}
        found |= {"moe_intermediate_size": 64}
    if arch == "Gemma3nForCausalLM":
        found |= {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320}
    if arch in HYBRIDS or arch == "Qwen3NextForCausalLM":
        found |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    if arch in WITH_WIDTHS:
        found["moe_intermediate_size"] = 64
    return found | WITH_WIDTHS.get(arch, {})


@pytest.mark.parametrize("arch", ENCODERS)
def test_every_family_of_encoders(arch: str, tmp_path: Path) -> None:
    pair = write_pair(tmp_path, arch, Recipe("Q8_0"), hidden_size=64, intermediate_size=96)
    expected = [hf_hidden(pair.plain, text) for text in TEXTS]
    assert_near(run(load_pair(pair, 2), TEXTS), expected)


def test_files_that_were_split(tmp_path: Path) -> None:
    recipe = Recipe("Q8_0", parts=3)
    assert_same_logits(
        write_pair(tmp_path, "LlamaForCausalLM", recipe, hidden_size=64, intermediate_size=96), 1
    )


def weights_of(pair: Pair, load_format: str = "auto") -> Weights:
    """The whole file as one scope."""
    source = open_gguf(pair.file) if load_format == "auto" else open_source(pair.file, load_format)
    codings = {"model.layers.0.mlp.down_proj": "Q4_K", "model.layers.0.self_attn.q_proj": "Q4_K"}
    method = Gguf(SavedQuantization(pair.file.name, {}), GgufFields(codings=codings))
    return Weights(Reading(source, device=torch.device("cpu"), dtype=torch.float32, quantization=method))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model in blocks of 256."""
    return write_pair(tmp_path_factory.mktemp("blocks"), "LlamaForCausalLM", Recipe("Q4_K"), **SHAPE)


def test_a_piece_reads_no_more_than_its_blocks(blocks: Pair) -> None:
    down = weights_of(blocks) / "model.layers.0.mlp.down_proj"
    whole = widen(read_matrix(down, (256, 512)))
    assert down.reading.bytes_read == 256 * 2 * 144
    rows = weights_of(blocks) / "model.layers.0.mlp.down_proj"
    assert torch.equal(widen(read_matrix(rows, (256, 512), Cut(0, 64, 72))), whole[64:72])
    assert rows.reading.bytes_read == 8 * 2 * 144
    for start, stop, count in ((0, 256, 1), (128, 256, 1), (250, 260, 2), (256, 512, 1), (320, 416, 1)):
        columns = weights_of(blocks) / "model.layers.0.mlp.down_proj"
        assert torch.equal(widen(read_matrix(columns, (256, 512), Cut(1, start, stop))), whole[:, start:stop])
        assert columns.reading.bytes_read == 256 * count * 144


def test_rows_of_part_of_a_head_are_those_of_the_whole(blocks: Pair) -> None:
    scope = weights_of(blocks) / "model.layers.0.self_attn.q_proj"
    whole = widen(read_matrix(scope, (256, 256)))
    assert torch.equal(widen(read_matrix(scope, (256, 256), Cut(0, 37, 90))), whole[37:90])
    plain = load_file(blocks.plain / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(whole, plain, rtol=1e-6, atol=1e-7)


def test_dummy_weights_have_valid_blocks(blocks: Pair) -> None:
    for cut in (None, Cut(1, 128, 384), Cut(0, 8, 16)):
        scope = weights_of(blocks, "dummy") / "model.layers.0.mlp.down_proj"
        matrix = widen(read_matrix(scope, (256, 512), cut))
        assert 0 < matrix.abs().max() < 2
        assert matrix.shape == (torch.empty(256, 512) if cut is None else cut.of(torch.empty(256, 512))).shape


def spoilt(pair: Pair, folder: Path, change: Callable[[bytearray], None]) -> Pair:
    """The same pair with changed bytes in a copy of its file."""
    data = bytearray(pair.file.read_bytes())
    change(data)
    copy = folder / pair.file.name
    copy.write_bytes(data)
    return Pair(copy, pair.plain)


def test_wrong_files_are_refused_by_tensor_and_reason(blocks: Pair, tmp_path: Path) -> None:
    tensor = read_gguf(blocks.file).tensors["blk.1.ffn_up.weight"]

    def not_a_number(data: bytearray) -> None:
        data[tensor.offset : tensor.offset + 2] = b"\xff\xff"

    with pytest.raises(
        WeightsError, match=r"layers\.1\.mlp\.up_proj.weight has .*\(Q4_K\) .* NaN or infinite; download"
    ):
        load_pair(spoilt(blocks, tmp_path, not_a_number))
    with pytest.raises(WeightsError, match=r"blk\.1\.ffn_up\.weight.* lies up to byte .* cut off"):
        open_gguf(
            spoilt(blocks, tmp_path, lambda data: data.__delitem__(slice(tensor.offset + 5, None))).file
        )
    with pytest.raises(WeightsError, match=r"stored as Q2_K, which is not read, but only F32, .*Q4_K"):
        open_gguf(spoilt(blocks, tmp_path, partial(change_kind, name=b"blk.1.ffn_up.weight", number=10)).file)


def change_kind(data: bytearray, name: bytes, number: int) -> None:
    """Give a matrix another coding in the header."""
    place = data.index(name) + len(name) + 4 + 2 * 8
    data[place : place + 4] = number.to_bytes(4, "little")


def test_sizes_that_do_not_fit_the_config_are_refused(blocks: Pair) -> None:
    with pytest.raises(WeightsError, match=r"model\.gguf has the shape \[512, 256\], not \[256, 256\]"):
        load_pair(blocks, overrides={"intermediate_size": 256})
