"""Options from flags, variables and files are read by one table, and unknown ones are refused."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from server.options.foreign_options import VLLM_FLAGS
from server.options.option_parsing import OptionError, assemble, flatten
from server.options.parse_server_options import OPTIONS, parse
from server.options.server_flags import (
    ServerConfig,
)
from worker.options import size


def read(*arguments: str, **environ: str) -> ServerConfig:
    return parse(arguments, environ)


def refusal(*arguments: str, **environ: str) -> str:
    with pytest.raises(OptionError) as caught:
        read(*arguments, **environ)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.yaml"


HTTPS = ["--ssl-keyfile", "k", "--ssl-certfile", "c"]


def test_nothing_given_serves_the_demo_on_this_machine_only() -> None:
    config = read()
    assert config.engine.model == "demo"
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert config.model_names == ("demo",)


def test_flags_reach_the_struct_that_declares_them() -> None:
    config = read("m", "--port", "0", "--max-num-seqs=4", "--served-model-name", "a", "b", "--api-key", "k")
    assert config.engine.model == "m"
    assert config.engine.worker.max_num_seqs == 4
    assert config.model_names == ("a", "b")
    assert config.access.api_key == ["k"]


def test_clients_are_told_no_path_unless_the_operator_says_so() -> None:
    unnamed = read("/srv/secret/llama")
    assert (unnamed.model_names, unnamed.root) == (("llama",), "llama")
    assert read("/srv/secret/llama", "--show-root").root == "/srv/secret/llama"
    named = read("/srv/secret/llama", "--served-model-name", "a", "b")
    assert named.root == "a"
    assert [one.is_own_path("/srv/secret/llama") for one in (unnamed, named)] == [True, False]


def test_dashes_and_underscores_are_the_same() -> None:
    assert read("--max_num_seqs", "4", "--stream_interval=3") == read(
        "--max-num-seqs", "4", "--stream-interval=3"
    )


@pytest.mark.parametrize(
    ("flag", "written", "field", "value"),
    [
        ("--max-model-len", "32k", "max_model_len", 32_000),
        ("--max-model-len", "1K", "max_model_len", 1024),
        ("--max-model-len", "1M", "max_model_len", 1 << 20),
        ("--max-model-len", "auto", "max_model_len", None),
        ("--max-model-len", "-1", "max_model_len", None),
        ("--kv-cache-memory-bytes", "4GiB", "kv_cache_memory_bytes", 4 << 30),
        ("--kv-cache-memory-bytes", "4G", "kv_cache_memory_bytes", 4 << 30),
        ("--kv-cache-memory-bytes", "4GB", "kv_cache_memory_bytes", 4_000_000_000),
        ("--dtype", "half", "dtype", "float16"),
        ("--dtype", "float", "dtype", "float32"),
        ("--hf-overrides", '{"a": {"b": 1}}', "hf_overrides", {"a": {"b": 1}}),
        ("--gpu-memory-utilization", "0.5", "gpu_memory_utilization", 0.5),
        ("--device-memory-utilization", "0.5", "gpu_memory_utilization", 0.5),
        ("--log-level", "debug", "uvicorn_log_level", "debug"),
        ("--task", "embedding", "tasks", ["embed"]),
        ("--task", "score", "runner", "pooling"),
        ("--task", "score", "tasks", []),
        ("--task", "reward", "convert", "reward"),
        ("--model-impl", "vllm", "model_impl", "facet"),
        ("--tasks", "embed,classify", "tasks", ["embed", "classify"]),
        ("--tasks", '["embed", "generate"]', "tasks", ["embed", "generate"]),
        ("--pooler-config", '{"pooling_type": "CLS"}', "pooler_config", {"pooling_type": "CLS"}),
    ],
)
def test_written_forms(flag: str, written: str, field: str, value: object) -> None:
    assert flatten(read(flag, written))[field] == value


def test_a_model_without_a_flag_wins_over_that_of_the_flag() -> None:
    notes: list[str] = []
    assert parse(["a", "--model", "b"], {}, notes=notes).engine.model == "a"
    assert notes == ["a is served: the model without a flag wins over --model b"]


def test_switches_go_both_ways() -> None:
    assert read().engine.enable_prefix_caching
    assert not read("--no-enable-prefix-caching").engine.enable_prefix_caching
    assert read("--no-async-scheduling").engine.steps_ahead == 0
    assert read("--async-scheduling").engine.steps_ahead == 1
    assert "contradict" in refusal("--no-async-scheduling", "--steps-ahead", "2")


def test_lists_may_be_json_or_divided_by_commas() -> None:
    assert read("--allowed-origins", '["http://a", "http://b"]').allowed_origins == ["http://a", "http://b"]
    assert read("--disable-access-log-for-endpoints", "/a, /b").log.quiet_paths == {"/a", "/b"}
    assert read().log.quiet_paths == set()


def test_the_command_line_wins_over_variables_and_those_over_the_file(file: Path) -> None:
    file.write_text("model: from-file\nport: 1\nmax-num-seqs: 2\nallowed_origins: [x]\nseed: 7\n")
    config = read("--port", "3", "--config", str(file), FACET_PORT="2", FACET_MAX_NUM_SEQS="9")
    assert (config.port, config.engine.worker.max_num_seqs, config.engine.worker.seed) == (3, 9, 7)
    assert config.engine.model == "from-file"
    assert config.allowed_origins == ["x"]


def test_an_empty_host_is_not_taken_for_all_addresses() -> None:
    for refused in (refusal("--host", ""), refusal(FACET_HOST="")):
        assert "an empty address would be all of them" in refused


def test_the_key_of_vllms_variable_counts_unless_another_is_given() -> None:
    assert read(VLLM_API_KEY="k").access.api_key == ["k"]
    assert read("--api-key", "ours", VLLM_API_KEY="k").access.api_key == ["ours"]
    assert read(FACET_API_KEY="a b").access.api_key == ["a", "b"]
    assert read(VLLM_API_KEY="k\n").access.api_key == ["k"]


def test_variables_that_kubernetes_makes_are_not_options() -> None:
    links = {"FACET_SERVICE_HOST": "10.0.0.1", "FACET_PORT_8000_TCP": "x", "FACET_A_SERVICE_PORT_HTTP": "80"}
    config = read(FACET_PORT="tcp://10.0.0.1:8000", **links)
    assert config.port == 8000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-lem", "5"], "did you mean --max-model-len?"),
        (["--zzqq"], "--help lists them"),
        (["--port", "70000"], "--port: must be at most 65535"),
        (["--port", "x"], "--port: 'x' is not a whole number"),
        (["--gpu-memory-utilization", "half"], "--gpu-memory-utilization: 'half' is not a number"),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization: must be a number, got nan"),
        (["--seed", "-99999999999999999999"], "--seed: must be less than 2**63, got -99999999999999999999"),
        (["--max-model-len", "9000000000G"], "--max-model-len: must be less than 2**63"),
        (["--cpu-threads", "x"], "--cpu-threads: 'x' is not a whole number"),
        (["--cpu-threads", "0"], "--cpu-threads: must be at least 1, got 0"),
        (["--cpu-threads", "2000"], "--cpu-threads: must be at most 1024, got 2000"),
        (["--load-format", "onnx"], "'onnx' is not one of auto, safetensors, pt, npcache, gguf"),
        (["--max-model-len", "1.00001k"], "not a whole number"),
        (["--max-model-len", "long"], "is not a size"),
        (["--hf-overrides", "{"], "--hf-overrides: '{' is not JSON"),
        (["--hf-overrides", "[]"], "must be a JSON object"),
        (["--api-key", ""], "an empty key protects nothing"),
        (["--api-key", "\n"], "an empty key protects nothing"),
        (["--served-model-name", ""], "--served-model-name: an empty name"),
        (["--uds", ""], "--uds: an empty path"),
        (["--ssl-keyfile", "k"], "go together"),
        (["--ssl-ca-certs", "c"], "plain HTTP cannot: give --ssl-certfile and --ssl-keyfile too"),
        (["--ssl-ciphers", "c"], "--ssl-ciphers chooses ciphers, which plain HTTP cannot"),
        (["--enable-ssl-refresh"], "--enable-ssl-refresh renews certificates, which plain HTTP cannot"),
        (["--ssl-cert-reqs", "2", *HTTPS], "--ssl-cert-reqs 2 needs --ssl-ca-certs, the authorities"),
        (["--ssl-cert-reqs", "0", "--ssl-ca-certs", "c", *HTTPS], "would ask no client for a certificate"),
        (["--ssl-cert-reqs", "3", *HTTPS], "--ssl-cert-reqs: must be at most 2"),
        (["--api-server-count", "0"], "which runs replicas for another machine's API"),
        (["--api-server-count", "0", "--no-headless"], "--api-server-count 0 goes with --headless"),
        (["--h11-max-header-count", "0"], "--h11-max-header-count: must be at least 8"),
        (["--scheduler-cls", "a.B"], "--scheduling-policy priority, `priority` of requests"),
        (["--worker-cls", "a.B"], "change what is drawn; leave it out, or give auto"),
        (["--allowed-origins", "*", "--allow-credentials"], "every website"),
        (["--config", "/nowhere/file.yaml"], "cannot be read"),
        (["--enable-mfu-metrics"], "--enable-mfu-metrics is not supported yet"),
        (["-tp", "0"], "-tp: must be at least 1"),
        (["--quantization", "fp4"], "--quantization: 'fp4' is not one of int8"),
        (["--port"], "--port needs a value"),
        (["--enable-prefix-caching", "false"], "false is no model: switches have no value, and --no-"),
        (["--tasks", "embed,sing"], "--tasks: 'sing' is not one of generate, transcription, embed"),
        (["--tool-strict-level", "all"], "'all' is not one of auto, function, parameter"),
        (["--task", "draft"], "--task: a draft model answers no requests"),
        (["--task", "reward", "--convert", "embed"], "--task reward is --convert reward, and another"),
        (["--runner", "draft"], "a draft model answers no requests; it belongs in --speculative-config"),
        (["--runner", "x"], "'x' is not one of auto, generate, pooling"),
    ],
)
def test_refusals_name_the_option(arguments: list[str], message: str) -> None:
    assert message in refusal(*arguments)


def test_neutral_values_of_vllms_flags_are_accepted() -> None:
    config = read("m", "-tp", "1", "--no-enable-lora", "--enable-server-load-tracking", "--dtype", "auto")
    assert config == read("m")
    flags = ("--enable-ep-weight-filter", "--all2all-backend", "allgather_reducescatter")
    assert read("m", "-tp", "2", "--enable-expert-parallel", *flags).engine.enable_expert_parallel
    assert read("m", "-dp", "2", "--enable-expert-parallel", *flags).engine.enable_expert_parallel


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("naive", "use allgather_reducescatter, which sends all tokens"),
        ("deepep_low_latency", "use all_to_all, which also sends a token only"),
        ("flashinfer_nvlink_two_sided", "use all_to_all"),
        ("carrier_pigeon", "is not one of allgather_reducescatter, all_to_all"),
    ],
)
def test_exchanges_of_vllm_are_refused_with_what_to_use_instead(name: str, instead: str) -> None:
    said = refusal("m", "--all2all-backend", name)
    assert "--all2all-backend" in said
    assert name in said
    assert instead in said


def test_parts_of_an_option_are_given_by_dotted_flags() -> None:
    given = ("--hf-overrides.rope_theta", "300", "--hf-overrides.use-cache=false")
    whole = ("--hf-overrides", '{"rope_theta": 7, "vocab_size": 2}')
    both = {"rope_theta": 300, "vocab_size": 2, "use_cache": False}
    assert read("m", *whole, *given).engine.hf_overrides == both
    nested = ("--hf_overrides.rope_scaling.rope_type", "yarn", "--hf-overrides.rope_scaling.factor=2.5")
    assert read("m", *nested).engine.hf_overrides == {"rope_scaling": {"rope_type": "yarn", "factor": 2.5}}
    assert "--hf-overrides.a.b: a is given as something else" in refusal(
        "m", "--hf-overrides.a", "1", "--hf-overrides.a.b", "2"
    )
    assert "--hf-overrides.rope_theta needs a value" in refusal("m", "--hf-overrides.rope_theta")
    assert "there is no option --port.a" in refusal("m", "--port.a", "1")


def test_variables_and_files_are_checked_the_same_way(file: Path) -> None:
    assert "FACET_PROT is not an option of this server; did you mean FACET_PORT?" in refusal(FACET_PROT="1")
    assert "FACET_PORT: must be at most" in refusal(FACET_PORT="99999")
    file.write_text("prot: 1\n")
    assert "there is no option prot; did you mean port?" in refusal("--config", str(file))
    file.write_text("- a\n")
    assert "must hold 'option: value' lines" in refusal("--config", str(file))
    file.write_text("port: 1\n", "utf-16")
    assert "is not YAML: 'utf-8' codec can't decode" in refusal("--config", str(file))


def test_a_variable_may_name_the_file(file: Path, tmp_path: Path) -> None:
    file.write_text("port: 1\n")
    assert read(FACET_CONFIG=str(file)).port == 1
    assert "cannot be read" in refusal("--config", str(tmp_path / "none"), FACET_CONFIG=str(file))
    assert "did you mean FACET_CONFIG?" in refusal(FACET_CONFIGS=str(file))


def test_numbers_in_a_file_are_text_where_an_option_is(file: Path) -> None:
    file.write_text("api-key: 12345\nserved-model-name: [7, 1.5]\nhost: 1\n")
    config = read("--config", str(file))
    assert (config.access.api_key, config.model_names, config.host) == (["12345"], ("7", "1.5"), "1")
    file.write_text("api-key: true\n")
    assert "got `bool`" in refusal("--config", str(file))


def test_a_file_may_have_the_second_name_of_an_option(file: Path) -> None:
    file.write_text("log-level: debug\nengine_ready_timeout_s: 5\ntask: embed\n")
    config = read("--config", str(file))
    assert (config.log.uvicorn_log_level, config.engine.engine_ready_timeout) == ("debug", 5)
    assert config.engine.tasks == ["embed"]


def test_null_in_a_file_is_the_default_also_of_an_option_with_choices(file: Path) -> None:
    file.write_text("quantization: null\nmax-model-len: null\nport: null\ntrust-remote-code:\n")
    assert read("--config", str(file)) == read()


def test_a_file_may_have_parts_of_an_option_and_switches_that_are_turned_off(file: Path) -> None:
    file.write_text(
        "hf-overrides.rope_scaling.factor: 2.5\nhf-overrides.rope_scaling.rope_type: yarn\n"
        "hf-overrides:\n  use_cache: false\ncompilation-config.mode: 3\n"
        "no-enable-prefix-caching: true\nno-ollama: false\nno-async-scheduling: true\n"
    )
    config = read("--config", str(file))
    scaling = {"factor": 2.5, "rope_type": "yarn"}
    assert config.engine.hf_overrides == {"use_cache": False, "rope_scaling": scaling}
    assert (config.engine.enable_prefix_caching, config.ollama, config.engine.steps_ahead) == (False, True, 0)
    file.write_text("port.a: 1\n")
    assert f"{file}: port: {{'a': 1}} is not a whole number" in refusal("--config", str(file))


def test_vllms_flags_in_a_file_are_read_as_on_the_command_line(file: Path) -> None:
    file.write_text("disable-custom-all-reduce: true\ngrpc: false\nswap-space: 0\nhf-token: null\n")
    assert read("--config", str(file)) == read()
    file.write_text("enable-mfu-metrics: true\n")
    assert "--enable-mfu-metrics is not supported yet" in refusal("--config", str(file))
    file.write_text("enable-mfu-metrix: true\n")
    assert "enable-mfu-metrix; --help lists them" in refusal(
        "--config", str(file)
    )  # the other is refused, too


def test_every_field_is_an_option_and_no_name_is_there_twice() -> None:
    structs: list[type[msgspec.Struct]] = [ServerConfig]
    groups: set[str] = set()
    for struct in structs:
        for info in msgspec.structs.fields(struct):
            if isinstance(info.type, type) and issubclass(info.type, msgspec.Struct):
                structs.append(info.type)
                groups.add(info.name)
    fields = [info.name for struct in structs for info in msgspec.structs.fields(struct)]
    options = [option.field for option in OPTIONS]
    guesses, formats = ("spec_method", "spec_model", "spec_tokens"), ("config_format", "tokenizer_mode")
    shorthands = ("async_scheduling", *guesses, *formats)
    assert sorted(options) == sorted({*fields, *shorthands} - groups)
    flags = [flag for one in [*OPTIONS, *VLLM_FLAGS] for flag in one.flags]
    assert len(flags) == len(set(flags))


def test_a_configuration_is_built_again_from_its_option_values() -> None:
    config = read("m", "--dtype", "half", "-tp", "2", "--port", "9", "--hf-overrides", '{"a": 1}')
    assert (config.engine.worker.dtype, config.engine.tensor_parallel_size, config.port) == ("float16", 2, 9)
    assert assemble(ServerConfig, flatten(config)) == config


def test_a_configuration_travels_to_other_processes() -> None:
    config = read("m", "--hf-overrides", '{"a": 1}', "--api-key", "k")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ServerConfig) == config


@pytest.mark.parametrize("text", ["", "k", "4X", "-4", "1e3"])
def test_text_that_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        size(text)


def test_help_needs_none_of_the_heavy_libraries() -> None:
    code = (
        "import sys\nfrom server.main import serve\nsys.argv = ['serve', '--help']\n"
        "try:\n    serve()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'fastapi', 'pydantic', 'zmq', 'torch', 'transformers', 'tokenizers', 'uvicorn'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) < 40 and "--max-model-len N" in done.stdout
    assert "--shutdown-timeout" not in done.stdout


@pytest.mark.parametrize(
    ("word", "shown", "hidden"),
    [
        ("all", ["Model:", "Scheduler:", "--shutdown-timeout", "--config FILE"], ["--enable-mfu-metrics"]),
        ("scheduler", ["--max-num-seqs"], ["--shutdown-timeout"]),
        ("Device", ["--kv-cache-dtype"], ["--max-num-seqs"]),
        ("--max_num", ["--max-num-seqs"], ["--kv-cache-dtype"]),
    ],
)
def test_help_with_a_word_shows_more(
    word: str, shown: list[str], hidden: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        read("--zzqq", f"--help={word}")
    page = capsys.readouterr().out
    assert end.value.code == 0
    assert [each for each in shown if each not in page] == []
    assert [each for each in hidden if each in page] == []


def test_help_for_nothing_there_is_names_the_groups() -> None:
    assert "or of groups model, adapters, device" in refusal("--help=zzqq")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--max-lora-rank 64", "--max-lora-rank is for adapters: give --enable-lora, too, or --lora-modules"),
        ("--enable-lora --max-loras 2 --max-cpu-loras 1", "max_cpu_loras (1) must be >= max_loras (2)"),
        ("--lora-resolver", "--lora-resolver needs places to look in: give --lora-dir or --lora-repos"),
        ("--lora-resolver --lora-repos a/../b", "'a/../b' should be owner/name or owner/name/folder"),
        ("--lora-repos a/b", "give --lora-resolver or --allow-runtime-lora"),
        ("--lora-modules x", "'x' should be name=path"),
        ("--lora-modules a=b a=c", "the name 'a' is taken"),
        ("--lora-modules m=b", "the name 'm' is taken"),
        (
            '--lora-modules {"name":"a","path":"b","rank":3}',
            "its fields are name, path, base_model_name, labels",
        ),
        ('--lora-modules {"name":"a","path":"b","base_model_name":"q"}', "a is said to be for 'q', and this"),
    ],
)
def test_options_of_adapters_that_mean_nothing_are_refused(given: str, said: str) -> None:
    assert said in refusal("m", *given.split())
