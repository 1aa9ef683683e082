"""What `--speculative-config` may ask, and what is said of the rest."""

from __future__ import annotations

import pytest

from engine_core.config import EngineConfig
from engine_core.options.speculation_options import SpeculationOptions, read_guess_options
from models.config import ConfigError


def read(**given: object) -> SpeculationOptions | None:
    return read_guess_options(EngineConfig(model="m", speculative_config=given))


def test_guesses_come_from_the_text_unless_somebody_says_otherwise() -> None:
    assert read_guess_options(EngineConfig(model="m")) == SpeculationOptions(method="ngram", most=16)
    assert read_guess_options(EngineConfig(model="m", speculative_config=None)) is None


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, {}),
        ({"num_speculative_tokens": 5}, {"most": 5}),
        ({"num_speculative_tokens": None, "revision": None}, {}),
        ({"method": None, "model": "[ngram]"}, {}),
        ({"method": "ngram_gpu", "model": "ngram"}, {}),
        ({"prompt_lookup_max": 4}, {"least_match": 4, "most_match": 4}),
        ({"prompt_lookup_min": 3}, {"least_match": 3, "most_match": 3}),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 7}, {"least_match": 2, "most_match": 7}),
        ({"disable_by_batch_size": 4}, {"most_sequences": 4}),
        ({"rejection_sample_method": "standard", "draft_sample_method": "greedy"}, {}),
        ({"parallel_drafting": False, "enforce_eager": True, "attention_backend": "X"}, {}),
        (
            {"num_speculative_tokens_per_batch_size": [[1, 4, 8], [5, 16, 2]]},
            {"most_by_sequences": ((1, 4, 8), (5, 16, 2))},
        ),
        (
            {"num_speculative_tokens_per_batch_size": {"1-4": 8, "5": 0}},
            {"most_by_sequences": ((1, 4, 8), (5, 5, 0))},
        ),
    ],
)
def test_fields_of_ngram(given: dict[str, object], meant: dict[str, object]) -> None:
    expected = {"method": "ngram", "most": 16, **meant}
    assert read(**{"method": "ngram", **given}) == SpeculationOptions(**expected)  # pyright: ignore[reportArgumentType]


def test_fields_of_suffix() -> None:
    assert read(method="suffix") == SpeculationOptions(method="suffix", most=24)
    found = read(
        method="suffix",
        suffix_decoding_max_tree_depth=8,
        suffix_decoding_max_cached_requests=0,
        suffix_decoding_max_spec_factor=2,
        suffix_decoding_min_token_prob=0.5,
    )
    assert found == SpeculationOptions(
        method="suffix", most=24, suffix_depth=8, suffix_answers=0, suffix_factor=2.0, suffix_chance=0.5
    )


def test_fields_of_draft_models() -> None:
    found = read(model="a/beagle", num_speculative_tokens=3, max_model_len=99, revision="r")
    assert found == SpeculationOptions(method="draft_model", most=3, model="a/beagle", revision="r")
    assert read(method="deepseek_mtp") == SpeculationOptions(method="mtp", most=8)
    assert [read(model=f"a/{name}-b").method for name in ("EAGLE3", "EAGLE")] == [
        "eagle3",
        "eagle",
    ]
    found = read(
        method="draft_model",
        model="b",
        draft_tensor_parallel_size=1,
        draft_sample_method="probabilistic",
    )
    assert found == SpeculationOptions(method="draft_model", most=8, model="b", drafter_ranks=1, drawn=True)


def test_how_many_may_be_guessed_when_so_many_run() -> None:
    found = read(
        method="ngram",
        num_speculative_tokens=6,
        disable_by_batch_size=20,
        num_speculative_tokens_per_batch_size=[[1, 2, 9], [3, 8, 2], [9, 10, 0]],
    )
    assert found is not None
    assert [found.most_for(count) for count in (1, 2, 3, 8, 9, 11, 20, 21)] == [6, 6, 2, 2, 0, 6, 6, 0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "draft_model"}, "draft_model needs a drafter: name it by model"),
        (
            {"model": "a/b", "quantization": "fp8"},
            "quantization of a draft model is that of its target model",
        ),
        (
            {"model": "a/b", "draft_tensor_parallel_size": 0},
            "draft_tensor_parallel_size is a whole number from 1",
        ),
        ({"method": "eagle3"}, "eagle3 needs a drafter: name it by model"),
        (
            {"method": "dflash"},
            "method 'dflash' is not supported; there are ngram, suffix, draft_model, eagle",
        ),
        ({"method": "dspark"}, "method 'dspark' is not supported"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is a whole number from 1 to 64, not 0"),
        ({"num_speculative_tokens": 1000}, "from 1 to 64, not 1000"),
        ({"num_speculative_tokens": True}, "from 1 to 64, not True"),
        ({"num_speculative_tokens": "5"}, "from 1 to 64, not '5'"),
        (
            {"num_speculativ_tokens": 5},
            "there is no num_speculativ_tokens; did you mean num_speculative_tokens?",
        ),
        ({"colour": 5}, "there is no colour; there are method, num_speculative_tokens"),
        (
            {"prompt_lookup_min": 5, "prompt_lookup_max": 3},
            "prompt_lookup_min=5 must be <= prompt_lookup_max=3",
        ),
        ({"parallel_drafting": True}, "parallel_drafting is not supported; leave it out"),
        ({"speculative_token_tree": "[(0,)]"}, "proposed tokens form a sequence, not a tree"),
        (
            {"rejection_sample_method": "block"},
            "'block' is not supported; leave it out: each proposed token is compared",
        ),
        ({"rejection_sample_method": "synthetic"}, "rejection_sample_method 'synthetic' is not supported"),
        ({"synthetic_acceptance_length": 2}, "leave it out: a proposed token is accepted only"),
        ({"draft_sample_method": "x"}, "draft_sample_method is greedy or probabilistic, not 'x'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is draft_tensor_parallel_size here"),
        (
            {"draft_tensor_parallel_size": 1},
            "goes with a method that has a model of its own, and ngram has none",
        ),
        ({"model": "a/b", "method": "ngram"}, "model goes with a method that has a model of its own"),
        (
            {"suffix_decoding_min_token_prob": 2},
            "suffix_decoding_min_token_prob is a number from 0 to 1, not 2",
        ),
        (
            {"num_speculative_tokens_per_batch_size": [[4, 1, 2]]},
            "is a list of [first, last, tokens], such as",
        ),
        (
            {"num_speculative_tokens_per_batch_size": {"a-b": 2}},
            "is a list of [first, last, tokens], such as",
        ),
    ],
)
def test_refusals_say_what_is_allowed(given: dict[str, object], said: str) -> None:
    alone = not given or "method" in given or "model" in given
    with pytest.raises(ConfigError) as refused:
        read(**given if alone else {"method": "ngram", **given})
    assert said in str(refused.value)
    assert str(refused.value).startswith("--speculative-config: ")
