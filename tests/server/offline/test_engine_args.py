"""Options as objects."""

from __future__ import annotations

import copy

import pytest

from facet import AsyncEngineArgs, EngineArgs


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


def test_unknown_options_are_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="max_model_length; did you mean max_model_len"):
        EngineArgs("some/model", max_model_length=5)
    with pytest.raises(ValueError, match="max_num_seqs: must be at least 1"):
        AsyncEngineArgs(max_num_seqs=0)
    with pytest.raises(AttributeError, match="no option max_model_length"):
        _ = EngineArgs().max_model_length
