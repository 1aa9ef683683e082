"""Variables of vLLM's deployments are obeyed or said to have no meaning, and so are flags without effect."""

from pathlib import Path

import pytest

from server.options.option_parsing import OptionError
from server.options.parse_server_options import parse
from server.options.server_flags import ServerConfig


def read(*flags: str, **environ: str) -> tuple[ServerConfig, str]:
    notes: list[str] = []
    config = parse(["m", *flags], environ, notes=notes)
    return config, "\n".join(notes)


def test_variables_give_the_options_that_nothing_else_gives() -> None:
    config, said = read(
        VLLM_HTTP_TIMEOUT_KEEP_ALIVE="75",
        VLLM_LOGGING_LEVEL="DEBUG",
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_SERVER_DEV_MODE="1",
        VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB="8",
    )
    assert config.connections.timeout_keep_alive == 75
    assert (config.log.uvicorn_log_level, config.server_dev_mode) == ("debug", True)
    assert (config.engine.worker.kv_cache_memory_bytes, config.media.max_media_mb) == (2 << 30, 8)
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE as --timeout-keep-alive" in said
    config, _ = read("--timeout-keep-alive", "9", VLLM_HTTP_TIMEOUT_KEEP_ALIVE="75")
    assert config.connections.timeout_keep_alive == 9
    config, _ = read(FACET_TIMEOUT_KEEP_ALIVE="8", VLLM_HTTP_TIMEOUT_KEEP_ALIVE="75")
    assert config.connections.timeout_keep_alive == 8


def test_a_variable_that_asks_for_the_default_gives_nothing() -> None:
    config, said = read(VLLM_CPU_KVCACHE_SPACE="0", VLLM_API_KEY="", VLLM_SERVER_DEV_MODE="0")
    assert config == read()[0]
    assert "VLLM_CPU_KVCACHE_SPACE" not in said


def test_variables_without_meaning_are_named_with_the_one_that_was_meant() -> None:
    _, said = read(VLLM_USE_V1="1", VLLM_API_KEYS="k")
    named = "VLLM_API_KEYS (did you mean VLLM_API_KEY?), VLLM_USE_V1"
    assert said == f"variables of vLLM without meaning here: {named}"


def test_variables_of_kubernetes_and_of_others_are_not_spoken_of() -> None:
    links = {
        "VLLM_PORT": "tcp://10.0.0.1:80",
        "VLLM_SERVICE_HOST": "10.0.0.1",
        "VLLM_A_PORT_80_TCP_ADDR": "x",
    }
    assert read(**links, HOME="/", CUDA_VISIBLE_DEVICES="0")[1] == ""


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "long", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE: 'long' is not a number"),
        ("VLLM_LOGGING_LEVEL", "LOUD", "'loud' is not one of critical, error"),
        ("VLLM_CPU_KVCACHE_SPACE", "many", "'manyGiB' is not a size"),
        ("VLLM_ALL2ALL_BACKEND", "pplx", "use all_to_all"),
    ],
)
def test_a_value_that_cannot_be_obeyed_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(OptionError) as refused:
        read(**{name: value})
    assert said in str(refused.value)


def test_flags_that_change_nothing_are_named(tmp_path: Path) -> None:
    assert read("--max-num-seqs", "4", "--no-enable-lora")[1] == ""
    file = tmp_path / "serve.yaml"
    file.write_text("swap-space: 4\nuse-tqdm-on-load: false\n")
    _, said = read("-O3", "-cc.mode=3", "--prefix-caching-hash-algo", "sha256", "--config", str(file))
    assert said == (
        "these flags change nothing here: --prefix-caching-hash-algo, --compilation-config, "
        "--optimization-level, --swap-space (docs/options.md lists all of them)"
    )
