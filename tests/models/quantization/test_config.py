"""What checkpoints say of their quantization: found wherever it stands, understood, or refused in a line."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from live import PATIENCE
from packed import change_config
from shape_files import read_shapes

from models.config import ConfigError, read_config
from models.quantization.config import check_quantization, describe_quantization, read_quantization
from models.weight_coding import E4M3, Coding, Quantization

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, "dtype": "float16"}
_SAVED: dict[str, dict[str, Any]] = read_shapes("quantizations")
GPTQ, WEIGHTS, GROUP, AWQ, ROUND, COMPRESSED = (
    _SAVED[name] for name in ("gptq", "weights", "group", "awq", "round", "compressed")
)
Q_PROJ = "model.layers.0.self_attn.q_proj"


def written(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    change_config(folder, **fields)
    return folder


def read(folder: Path, saved: Mapping[str, object]) -> Quantization:
    found = read_quantization(read_config(written(folder, quantization_config=saved)))
    assert found is not None
    return found


def coding(folder: Path, saved: Mapping[str, object], module: str = Q_PROJ) -> Coding | None:
    return read(folder, saved).coding_of(module)


def test_a_plain_checkpoint_has_none(tmp_path: Path) -> None:
    config = read_config(written(tmp_path))
    assert read_quantization(config) is None
    check_quantization(config, None)
    check_quantization(config, "int8")


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization_config": GPTQ},
        {"compression_config": GPTQ},
        {"text_config": {"quantization_config": GPTQ}},
        {"text_config": {"hidden_size": 4}, "quantization_config": GPTQ},
        {"architectures": ["InternVLChatModel"], "llm_config": {"quantization_config": GPTQ}},
    ],
    ids=["top", "older", "inner", "beside the inner", "inner of another name"],
)
def test_it_is_found_at_the_top_and_in_the_text_part(fields: dict[str, object], tmp_path: Path) -> None:
    found = read_quantization(read_config(written(tmp_path, **fields)))
    assert found is not None
    assert found.coding_of(Q_PROJ) == Coding(format="gptq", bits=4, group=128)


def test_older_tools_write_a_file_beside(tmp_path: Path) -> None:
    written(tmp_path)
    saved = {name: value for name, value in GPTQ.items() if name != "quant_method"}
    (tmp_path / "quantize_config.json").write_text(json.dumps(saved))
    assert describe_quantization(read_config(tmp_path), None) == "gptq, 4 bits, groups of 128"


def test_a_method_without_a_name_is_known_by_its_fields(tmp_path: Path) -> None:
    for saved in (GPTQ, COMPRESSED):
        nameless = {name: value for name, value in saved.items() if name != "quant_method"}
        assert read(tmp_path, nameless).method == saved["quant_method"]


def test_dynamic_rules_of_gptq(tmp_path: Path) -> None:
    rules = {
        "-:.*v_proj$": {},
        r"+:.*layers\.0\..*q_proj": {"bits": 8, "group_size": -1},
        ".*k_proj": {"desc_act": True},
    }
    found = read(tmp_path, GPTQ | {"dynamic": rules, "checkpoint_format": "gptq_v2"})
    assert found.coding_of("model.layers.0.self_attn.v_proj") is None
    assert found.coding_of(Q_PROJ) == Coding(format="gptq_v2", bits=8)
    k_proj = found.coding_of("model.layers.1.self_attn.k_proj")
    assert k_proj == Coding(format="gptq_v2", bits=4, group=128, ordered=True)
    assert found.ordered
    assert found.coding_of("model.layers.1.self_attn.q_proj") == Coding(format="gptq_v2", bits=4, group=128)


def test_awq_names_what_stays_plain_by_a_part(tmp_path: Path) -> None:
    found = read(tmp_path, AWQ | {"modules_to_not_convert": ["self_attn"]})
    assert found.coding_of(Q_PROJ) is None
    packed = Coding(format="awq", bits=4, group=64, symmetric=False)
    assert found.coding_of("model.layers.0.mlp.up_proj") == packed
    assert found.describe() == "awq, 4 bits, groups of 64"
    routed = read(tmp_path, AWQ | {"modules_to_not_convert": ["gate", "model.layers.1"]})
    assert routed.coding_of("model.layers.0.mlp.gate") is None
    assert routed.coding_of("model.layers.1.mlp.up_proj") is None
    assert routed.coding_of("model.layers.10.mlp.gate_proj") == packed


@pytest.mark.parametrize("name", ["e4m3", "float8_e4m3fn"])
def test_e4m3_has_two_names(name: str, tmp_path: Path) -> None:
    """MiniMax-M2 has torch's."""
    found = coding(tmp_path, {"quant_method": "fp8", "fmt": name, "weight_block_size": [128, 128]})
    assert found is not None
    assert found.codes == E4M3


def test_auto_round_gives_modules_their_own_numbers(tmp_path: Path) -> None:
    own = {Q_PROJ: {"bits": 16}, r"model\.layers\.1\..*": {"group_size": 32}}
    found = read(tmp_path, ROUND | {"extra_config": own})
    assert found.coding_of(Q_PROJ) is None
    assert found.coding_of("model.layers.1.mlp.up_proj") == Coding(format="awq", bits=4, group=32)
    assert found.coding_of("model.layers.10.mlp.up_proj") == Coding(format="awq", bits=4, group=128)
    gptq = read(tmp_path, ROUND | {"packing_format": "auto_round:auto_gptq", "bits": 8})
    assert gptq.coding_of(Q_PROJ) == Coding(format="gptq", bits=8, group=128)


def test_groups_of_compressed_tensors(tmp_path: Path) -> None:
    """A module's own name comes before a pattern, a pattern before the class, and `ignore` before all."""
    eight = {"targets": ["re:.*layers.[01].*q_proj"], "weights": WEIGHTS | {"num_bits": 8}}
    own = {
        "targets": [Q_PROJ],
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8},
    }
    groups = {"a": GROUP, "b": eight, "c": own}
    found = read(tmp_path, COMPRESSED | {"config_groups": groups, "ignore": ["lm_head", r"re:.*\.3\..*"]})
    packed = Coding(format="pack-quantized", bits=4, group=128)
    assert found.coding_of("model.layers.0.mlp.up_proj") == packed
    assert found.coding_of("model.layers.1.self_attn.q_proj") == Coding(
        format="pack-quantized", bits=8, group=128
    )
    assert found.coding_of(Q_PROJ) == Coding(format="pack-quantized", bits=8, input_bits=8)
    for ignored in ("lm_head", "model.layers.3.self_attn.q_proj"):
        assert found.coding_of(ignored) is None


def test_a_pattern_matches_from_the_beginning(tmp_path: Path) -> None:
    group = GROUP | {"targets": ["re:layers.*"]}
    assert coding(tmp_path, COMPRESSED | {"config_groups": {"a": group}}) is None


def test_presets_and_formats_of_groups(tmp_path: Path) -> None:
    found = read(tmp_path, COMPRESSED | {"config_groups": {"W4A16_ASYM": ["Linear"]}})
    assert found.coding_of(Q_PROJ) == Coding(format="pack-quantized", bits=4, group=128, symmetric=False)
    mixed = COMPRESSED | {
        "format": "mixed-precision",
        "config_groups": {"a": GROUP | {"format": "int-quantized"}},
    }
    assert coding(tmp_path, mixed) == Coding(format="int-quantized", bits=4, group=128)
    assert coding(tmp_path, COMPRESSED | {"config_groups": {"a": GROUP | {"format": "dense"}}}) is None


HOSTILE: dict[str, tuple[dict[str, object], str]] = {
    **{name: (each["saved"], each["told"]) for name, each in _SAVED["hostile"].items()},
    "a long pattern": (
        GPTQ | {"dynamic": {"a" * 5000: {}}},
        "it has more than 1000 characters; name the modules in full",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_read_is_refused_in_a_line(name: str, tmp_path: Path) -> None:
    saved, told = HOSTILE[name]
    config = read_config(written(tmp_path, quantization_config=saved))
    started = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        read_quantization(config)
    assert time.monotonic() - started < 5 * PATIENCE
    line = str(refused.value)
    assert line.startswith("config.json: quantization_config")
    assert told in line
    assert len(line) <= 200
    assert "\n" not in line


def test_what_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization_config must be an object, but is str"):
        read_config(written(tmp_path, quantization_config="gptq"))


def test_the_option_names_the_method(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, quantization_config=GPTQ))
    for asked in (None, "gptq", "gptq_marlin"):
        check_quantization(config, asked)
    with pytest.raises(ConfigError, match="--quantization compressed-tensors: the checkpoint is of gptq"):
        check_quantization(config, "compressed-tensors")
    plain = tmp_path / "plain"
    plain.mkdir()
    with pytest.raises(ConfigError, match="gptq: the checkpoint is not quantized; leave the option out, or"):
        check_quantization(read_config(written(plain)), "gptq")
    check_quantization(read_config(written(plain)), "fp8")  # a worker on CUDA makes it


EIGHT = WEIGHTS | {"num_bits": 8}
FLOATS = EIGHT | {"type": "float", "strategy": "channel", "group_size": None}


@pytest.mark.parametrize(
    "saved",
    [
        {"quant_method": "fp8"},
        GPTQ | {"bits": 8},
        ROUND | {"bits": 8, "packing_format": "auto_round:auto_gptq"},
        COMPRESSED | {"config_groups": {"a": GROUP | {"weights": EIGHT}}},
        COMPRESSED | {"format": "float-quantized", "config_groups": {"a": GROUP | {"weights": FLOATS}}},
    ],
    ids=["fp8", "gptq", "auto-round", "whole numbers", "floats"],
)
def test_eight_bits_may_become_others(saved: Mapping[str, object], tmp_path: Path) -> None:
    config = read_config(written(tmp_path, quantization_config=saved))
    for asked in ("int8", "int8-dynamic", "int4"):
        check_quantization(config, asked)
        assert (described := describe_quantization(config, asked))
        assert described.startswith(f"{asked}, made of {saved['quant_method']}, ")


@pytest.mark.parametrize(
    "saved",
    [
        GPTQ,
        AWQ,
        ROUND,
        COMPRESSED,
        GPTQ | {"bits": 8, "dynamic": {".*k_proj": {"bits": 4}}},
        ROUND | {"bits": 8, "packing_format": "auto_gptq", "extra_config": {Q_PROJ: {"bits": 4}}},
    ],
    ids=["gptq", "awq", "auto-round", "compressed-tensors", "one of gptq", "one of auto-round"],
)
def test_four_bits_are_not_made_anew(saved: Mapping[str, object], tmp_path: Path) -> None:
    config = read_config(written(tmp_path, quantization_config=saved))
    with pytest.raises(ConfigError, match=r"has 4 bits already \(.*\): leave the option out"):
        check_quantization(config, "int8")


def test_only_the_cache_may_be_quantized(tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    found = read(tmp_path, COMPRESSED | {"config_groups": {}, "kv_cache_scheme": scheme})
    assert (found.coding_of(Q_PROJ), found.bits) == (None, 16)
    assert found.describe() == "compressed-tensors, plain weights"
