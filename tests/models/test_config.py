import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from models.config import ConfigError, read_config

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write(folder: Path, config: object, generation: object = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def without(*names: str) -> dict[str, object]:
    return {name: value for name, value in LLAMA.items() if name not in names}


def test_names_of_gpt2(tmp_path: Path) -> None:
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
    }
    config = read_config(write(tmp_path, gpt2))
    assert (config.hidden_size, config.num_layers, config.num_heads, config.max_len) == (768, 12, 12, 1024)
    assert (config.num_kv_heads, config.head_dim) == (12, 64)
    assert config.tie_word_embeddings is None, "a config of that age says nothing"
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_head_dim_need_not_divide_the_hidden_size(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {**LLAMA, "num_attention_heads": 6, "head_dim": 128}))
    assert config.head_dim == 128


@pytest.mark.parametrize("written", ["bfloat16", "torch.bfloat16"])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_dtype_under_its_old_and_new_name(tmp_path: Path, field: str, written: str) -> None:
    assert read_config(write(tmp_path, {**without("dtype"), field: written})).dtype == "bfloat16"


@pytest.mark.parametrize(("stored", "dtype"), [("F16", "float16"), ("BF16", "bfloat16"), ("F32", "float32")])
def test_a_config_without_dtype_has_that_of_its_tensors(tmp_path: Path, stored: str, dtype: str) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "counts": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
            "weight": {"dtype": stored, "shape": [1], "data_offsets": [8, 12]},
        }
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    assert read_config(write(tmp_path, without("dtype"))).dtype == dtype


def test_without_dtype_and_without_tensors(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, {**LLAMA, "dtype": "auto"})).dtype == "float32"


def test_eos_ids_of_both_files_the_primary_first(tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "eos_token_id": 7}, {"eos_token_id": [5, 7, 9]})
    assert read_config(tmp_path).eos_token_ids == (7, 5, 9)


def test_eos_of_the_generation_config_alone(tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "eos_token_id": None}, {"eos_token_id": 5})
    assert read_config(tmp_path).eos_token_ids == (5,)


def test_the_text_part_of_a_composite(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "torch_dtype": "float16", **without("dtype", "architectures")}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "hidden_size": 1,
        "eos_token_id": [1, 106],
        "text_config": {name: value for name, value in text.items() if name != "eos_token_id"},
        "vision_config": {"hidden_size": 2},
    }
    config = read_config(write(tmp_path, whole))
    assert config.architecture == "Gemma3ForConditionalGeneration"
    assert config.hidden_size == 64
    assert config.dtype == "float16"
    assert config.eos_token_ids == (1, 106)
    assert config.raw.items() >= whole["text_config"].items()


def test_overrides_are_merged_deeply_and_leave_the_rest(tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    overrides = {"architectures": ["Other"], "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    config = read_config(tmp_path, overrides)
    assert config.architecture == "Other"
    assert config.raw["rope_parameters"] == {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    assert config.max_len == 8192


@pytest.mark.parametrize(
    ("rope", "max_len"),
    [
        ({"rope_type": "default"}, 4096),
        ({"type": "linear", "factor": 2}, 8192),
        ({"rope_type": "dynamic", "factor": 2.5}, 10240),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
        ({"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}}, 4096),
    ],
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rotary_scaling_stretches_the_length(
    tmp_path: Path, field: str, rope: dict[str, object], max_len: int
) -> None:
    assert read_config(write(tmp_path, {**LLAMA, field: rope})).max_len == max_len


def test_an_old_name_in_the_overrides_wins_over_a_new_one_in_the_file(tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    config = read_config(tmp_path, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert config.max_len == 8192


def test_gemma3_states_the_stretched_length(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 8.0}
    config = read_config(write(tmp_path, {**LLAMA, "model_type": "gemma3_text", "rope_scaling": rope}))
    assert config.max_len == 4096


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without("vocab_size"), "the field 'vocab_size' is missing"),
        (
            without("hidden_size"),
            r"the field 'hidden_size' \(or 'n_embd', 'n_embed', 'd_model', 'dim'\) is missing",
        ),
        ({**without("hidden_size"), "n_embd": "64"}, "'n_embd' is '64', but must be a positive integer"),
        ({**LLAMA, "num_hidden_layers": True}, "'num_hidden_layers' is True"),
        ({**LLAMA, "num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({**LLAMA, "hidden_size": 60}, "hidden size 60 cannot be divided by 8 attention heads"),
        (
            {**LLAMA, "dtype": "float64"},
            "'dtype' is 'float64', but must be one of float32, bfloat16, float16",
        ),
        ({**LLAMA, "architectures": []}, "'architectures' must be a list .* --hf-overrides"),
        ({**LLAMA, "architectures": ["A", 1]}, "'architectures' must be a list .* --hf-overrides"),
        (
            {**LLAMA, "rope_scaling": {"type": "linear", "factor": "2"}},
            r"'factor' is '2', but must be a number of at least 1 \(rope type linear\)",
        ),
    ],
)
def test_errors_name_the_file_and_the_field(tmp_path: Path, config: object, message: str) -> None:
    write(tmp_path, config)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(tmp_path).require()
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_class_does_not_read_may_be_missing(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, {**without("num_hidden_layers"), "num_key_value_heads": 3}))
    config.require("hidden_size", "max_len")
    assert sorted(config.problems) == ["num_kv_heads", "num_layers"]


def test_models_without_attention_need_no_heads_and_no_length(tmp_path: Path) -> None:
    raw = {
        **without("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
        "model_type": "mamba",
    }
    config = read_config(write(tmp_path, raw))
    config.require()
    assert (config.max_len, config.any_length, config.num_heads) == (8192, True, config.hidden_size)


def test_infinity_as_transformers_writes_it(tmp_path: Path) -> None:
    limit = [0.0, {"__float__": "Infinity"}]
    config = read_config(
        write(tmp_path, {**LLAMA, "time_step_limit": limit, "more": {"__float__": "-Infinity"}})
    )
    assert config.raw["time_step_limit"] == [0.0, float("inf")]
    assert config.raw["more"] == float("-inf")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist; a model's folder holds"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_not_json(tmp_path: Path, name: str) -> None:
    write(tmp_path, LLAMA)
    (tmp_path / name).write_text("{'a': 1}")
    with pytest.raises(ConfigError, match=f"{name} cannot be read as JSON: .*line 1 column 2"):
        read_config(tmp_path)


def test_a_broken_safetensors_header(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 8) + b"not json")
    with pytest.raises(ConfigError, match=r"model\.safetensors has no readable safetensors header"):
        read_config(write(tmp_path, without("dtype")))


def test_reading_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, models.checkpoint.hub, models.conversion.conversion_choice, models.registry;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'huggingface_hub')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
