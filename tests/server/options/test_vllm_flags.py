"""Command lines written for vLLM: what is accepted, and what is said of the rest."""

import shlex
from contextlib import suppress
from pathlib import Path

import pytest

from server.options.foreign_options import VLLM_FLAGS
from server.options.option_parsing import OptionError
from server.options.parse_server_options import from_python, parse
from server.options.server_flags import ServerConfig

PAGE = Path(__file__).parents[3] / "docs/options.md"


def read(line: str) -> ServerConfig:
    return parse(["m", *shlex.split(line)], {})


@pytest.mark.parametrize(
    "line",
    [
        "--enable-auto-tool-choice",
        "--disable-log-requests --swap-space 4 --max-log-len 100",
        "--interleave-mm-strings --limit-mm-per-prompt '{}'",
        "-O3",
        "-O 2",
        "--optimization-level 2 --attention-backend FLASH_ATTN",
        "--compilation-config 3",
        "-cc.mode=3 -cc.cudagraph_mode=PIECEWISE",
        """--compilation-config '{"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}'""",
        "--structured-outputs-config.backend xgrammar",
        "--structured-outputs-config {} --guided-decoding-backend outlines",
        "--kv-transfer-config null --ignore-patterns 'original/**/*'",
        "-dcp 1 -pcp 1 -dpb mp",
        "-ac.backend FLASH_ATTN --gdn-prefill-backend triton --use-fp64-gumbel --mamba-backend flashinfer",
        "--offload-group-size 0 --offload-params a b --jit-monitor-mode warn --no-enable-hc-sp",
        "--prefix-caching-hash-algo xxhash --max-long-partial-prefills 1 --use-tqdm-on-load",
    ],
)
def test_start_lines_that_ask_for_what_is_so_anyway(line: str) -> None:
    assert read(line) == read("")


@pytest.mark.parametrize(
    ("line", "most"),
    [
        ("", {"image": 16, "video": 16}),
        ("""--limit-mm-per-prompt '{"image": {"count": 3, "width": 9}}'""", {"image": 3, "video": 16}),
        ("--limit-mm-per-prompt.image 0", {"video": 16}),
    ],
)
def test_how_many_media_a_prompt_may_have(line: str, most: dict[str, int]) -> None:
    config = read(line)
    assert config.media.most_of(("image", "video")) == most
    assert config.engine.worker.language_model_only is ("image" not in most)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--override-pooler-config '{}x'", "is --pooler-config here"),
        ("--kv-cache-memory 1000", "--kv-cache-memory-bytes"),
        ("--hf-token secret", "the variable HF_TOKEN"),
        ("--rope-theta 1e6", "--hf-overrides.rope_theta"),
        ("--enable-per-request-metrics", "is --enable-timing here"),
        ("--cudagraph-capture-sizes 1 2 4", "--max-cudagraph-capture-size"),
        ("--limit-mm-per-prompt.picture 2", "'picture' is not a kind of media; they are image, audio, video"),
        ("--limit-mm-per-prompt image=2", "not JSON"),
        ("--kv-offloading-backend lmcache", "has no other backend; leave it out, or give native"),
        (
            """--kv-transfer-config '{"kv_connector": "LMCacheConnectorV1"}'""",
            "is for connectors, of which",
        ),
        ("--kv-transfer-config.kv_connector LMCacheConnectorV1", "is for connectors, of which"),
        ("--logging-config.log_level DEBUG", "--logging-config is --log-config-file here, and --log-level"),
        ("--max-num-active-seqs 4", "--max-num-active-seqs is --max-num-seqs here"),
        ("--watermark-config {}x", "--watermark-config is not supported"),
        ("-dpm", "--data-parallel-multi-port-external-lb is not supported"),
        ("-dc.canvas_length 8", "--diffusion-config is not supported"),
        ("-sc.method eagle", "--speculative-config: eagle needs a drafter"),
        ("--spec-method ngram --spec-tokens 1000", "num_speculative_tokens is a whole number from 1 to 64"),
        ("-sc.method suffix --spec-method ngram", "the flag for its method contradict each other"),
        ("-sc none --spec-tokens 4", "the flag for its num_speculative_tokens contradict each other"),
        ("--speculative-model x", "--speculative-model is --spec-model here"),
        ("--num-speculative-tokens 3", "--num-speculative-tokens is --spec-tokens here"),
        ("--eplb-config {}", "--eplb-config is not supported: experts stay on the ranks"),
        ("--ignore-unknown-fields", "and --strict-fields refuses them"),
    ],
)
def test_refusals_say_what_to_do_instead(line: str, said: str) -> None:
    with pytest.raises(OptionError) as refused:
        read(line)
    assert said in str(refused.value)


def test_refusals_are_whole_sentences() -> None:
    for other in VLLM_FLAGS:
        with suppress(OptionError):
            other.check("x")
            continue
        with pytest.raises(OptionError) as refused:
            other.check("x")
        assert not str(refused.value).endswith((" ", "give", ";")), refused.value


@pytest.mark.parametrize("flag", ["--speculative-modle x", "--enable-lorra", "--max-lora-rnak 8"])
def test_no_flag_that_is_refused_too_is_offered(flag: str) -> None:
    with pytest.raises(OptionError, match="there is no option") as refused:
        read(flag)
    refused_flags = {other.flag for other in VLLM_FLAGS}
    assert not refused_flags & set(str(refused.value).rstrip("?").split())


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("-asc 2", "--api-server-count 2"),
        ("-dp 2 -ep", "--data-parallel-size 2 --enable-expert-parallel"),
        ("-dp 4 -dpl 4", "--data-parallel-size 4 --data-parallel-size-local 4"),
        ("-dpa 10.0.0.7 -dpp 400", "--data-parallel-address 10.0.0.7 --data-parallel-rpc-port 400"),
    ],
)
def test_short_names_are_those_of_vllm(short: str, long: str) -> None:
    assert read(short) == read(long) != read("")


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("--log-level DEBUG", "debug"),
        ("--uvicorn-log-level Warning", "warning"),
        ("--uvicorn-log-level trace", "debug"),
        ("--log-level NOTSET", "debug"),
        ("--log-level WARN", "warning"),
    ],
)
def test_levels_of_the_log_have_names_of_pythons_logging_and_of_uvicorn(line: str, level: str) -> None:
    assert read(line).log.uvicorn_log_level == level


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--log-level loud", "--log-level: 'loud' is not one of"),
        ("--uvicorn-log-level loud", "--uvicorn-log-level: 'loud' is not one of"),
        ("--log_level", "--log-level needs a value"),
        ("--device-memory-utilization=7", "--device-memory-utilization: must be at most 1"),
        ("-tp 2.5", "-tp: '2.5' is not a whole number"),
        ("--task draft", "--task: a draft model answers no requests"),
        ("--task draft --tasks draft", "--tasks: a draft model answers no requests"),
    ],
)
def test_errors_name_flags_as_they_were_typed(line: str, said: str) -> None:
    with pytest.raises(OptionError) as refused:
        read(line)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    "line",
    [
        """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'""",
        "-sc.method ngram -sc.num_speculative_tokens 4",
        "--spec-method ngram --spec-tokens 4",
        "-sc.method ngram --spec-tokens 4",
    ],
)
def test_ways_to_ask_for_guesses(line: str) -> None:
    asked = {"method": "ngram", "num_speculative_tokens": 4}
    assert read(line).engine.speculative_config == asked
    assert from_python({"speculative_config": asked}).engine.speculative_config == asked


@pytest.mark.parametrize("written", ["none", "null", "None"])
def test_no_guesses_can_be_asked_for(written: str) -> None:
    assert read(f"--speculative-config {written}").engine.speculative_config is None


def test_flags_without_effect_are_documented() -> None:
    page = PAGE.read_text("utf-8")
    assert [other.flag for other in VLLM_FLAGS if other.is_idle and f"`{other.flag}" not in page] == []
