"""Families with latent attention, as published: what is cached, what is read, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import Driver, assert_logits, load_ranks
from packed_floats import write_floats
from safetensors.torch import load_file, save_file
from tiny import hf_logits, tiny_checkpoint

from models import ops
from models.config import ConfigError, read_config
from models.conversion.conversion_choice import resolve_conversion
from models.families.decoders.decoder import DecoderForCausalLM
from models.loader import LoadOptions, load_model
from models.parallel.parallel import Parallel
from worker.kernels.cpu import quantization, torch_operations

PROMPT = random.Random(2).choices(range(5, 300), k=21)

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def change(folder: Path, *left_out: str, **fields: object) -> Path:
    """Change fields of config.json; some are left out, as first configs had neither of them."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in left_out}))
    return folder


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        load_model(LoadOptions(read_config(folder), folder, dtype=torch.float32, **options))
    return str(error.value)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("DeepseekV3ForCausalLM", tmp_path_factory.mktemp("v3"))


@pytest.fixture
def v3(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    for file in built.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_kimi_k2_as_published(built: Path, v3: Path) -> None:
    """Its config says nothing of heads' width, and numbers of them that mean nothing; MTP layers follow."""
    tensors = load_file(v3 / "model.safetensors")
    extra = {
        name.replace("layers.2.", "layers.3."): x.clone()
        for name, x in tensors.items()
        if "layers.2." in name
    }
    save_file(tensors | extra, v3 / "model.safetensors")
    change(
        v3,
        *("head_dim", "qk_head_dim", "rope_parameters", "rope_interleave", "mlp_layer_types"),
        model_type="kimi_k2",
        num_key_value_heads=3,
        rope_theta=10000.0,
        num_nextn_predict_layers=1,
        ep_size=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
    )
    config = read_config(v3)
    assert (config.num_kv_heads, config.head_dim, config.problems) == (1, 20, {})
    assert_logits(v3, hf_logits(built, PROMPT), PROMPT)


def test_mistral_4_without_the_part_of_heads_that_is_rotated(tmp_path: Path) -> None:
    """The width of the rotated part says the same."""
    folder = tiny_checkpoint("Mistral4ForCausalLM", tmp_path)
    expected = hf_logits(folder, PROMPT)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    change(folder, rope_parameters={key: rope[key] for key in rope if key != "partial_rotary_factor"})
    assert_logits(folder, expected, PROMPT)


def test_every_rank_caches_one_row_for_all_heads(built: Path) -> None:
    """What a token takes is as wide as the latent and the key, however many heads and ranks there are."""
    for ranks in (1, 2, 4):
        for model in load_ranks(built, ranks):
            assert [layer.cache_shape(7, 4) for layer in model.attention_layers()] == [(7, 4, 16 + 8)] * 3


def test_scores_are_sharpened_by_yarn(tmp_path: Path) -> None:
    """V2's published numbers: 0.1 * 0.707 * ln 40 + 1, squared."""
    folder = tiny_checkpoint("DeepseekV2ForCausalLM", tmp_path)
    change(folder, "rope_parameters", rope_scaling=YARN)
    (model,) = load_ranks(folder)
    (layer, *_) = model.attention_layers()
    assert layer.scale == pytest.approx(20**-0.5 * 1.5896, rel=1e-4)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", ["DeepSeek's blocks", "rows"])
def test_all_of_an_fp8_checkpoint_is_read(name: str, built: Path, tmp_path: Path) -> None:
    """Blocks that divide no rows of heads, and matrices that are read as plain numbers."""
    packed, plain = write_floats(built, tmp_path, name)
    assert_logits(packed, hf_logits(plain, PROMPT), PROMPT, 1, 2)


@pytest.fixture
def int4() -> Iterator[None]:
    ops.use(torch_operations.linear_operations(quantization.find_scheme("int4")))
    yield
    ops.use({})


@pytest.mark.parametrize("lora", [None, 20])
def test_small_matrices_stay_plain(int4: None, lora: int | None, tmp_path: Path) -> None:
    folder = tiny_checkpoint("DeepseekV3ForCausalLM", tmp_path, q_lora_rank=lora)
    (model,) = load_ranks(folder)
    assert isinstance(model, DecoderForCausalLM)
    attention: Any = model.model.layers[1].self_attn
    small = attention.kv_a_proj if lora is None else attention.qkv_a_proj
    for weight in (small.weight, attention.attention.up, model.model.layers[1].mlp.router.weight):  # pyright: ignore
        assert type(weight) is torch.nn.Parameter
    for weight in (attention.queries.weight, attention.o_proj.weight):
        assert isinstance(weight, quantization.Quantized)


def test_dummy_weights_run(v3: Path) -> None:
    (v3 / "model.safetensors").unlink()
    model = load_model(LoadOptions(read_config(v3), v3, dtype=torch.float32, load_format="dummy"))
    assert Driver([model]).step({0: PROMPT})[0].isfinite().all()


def test_embedders_are_made_of_them(built: Path) -> None:
    config = read_config(built)
    conversion = resolve_conversion(config, built, runner="pooling", convert="embed")
    model = load_model(LoadOptions(config, built, dtype=torch.float32, conversion=conversion))
    assert model.pooler.tasks == {"embed", "token_embed"}
    written = Driver(load_ranks(built)).hidden({1: PROMPT})[1]
    torch.testing.assert_close(Driver([model]).hidden({0: PROMPT})[0], written)


def stored_names(folder: Path) -> set[str]:
    return {name.partition(".self_attn.")[2] for name in load_file(folder / "model.safetensors")}


def test_an_indexer_is_whole_on_every_rank_and_caches_a_key(tmp_path: Path) -> None:
    """Layers that read what an earlier layer's indexer chose have none, and none is in the checkpoint."""
    folder = tiny_checkpoint("GlmMoeDsaForCausalLM", tmp_path)
    assert {"indexer.wq_b.weight", "indexer.k_norm.bias"} < stored_names(folder)
    for ranks in (1, 2):
        for model in load_ranks(folder, ranks):
            shapes = [layer.cache_shape(7, 4) for layer in model.attention_layers()]
            assert sorted(shapes) == [(7, 4, 12)] * 2 + [(7, 4, 16 + 8)] * 3


def test_mtp_layers_with_an_indexer_are_left_unread(tmp_path: Path) -> None:
    folder = tiny_checkpoint("DeepseekV32ForCausalLM", tmp_path)
    expected = hf_logits(folder, PROMPT)
    tensors = load_file(folder / "model.safetensors")
    extra = {f"model.layers.3.{name[15:]}": x + 1 for name, x in tensors.items() if "layers.2." in name}
    save_file(tensors | extra, folder / "model.safetensors")
    assert_logits(change(folder, num_nextn_predict_layers=1), expected, PROMPT)


def test_a_model_of_lists_of_letters_is_the_same(tmp_path: Path) -> None:
    folder = tiny_checkpoint("GlmMoeDsaForCausalLM", tmp_path)
    expected = hf_logits(folder, PROMPT)
    assert_logits(change(folder, "indexer_types", index_topk_pattern="FSF"), expected, PROMPT)


def test_the_projection_of_an_indexers_weights_stays_plain(int4: None, tmp_path: Path) -> None:
    (model,) = load_ranks(tiny_checkpoint("DeepseekV32ForCausalLM", tmp_path))
    assert isinstance(model, DecoderForCausalLM)
    indexer: Any = model.model.layers[1].self_attn.indexer
    for weight in (indexer.wk.weight, indexer.weights_proj.weight):
        assert type(weight) is torch.nn.Parameter
    assert isinstance(indexer.wq_b.weight, quantization.Quantized)
    assert Driver([model]).step({0: PROMPT})[0].isfinite().all()


class TestRefused:
    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"index_head_dim": 6}, "'index_head_dim' is 6, but must be an even number of at least 8"),
            ({"index_topk": 0}, "index_topk"),
            ({"q_lora_rank": None}, "q_lora_rank"),
            ({"indexer_types": ["full", "shared"]}, "for 2 of 3 layers whether they have an indexer"),
            ({"indexer_types": None, "index_topk_pattern": "SFS"}, "layer 0 shares the indexer"),
            ({"indexer_types": None, "index_topk_pattern": "FXF"}, "index_topk_pattern"),
        ],
    )
    def test_an_indexer_that_does_not_fit(self, fields: dict[str, object], said: str, tmp_path: Path) -> None:
        assert said in refusal(change(tiny_checkpoint("GlmMoeDsaForCausalLM", tmp_path), **fields))

    def test_stages_that_begin_without_an_indexer(self, tmp_path: Path) -> None:
        folder = tiny_checkpoint("GlmMoeDsaForCausalLM", tmp_path, indexer_types=["full", "full", "shared"])
        said = "layer 2 of this GlmMoeDsaForCausalLM reads the tokens that the indexer of layer 1 chose"
        assert said in refusal(folder, parallel=Parallel(stage=1, stages=2))

    def test_v2_with_weights_of_experts_divided_by_their_sum(self, tmp_path: Path) -> None:
        folder = tiny_checkpoint("DeepseekV2ForCausalLM", tmp_path, norm_topk_prob=True)
        assert "--hf-overrides" in refusal(folder)

    def test_other_ways_to_choose_experts(self, v3: Path) -> None:
        assert "topk_method" in refusal(change(v3, topk_method="group_limited_greedy"))
        assert "scoring_func" in refusal(change(v3, topk_method="noaux_tc", scoring_func="softmax"))

    def test_keys_that_are_rotated_in_part(self, v3: Path) -> None:
        change(v3, "rope_parameters", partial_rotary_factor=0.5)
        assert "rotates 4 of 8 dimensions" in refusal(v3)

    def test_heads_of_mistral_4_that_are_rotated_in_another_part(self, tmp_path: Path) -> None:
        folder = tiny_checkpoint("Mistral4ForCausalLM", tmp_path)
        rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
        assert rope["partial_rotary_factor"] == 0.4
        change(folder, rope_parameters=rope | {"partial_rotary_factor": 0.2})
        assert "rotates 4 of 8 dimensions of a key" in refusal(folder)

    def test_both_directions(self, v3: Path) -> None:
        assert "cannot attend in both directions" in refusal(change(v3, is_causal=False))

    def test_widths_that_are_none(self, v3: Path) -> None:
        change(v3, qk_nope_head_dim=0)
        with pytest.raises(ConfigError, match="'qk_nope_head_dim' is 0"):
            read_config(v3)
