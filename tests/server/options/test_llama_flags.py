"""Command lines written for llama.cpp's server, and words with one dash that are no flag."""

import shlex

import pytest

from server.options.option_parsing import OptionError
from server.options.parse_server_options import parse
from server.options.server_flags import ServerConfig


def read(line: str) -> ServerConfig:
    return parse(shlex.split(line), {})


def test_flags_that_change_nothing_are_named() -> None:
    notes: list[str] = []
    parse(["-ngl", "99", "--no-mmap", "-fa", "on", "--jinja"], {}, notes=notes)
    named = "--jinja, --n-gpu-layers, --flash-attn"
    assert [note.partition(" (")[0] for note in notes] == [f"these flags change nothing here: {named}"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("-m a.gguf", "-m is MODEL, without a flag, here"),
        ("-hf org/name-GGUF:Q4_K_M", "--hf-repo is MODEL, without a flag, here"),
        ("-c 4096", "--ctx-size is --max-model-len here"),
        ("-b 512", "--batch-size is --max-num-batched-tokens here"),
        ("-ctk q8_0", "int8 in place of q8_0"),
        ("-md b.gguf", "--spec-model"),
        ("-tpx 2", "there is no option -tpx; did you mean -tp?"),
        ("-nq 2", "there is no option -nq"),
        ("-q8", "-q: '8' is not one of"),
    ],
)
def test_what_is_said_of_others(line: str, told: str) -> None:
    with pytest.raises(OptionError) as caught:
        read(line)
    assert told in str(caught.value)


def test_numbers_are_values_whatever_their_sign() -> None:
    assert read("--max-model-len -1") == read("")
    assert read("-O3") == read("")
