"""Every load format of vLLM works, or its refusal says what to do."""

import pytest

from server.options.option_parsing import OptionError
from server.options.parse_server_options import parse


@pytest.mark.parametrize(
    ("given", "meant"),
    [("auto", "auto"), ("hf", "auto"), ("pt", "pt"), ("npcache", "pt"), ("gguf", "gguf"), ("dummy", "dummy")],
)
def test_names_of_formats(given: str, meant: str) -> None:
    assert parse(["m", "--load-format", given], {}).engine.worker.load_format == meant


def test_bitsandbytes_checks_the_checkpoint() -> None:
    worker = parse(["m", "--load-format", "bitsandbytes"], {}).engine.worker
    assert (worker.load_format, worker.quantization) == ("auto", "bitsandbytes")
    with pytest.raises(OptionError, match="contradict each other"):
        parse(["m", "--load-format", "bitsandbytes", "-q", "int8"], {})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("runai_streamer", "copy the files to a disk"),
        ("tensorizer", "copy the files to a disk"),
        ("onnx", "is not one of auto, safetensors, pt"),
    ],
)
def test_other_formats_are_refused_with_the_way_out(name: str, said: str) -> None:
    with pytest.raises(OptionError, match=rf"--load-format: .*{name}.*{said}"):
        parse(["m", "--load-format", name], {})


def test_the_code_of_a_model_has_its_revision() -> None:
    with pytest.raises(OptionError, match=r"--code-revision means nothing here: .* --revision"):
        parse(["m", "--code-revision", "x"], {})


def test_the_recipe_for_mistrals_own_format() -> None:
    recipe = ["m", "--tokenizer-mode", "mistral", "--config-format", "mistral"]
    for flags in ([], ["--load-format", "mistral"]):
        assert parse([*recipe, *flags], {}).engine.worker.load_format == "mistral"
    assert parse(["m", "--tokenizer-mode", "slow"], {}).engine.worker.load_format == "auto"
    with pytest.raises(OptionError, match="--tokenizer-mode mistral goes with --load-format mistral"):
        parse([*recipe, "--load-format", "pt"], {})
