"""Configs that lie, and files of settings that are none: a line names the file, the field and the reason."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from broken import EMBEDDINGS, WEIGHTS, Case, assert_refused, case, config, put, replaced
from tiny import VOCAB_SIZE

from models.config import read_config
from models.loader import LoadOptions, load_model

NAN, INFINITE = float("nan"), float("inf")
CONFIG, DEFAULTS, MODULES = "config.json", "generation_config.json", "modules.json"
UNFIT = ("weights and config.json do not fit",)
DEEP = '{"a":' * 100_000

FIELDS: list[Case] = [
    case(
        "10^9 layers",
        config(num_hidden_layers=10**9),
        CONFIG,
        "'num_hidden_layers' is 1000000000, but must be",
    ),
    case(
        "more layers than tensors",
        config(num_hidden_layers=9999),
        CONFIG,
        "9999 layers",
        "30 tensors",
        WEIGHTS,
    ),
    case("a layer too many", config(num_hidden_layers=4), "model.layers.3.", "is missing", "more", *UNFIT),
    case(
        "a layer too few", config(num_hidden_layers=2), "model.layers.2.", "has no place in the model", *UNFIT
    ),
    case("10^12 tokens", config(vocab_size=10**12), CONFIG, "'vocab_size' is 1000000000000, but must be"),
    case("2^31 tokens", config(vocab_size=1 << 31), EMBEDDINGS, "[320, 32], not [2147483648, 32]", *UNFIT),
    case("a token too many", config(vocab_size=321), EMBEDDINGS, "[320, 32], not [321, 32]", *UNFIT),
    case("another width", config(hidden_size=64), EMBEDDINGS, "[320, 32], not [320, 64]", *UNFIT),
    case("a width of 2^31", config(hidden_size=1 << 31), CONFIG, "'hidden_size' is 2147483648, but"),
    case("a width in quotes", config(hidden_size="32"), CONFIG, "'hidden_size' is '32'"),
    case("no heads", config(num_attention_heads=0), CONFIG, "'num_attention_heads' is 0"),
    case("4097 heads", config(num_attention_heads=4097), CONFIG, "is 4097, but must be at most 4096"),
    case(
        "4097 heads for keys", config(num_key_value_heads=4097), CONFIG, "is 4097, but must be at most 4096"
    ),
    case(
        "heads that only a family reads",
        config(vision_config={"heads": [{"mamba_n_heads": 1 << 20}]}),
        CONFIG,
        "'vision_config.heads.mamba_n_heads' is 1048576, but must be at most 4096",
    ),
    case(
        "wide heads",
        config(num_attention_heads=4096, head_dim=512),
        CONFIG,
        "4096 attention heads of 512 features have 2097152 together, and 1048576 are allowed",
    ),
    case("heads that do not divide", config(num_attention_heads=5), CONFIG, "5 attention heads"),
    case("other heads", config(num_attention_heads=8), "q_proj.weight", "has the shape", *UNFIT),
    case("3 heads for keys", config(num_key_value_heads=3), CONFIG, "cannot share 3 key-value heads"),
    case("no width of heads", config(head_dim=0), CONFIG, "'head_dim' is 0"),
    case("heads of 10^9", config(head_dim=10**9), CONFIG, "'head_dim' is 1000000000, but"),
    case("no features", config(intermediate_size=0), CONFIG, "$.intermediate_size", ">= 1"),
    case("fewer than no features", config(intermediate_size=-5), CONFIG, "$.intermediate_size", ">= 1"),
    case(
        "10^30 features",
        config(intermediate_size=10**30),
        CONFIG,
        "'intermediate_size' is 1",
        "at most 1048576",
    ),
    case("eps that is NaN", config(rms_norm_eps=NAN), CONFIG, "'rms_norm_eps' is NaN"),
    case("eps below 0", config(rms_norm_eps=-1e-5), CONFIG, "$.rms_norm_eps", ">= 0"),
    case("infinite eps", config(rms_norm_eps=INFINITE), CONFIG, "$.rms_norm_eps", "< 1"),
    case("eps in quotes", config(rms_norm_eps="1e-5"), CONFIG, "$.rms_norm_eps"),
    case(
        "theta 0",
        config(rope_parameters={"rope_type": "default", "rope_theta": 0.0}),
        CONFIG,
        "rope_theta 0.0",
    ),
    case(
        "theta NaN",
        config(rope_parameters={"rope_type": "default", "rope_theta": NAN}),
        CONFIG,
        "'rope_parameters.rope_theta' is NaN",
    ),
    case("theta below 0", config(rope_parameters={"rope_theta": -1.0}), CONFIG, "rope_theta -1.0"),
    case("infinite theta", config(rope_parameters={"rope_theta": INFINITE}), CONFIG, "rope_theta inf"),
    case(
        "factor 0",
        config(rope_parameters={"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4}),
        CONFIG,
        "'factor' is 0.0",
    ),
    case("an unknown rope", config(rope_parameters={"rope_type": "spiral"}), CONFIG, "rope type 'spiral'"),
    case(
        "a rope that is text", config(rope_parameters="default"), CONFIG, "must be an object, not 'default'"
    ),
    case(
        "more rotated than there is",
        config(partial_rotary_factor=2.0),
        CONFIG,
        "rotate 16 of the 8 dimensions",
    ),
    case("no positions", config(max_position_embeddings=0), CONFIG, "'max_position_embeddings' is 0"),
    case("numbers of 8 bits", config(dtype="int8"), CONFIG, "'dtype' is 'int8'"),
    case("fp8", config(dtype="float8_e4m3fn"), CONFIG, "'dtype' is 'float8_e4m3fn'"),
    case("an activation nobody knows", config(hidden_act="swoosh"), "swoosh"),
    case("an architecture nobody knows", config(architectures=["FooForCausalLM"]), "FooForCausalLM"),
    case("no architecture", config(architectures=[]), CONFIG, "'architectures' must be a list"),
    case(
        "tied by a number",
        config(tie_word_embeddings=1),
        CONFIG,
        "'tie_word_embeddings' is 1, but must be true or false",
    ),
    case(
        "ends that are texts",
        config(eos_token_id=["</s>"]),
        CONFIG,
        "'eos_token_id' is ['</s>'], but must be a token id or a list of token ids",
    ),
    case("long nonsense", config(eos_token_id=["x" * 10_000]), CONFIG, "'eos_token_id' is ["),
    case(
        "no window",
        config(architectures=["MistralForCausalLM"], sliding_window=0),
        CONFIG,
        "$.sliding_window",
    ),
    case("a NaN that nobody reads", config(extra={"a": [1.0, NAN]}), CONFIG, "'extra.a' is NaN"),
    case(
        "kinds of layers",
        config(architectures=["Gemma3ForCausalLM"], layer_types=["full_attention"]),
        CONFIG,
        "Gemma3ForCausalLM",
    ),
]

CONFIG_FILES: list[Case] = [
    case("gone", put(None, CONFIG), CONFIG, "does not exist"),
    case("empty", put("", CONFIG), CONFIG, "cannot be read as JSON"),
    case("not JSON", put("{'a': 1}", CONFIG), CONFIG, "cannot be read as JSON"),
    case("a list", put("[]", CONFIG), CONFIG, "must hold a JSON object, but holds list"),
    case("no text", put(b"\xff\xfe{}", CONFIG), CONFIG, "cannot be read as JSON"),
    case("nested", put(DEEP, CONFIG), CONFIG, "nested too deeply"),
    case(
        "nested by 100",
        config(extra=json.loads("[" * 100 + "]" * 100)),
        CONFIG,
        "'extra' is nested too deeply",
    ),
    case(
        "a number of 5000 digits", put('{"vocab_size": ' + "9" * 5000 + "}", CONFIG), CONFIG, "cannot be read"
    ),
    case("a pipe", replaced(os.mkfifo, CONFIG), CONFIG, "is a pipe (FIFO)"),
    case("a folder", replaced(Path.mkdir, CONFIG), CONFIG, "is a folder"),
    case("defaults that are not JSON", put("{", DEFAULTS), DEFAULTS, "cannot be read as JSON"),
    case("defaults that are a pipe", replaced(os.mkfifo, DEFAULTS), DEFAULTS, "is a pipe"),
    case("modules that are not JSON", put("[", MODULES), MODULES),
    case(
        "modules that are nested",
        put('[{"type":"a","x":' + "[" * 100_000, MODULES),
        MODULES,
        "nested too deeply",
    ),
    case(
        "modules elsewhere",
        put(json.dumps([{"type": "sentence_transformers.models.Pooling", "path": "../x"}]), MODULES),
        MODULES,
        "'../x' is outside",
    ),
    case("modules that are a pipe", replaced(os.mkfifo, MODULES), MODULES, "is a pipe"),
]


@pytest.mark.parametrize("broken", [*FIELDS, *CONFIG_FILES], ids=lambda each: each.name)
def test_what_lies_is_refused(broken: Case, folder: Path) -> None:
    assert_refused(broken, folder)


@pytest.mark.parametrize("strange", [VOCAB_SIZE, -1, 10**20])
def test_an_end_beyond_the_vocabulary_is_left_out_with_a_warning(
    folder: Path, strange: int, caplog: pytest.LogCaptureFixture
) -> None:
    config(eos_token_id=[1, strange])(folder)
    found = read_config(folder)
    assert strange not in found.eos_token_ids
    assert 1 in found.eos_token_ids
    with caplog.at_level(logging.WARNING, "models"):
        load_model(LoadOptions(found, folder, dtype=torch.float32))
    (warning,) = caplog.messages
    assert f"{CONFIG}: 'eos_token_id' {strange} is none of the model's {VOCAB_SIZE} tokens" in warning
    assert "nothing but max_tokens" not in warning


def test_without_any_end_the_warning_says_what_ends_texts(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    config(eos_token_id=VOCAB_SIZE)(folder)
    found = read_config(folder)
    assert found.eos_token_ids == ()
    assert found.warnings[0].endswith("left out: nothing but max_tokens and stop strings ends a text")
