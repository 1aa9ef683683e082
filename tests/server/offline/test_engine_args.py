"""Options as objects."""

from __future__ import annotations

import argparse
import copy

import pytest

from facet import AsyncEngineArgs, AsyncLLM, EngineArgs, ModelRegistry, PoolerConfig, VllmConfig
from models.plugins import registered
from server.options.parse_server_options import from_python


def test_options_are_checked_at_once_and_can_be_changed():
    args = EngineArgs("some/model", max_model_len="2k", enforce_eager=True)
    assert (args.model, args.max_model_len, args.tensor_parallel_size) == ("some/model", "2k", 1)
    args.seed = 3
    assert args.options() == {
        "model": "some/model",
        "max_model_len": "2k",
        "enforce_eager": True,
        "seed": 3,
    }
    assert vars(args) == args.options() == copy.deepcopy(args).options()
    assert repr(AsyncEngineArgs(model="m", seed=1)) == "AsyncEngineArgs(model='m', seed=1)"


def test_a_configuration_is_made_of_options_and_takes_no_more():
    assert EngineArgs("demo").create_engine_config() == VllmConfig()
    config = AsyncEngineArgs("some/model", max_num_seqs=3).create_engine_config()
    assert (config.engine.model, config.engine.worker.max_num_seqs) == ("some/model", 3)
    with pytest.raises(TypeError, match="seed is one more"):
        AsyncLLM(config, seed=1)


def test_unknown_options_are_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="max_model_length; did you mean max_model_len"):
        EngineArgs("some/model", max_model_length=5)
    with pytest.raises(ValueError, match="max_num_seqs: must be at least 1"):
        AsyncEngineArgs(max_num_seqs=0)
    with pytest.raises(AttributeError, match="no option max_model_length"):
        _ = EngineArgs().max_model_length


def parser_of_a_program() -> argparse.ArgumentParser:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--prompt", default="Hello")
    parser.set_defaults(model="some/model")
    return parser


def test_options_are_read_by_the_parser_of_a_program():
    words = [
        "--max-model-len",
        "2k",
        "--no-enable-prefix-caching",
        "-tp",
        "2",
        "--tasks",
        "embed",
        "generate",
    ]
    args = parser_of_a_program().parse_args([*words, "--prompt", "Hi"])
    assert (args.prompt, args.max_num_seqs, args.seed) == ("Hi", None, 0)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    assert type(engine_args) is AsyncEngineArgs
    assert engine_args.options() == {
        "model": "some/model",
        "max_model_len": "2k",
        "enable_prefix_caching": False,
        "tensor_parallel_size": "2",
        "tasks": ["embed", "generate"],
    }
    given = vars(parser_of_a_program().parse_args([]))
    del given["prompt"]
    assert from_python(given) == from_python({"model": "some/model"})
    assert "--enable-sleep-mode" in parser_of_a_program().format_help()


def test_wrong_arguments_of_a_program_are_refused_as_others_are():
    args = parser_of_a_program().parse_args(["--max-num-seqs", "0"])
    with pytest.raises(ValueError, match="max_num_seqs: must be at least 1"):
        EngineArgs.from_cli_args(args)
    args = parser_of_a_program().parse_args(["--grpc"])
    with pytest.raises(ValueError, match="grpc is not supported yet"):
        EngineArgs.from_cli_args(args)


def test_a_pooler_config_is_an_object():
    config = from_python({"pooler_config": PoolerConfig(pooling_type="MEAN", normalize=False)})
    assert config.engine.pooler_config == {"pooling_type": "MEAN", "normalize": False}


def test_classes_are_registered_under_vllms_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("models.plugins._classes", {})
    assert "LlamaForCausalLM" in ModelRegistry.get_supported_archs()
    ModelRegistry.register_model("EngineArgsForCausalLM", "somewhere:Else")
    assert registered() == {"EngineArgsForCausalLM": "somewhere:Else"}
