"""Options of a Python call are read by the table that reads the flags of `serve`."""

from pathlib import Path

import pytest

from server.options.option_parsing import OptionError
from server.options.parse_server_options import from_python, parse
from server.options.server_flags import ServerConfig


def read(**keywords: object) -> ServerConfig:
    return from_python(keywords)


def refusal(**keywords: object) -> str:
    with pytest.raises(OptionError) as caught:
        read(**keywords)
    return str(caught.value)


def test_no_option_is_the_demo_as_from_the_command_line() -> None:
    assert read() == parse([], {})


@pytest.mark.parametrize(
    ("field", "given", "flags"),
    [
        ("dtype", "half", ["--dtype", "half"]),
        ("max_model_len", "64", ["--max-model-len", "64"]),
        ("max_model_len", 64, ["--max-model-len", "64"]),
        ("max_model_len", -1, ["--max-model-len", "-1"]),
        ("max_model_len", "32k", ["--max-model-len", "32k"]),
        ("kv_cache_memory_bytes", "60m", ["--kv-cache-memory-bytes", "60m"]),
        ("model_impl", "vllm", ["--model-impl", "vllm"]),
        ("hf_overrides", {"a": {"b": 1}}, ["--hf-overrides", '{"a": {"b": 1}}']),
        ("pooler_config", '{"pooling_type": "CLS"}', ["--pooler-config", '{"pooling_type": "CLS"}']),
        ("served_model_name", "a", ["--served-model-name", "a"]),
        ("task", "transcription", ["--tasks", "transcription"]),
        ("served_model_name", ["a", "b"], ["--served-model-name", "a", "b"]),
        ("served_model_name", ("a", "b"), ["--served-model-name", "a", "b"]),
        ("served_model_name", "one name", ["--served-model-name", "one name"]),
        ("tasks", "embed,classify", ["--tasks", "embed", "classify"]),
        ("async_scheduling", False, ["--no-async-scheduling"]),
        ("enable_prefix_caching", False, ["--no-enable-prefix-caching"]),
        ("model", Path("here/m"), ["here/m"]),
    ],
)
def test_a_value_means_what_it_means_as_a_flag(field: str, given: object, flags: list[str]) -> None:
    assert read(**{field: given}) == parse(flags, {})


def test_a_name_may_have_dashes() -> None:
    assert read(**{"max-num-seqs": 3}) == read(max_num_seqs=3)


def test_a_torch_dtype_is_read_by_its_name() -> None:
    class Float16:
        def __str__(self) -> str:
            return "torch.float16"

    assert read(dtype=Float16()).engine.worker.dtype == "float16"


def test_none_is_not_given() -> None:
    assert read(quantization=None, seed=None, tokenizer=None, hf_token=None, enable_lora=None) == read()


def test_the_clusters_key_may_be_a_variable_and_nothing_else() -> None:
    key = "a secret of sixteen characters or more"
    environ = {"FACET_CLUSTER_KEY": key, "FACET_SEED": "3", "FACET_NO_OPTION": "1"}
    found = from_python({"nnodes": 2}, environ).engine
    assert (found.cluster_key, found.worker.seed) == (key, 0)
    assert from_python({"nnodes": 2, "cluster_key": key[::-1]}, environ).engine.cluster_key == key[::-1]
    with pytest.raises(OptionError, match=r"nnodes 2 needs a secret .* set it as FACET_CLUSTER_KEY"):
        from_python({"nnodes": 2}, {})


def test_flags_of_vllm_are_accepted_where_they_change_nothing() -> None:
    neutral: dict[str, object] = {
        "disable_custom_all_reduce": True,
        "enable_lora": False,
        "cpu_offload_gb": 0,
        "kv_cache_dtype": "auto",
        "limit_mm_per_prompt": {},
        "tokenizer_mode": "auto",
        "compilation_config": 0,
    }
    assert read(**neutral) == read()


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"max_model_lem": 5}, "there is no option max_model_lem; did you mean max_model_len?"),
        ({"enforce_eagr": True}, "did you mean enforce_eager?"),
        ({"zzqq": 1}, "there is no option zzqq; they are those of `serve`"),
        ({"max_model_len": "long"}, "max_model_len: 'long' is not a size"),
        ({"max_model_len": 0}, "max_model_len: must be at least 1, got 0"),
        ({"port": "x"}, "port: 'x' is not a whole number"),
        ({"hf_overrides": [1]}, "hf_overrides: [1] is not a JSON object"),
        ({"dtype": "int3"}, "dtype: 'int3' is not one of auto, bfloat16, float16, float32"),
        ({"enable_mfu_metrics": True}, "enable_mfu_metrics is not supported yet"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb is not supported yet; leave it out, or give 0"),
        ({"async_scheduling": False, "steps_ahead": 2}, "async_scheduling and steps_ahead contradict"),
        ({"nnodes": 2, "node_rank": 2}, "node_rank 2: of nnodes 2 the last is 1"),
    ],
)
def test_refusals_spell_options_as_python_does(keywords: dict[str, object], said: str) -> None:
    message = refusal(**keywords)
    assert said in message and "--" not in message
