"""Options of streams beside other work: their defaults, and which do not go together."""

from __future__ import annotations

import pytest

from server.bench.serve_options import LoadOptions, parse
from server.options.option_table import OptionError


def options(*arguments: str) -> LoadOptions:
    return parse(arguments, "bench serve")


def test_defaults_are_those_of_a_stream() -> None:
    found = options("--beside", "embeddings", "prompt")
    assert found.mixed.beside == ["embeddings", "prompt"]
    assert (found.random_input_len, found.random_output_len, found.ignore_eos) == (32, 200, True)
    found = options(
        "--beside", "embeddings,prompt", "--output-len", "50", "--no-ignore-eos", "--streams", "3"
    )
    assert (found.random_output_len, found.ignore_eos, found.mixed.streams) == (50, False, 3)
    assert options().random_output_len == 128


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--beside", "chats"], "'chats' is not one of embeddings, prompt, bulk"),
        (["--streams", "2"], "--streams needs --beside"),
        (["--beside", "bulk", "prompt"], "--beside bulk is measured by itself"),
        (["--beside", "prompt", "--concurrency", "2"], "--max-concurrency means nothing with --beside"),
        (["--beside", "prompt", "--plot", "p.html"], "--plot means nothing with --beside"),
        (["--beside", "prompt", "--endpoint", "embeddings"], "--beside reads streams"),
        (["--beside", "prompt", "--rounds", "0"], "--rounds: must be at least 1"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: list[str], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        options(*arguments)
