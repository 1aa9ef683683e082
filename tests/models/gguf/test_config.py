"""What metadata means in the words of config.json. That models compute by it is shown in test_weights.py."""

import struct
from pathlib import Path

import pytest
from gguf_metadata import Fields
from gguf_writer import Blob, Typed, write_gguf

from models.gguf.config import FAMILIES, raw_config
from models.gguf.file import read_gguf
from models.gguf.tensor_names import ARCHITECTURES
from models.plain_files import FileError

SHAPE: Fields = {
    "context_length": 512,
    "embedding_length": 64,
    "block_count": 6,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.layer_norm_epsilon": 1e-12,
}
EMBEDDINGS = Blob("token_embd.weight", (32, 64), 0, bytes(4 * 32 * 64))
TYPES = Blob("token_types.weight", (2, 64), 0, bytes(4 * 2 * 64))


def row(name: str, *numbers: float) -> Blob:
    return Blob(name, (len(numbers),), 0, struct.pack(f"<{len(numbers)}f", *numbers))


def raw(folder: Path, arch: str, fields: Fields | None = None, *blobs: Blob) -> dict[str, object]:
    """The config of a file of `arch` with these fields; a field that is None is left out."""
    given = {f"{arch}.{key}": value for key, value in (SHAPE | (fields or {})).items() if value is not None}
    given = {name.removeprefix(f"{arch}./"): value for name, value in given.items()}
    path = write_gguf(
        folder / "model.gguf", {"general.architecture": arch, **given}, [EMBEDDINGS, TYPES, *blobs]
    )
    return raw_config(read_gguf(path))


def test_the_architectures_are_those_whose_weights_are_read() -> None:
    assert set(FAMILIES) == set(ARCHITECTURES)


def test_numbers_are_the_shortest_that_were_meant(tmp_path: Path) -> None:
    found = raw(tmp_path, "llama", {"rope.freq_base": 1e6, "attention.key_length": 16})
    assert (found["rms_norm_eps"], found["rope_theta"], found["head_dim"]) == (1e-6, 1e6, 16)
    assert (found["vocab_size"], found["tie_word_embeddings"], found["dtype"]) == (32, True, "float32")
    assert "rope_scaling" not in found


def test_special_tokens_and_the_mixture_of_codings_are_told(tmp_path: Path) -> None:
    fields: Fields = {"/general.file_type": 15, "/tokenizer.ggml.eos_token_id": 7}
    matrix = Blob("blk.0.ffn_up.weight", (2, 256), 12, bytes(2 * 144))
    head = Blob("output.weight", (32, 64), 1, bytes(2 * 32 * 64))
    found = raw(tmp_path, "llama", fields, matrix, head)
    assert (found["eos_token_id"], found["tie_word_embeddings"], found["dtype"]) == (7, False, "bfloat16")
    assert found["quantization_config"] == {
        "quant_method": "gguf",
        "file_type": "Q4_K_M",
        "codings": {"model.layers.0.mlp.up_proj": "Q4_K"},
    }


def test_factors_of_llama_3_are_those_of_its_tensor(tmp_path: Path) -> None:
    found = raw(tmp_path, "llama", None, row("rope_freqs.weight", 1.0, 2.5, 8.0))
    scaling = {"rope_type": "longrope", "long_factor": [1, 2.5, 8], "short_factor": [1, 2.5, 8]}
    assert found["rope_scaling"] == scaling | {"attention_factor": 1.0}


def test_factors_of_phi_3(tmp_path: Path) -> None:
    fields: Fields = {
        "rope.scaling.original_context_length": 128,
        "rope.scaling.attn_factor": 1.25,
        "rope.dimension_count": 12,
        "attention.sliding_window": 0,
    }
    factors = row("rope_factors_long.weight", 4.0), row("rope_factors_short.weight", 1.0)
    found = raw(tmp_path, "phi3", fields, *factors)
    assert found["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [4.0],
        "short_factor": [1.0],
        "attention_factor": 1.25,
        "original_max_position_embeddings": 128,
    }
    assert (found["partial_rotary_factor"], found["sliding_window"]) == (0.75, None)


def test_stretched_rotations(tmp_path: Path) -> None:
    yarn: Fields = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.yarn_beta_fast": 16.0,
    }
    expected = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0}
    assert raw(tmp_path, "qwen2", yarn)["rope_scaling"] == expected | {
        "original_max_position_embeddings": 128
    }
    linear: Fields = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    older: list[Fields] = [{"rope.scaling.factor": 8.0}, {"rope.scale_linear": 8.0}]
    for given in (linear, *older):
        assert raw(tmp_path, "gemma3", given)["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_windows(tmp_path: Path) -> None:
    window: Fields = {"attention.sliding_window": 16}
    assert raw(tmp_path, "llama", window)["architectures"] == ["MistralForCausalLM"]
    kinds = [kind == "full_attention" for kind in raw(tmp_path, "gemma2", window)["layer_types"]]  # pyright: ignore
    assert kinds == [False, True] * 3
    kinds = [kind == "full_attention" for kind in raw(tmp_path, "gemma3", window)["layer_types"]]  # pyright: ignore
    assert kinds == [False] * 5 + [True]
    assert set(raw(tmp_path, "gemma3")["layer_types"]) == {"full_attention"}  # pyright: ignore


def test_the_largest_gemmas_divide_by_another_root(tmp_path: Path) -> None:
    head: Fields = {"attention.key_length": 32, "attention.value_length": 32}
    assert raw(tmp_path, "gemma2", head)["query_pre_attn_scalar"] == 32
    assert raw(tmp_path, "gemma2", head | {"block_count": 46})["query_pre_attn_scalar"] == 16
    assert raw(tmp_path, "gemma3", head | {"block_count": 62})["query_pre_attn_scalar"] == 16


def test_biases_show_in_the_tensors(tmp_path: Path) -> None:
    biases = row("blk.0.attn_q.bias", *[0.0] * 64), row("blk.0.ffn_up.bias", *[0.0] * 96)
    found = raw(tmp_path, "llama", None, *biases)
    assert (found["attention_bias"], found["mlp_bias"]) == (True, True)


def test_encoders(tmp_path: Path) -> None:
    found = raw(tmp_path, "bert", None, Blob("position_embd.weight", (128, 64), 0, bytes(4 * 128 * 64)))
    assert (found["max_position_embeddings"], found["type_vocab_size"]) == (128, 2)
    assert found["layer_norm_eps"] == 1e-12


def test_one_number_for_each_layer_must_be_the_same(tmp_path: Path) -> None:
    assert raw(tmp_path, "llama", {"feed_forward_length": [96] * 6})["intermediate_size"] == 96
    with pytest.raises(FileError, match=r"llama\.feed_forward_length differs from layer to layer \(96, 64"):
        raw(tmp_path, "llama", {"feed_forward_length": [96, 64, 96, 96, 96, 96]})


@pytest.mark.parametrize(
    ("arch", "fields", "message"),
    [
        ("rwkv7", {}, r"general.architecture is 'rwkv7', which is not read from GGUF files, but"),
        ("llama", {"block_count": None}, r"the field llama\.block_count is missing; convert the model"),
        ("llama", {"embedding_length": "wide"}, r"llama\.embedding_length must be a number, not 'wide'"),
        ("qwen2", {"expert_count": 8}, r"qwen2\.expert_count is 8, and experts are not read"),
        ("llama", {"attention.value_length": 8}, "attention.value_length is 8, but keys have 16"),
        ("llama", {"rope.scaling.type": "magic"}, r"rope.scaling.type is 'magic', but only none, linear"),
        ("llama", {"rope.scaling.type": "yarn"}, r"rope\.scaling\.factor is missing"),
        (
            "olmo2",
            {"attention.sliding_window": 8},
            r"is 8, and windows \(OLMo 3\) are not read",
        ),
        (
            "qwen3",
            {"pooling_type": 4},
            "pooling_type is 4, a reranker's, which is read with the head of BERT",
        ),
        ("llama", {"/general.architecture": 7}, "general.architecture is missing; the file holds no model"),
    ],
)
def test_what_is_not_read_is_refused_by_file_and_field(
    arch: str, fields: Fields, message: str, tmp_path: Path
) -> None:
    with pytest.raises(FileError, match=message) as error:
        raw(tmp_path, arch, fields)
    assert str(tmp_path / "model.gguf") in str(error.value)


def test_factors_of_another_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"rope_freqs\.weight must be a short row of F32, not F16"):
        raw(tmp_path, "llama", None, Blob("rope_freqs.weight", (4,), 1, bytes(8)))


def test_a_file_without_embeddings_holds_no_model(tmp_path: Path) -> None:
    fields = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in SHAPE.items()}
    with pytest.raises(FileError, match=r"the tensor token_embd\.weight is missing"):
        raw_config(read_gguf(write_gguf(tmp_path / "model.gguf", fields, [TYPES])))


def test_typed_integers_of_any_width_count(tmp_path: Path) -> None:
    assert raw(tmp_path, "llama", {"block_count": Typed(10, 6)})["num_hidden_layers"] == 6
