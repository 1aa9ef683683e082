"""The forms of prompts and parameters, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch

from server.errors import BadRequest
from server.grammars.response_format import StructuredOutputsParams
from server.media.inline_files import InlineFiles
from server.offline.prompt_forms import (
    Prompt,
    for_each,
    read_conversations,
    read_params,
    read_prompts,
    read_sides,
)
from server.requests.pooling import PoolingParams
from server.requests.sampling_params import RequestOutputKind, SamplingParams

USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", [Prompt("a")]),
        ("", [Prompt("")]),
        ([1, 2], [Prompt(ids=[1, 2])]),
        ((1, 2), [Prompt(ids=[1, 2])]),
        ([], []),
        ([[1], []], [Prompt(ids=[1]), Prompt(ids=[])]),
        (["a", [1]], [Prompt("a"), Prompt(ids=[1])]),
        ({"prompt": "a"}, [Prompt("a")]),
        ({"prompt_token_ids": [1], "prompt": None, "cache_salt": "s"}, [Prompt(ids=[1], salt="s")]),
        ([{"prompt": "a", "multi_modal_data": None}, "b"], [Prompt("a"), Prompt("b")]),
        ([{"prompt_token_ids": np.array([1, 2])}], [Prompt(ids=[1, 2])]),
        ([{"prompt_token_ids": [np.int64(1)], "prompt": "a"}], [Prompt("a", ids=[1])]),
        ({"prompt_token_ids": []}, [Prompt(ids=[])]),
        (np.array([1, 2]), [Prompt(ids=[1, 2])]),
        (np.array([[1, 2], [3, 4]]), [Prompt(ids=[1, 2]), Prompt(ids=[3, 4])]),
        ([torch.tensor([1, 2]), np.array([3])], [Prompt(ids=[1, 2]), Prompt(ids=[3])]),
    ],
)
def test_forms_of_prompts(given: object, expected: list[Prompt]) -> None:
    assert read_prompts(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "a prompt is a text, a list of token ids, .*; got NoneType None"),
        (3, "got int 3"),
        (b"a", "got bytes"),
        ([1, "a"], "got int 1"),
        ([True], "got bool True"),
        ([["a"]], r"got list \['a'\]"),
        ({}, "got dict {}"),
        ({"prompt_token_ids": "abc"}, "got dict"),
        ({"prompt": [1]}, "a prompt's text is a string; got list"),
        ({"prompt": "a", "text": "b"}, "no field 'text'"),
        (
            {"prompt": "a", "multi_modal_data": {"sound": 1}},
            "multi_modal_data is {'image': ..., 'video': ..., 'audio': ...}",
        ),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": "a"}}, "is a text, in which each has"),
        ({"prompt_token_ids": [1], "token_type_ids": [0]}, "'token_type_ids' is not supported yet"),
        ({"prompt_token_ids": np.array([1.5])}, "got dict"),
        (np.int64(3), "got int 3"),
        ({"prompt": "a", "cache_salt": 3}, "a prompt's cache_salt is a string; got int 3"),
        ({"prompt_embeds": [1.0], "prompt": "a"}, "with prompt_embeds has no text"),
    ],
)
def test_what_is_no_prompt(given: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        read_prompts(given)


def test_texts_to_compare() -> None:
    files = InlineFiles()
    assert read_sides("a", files) == ["a"]
    assert read_sides(["a", {"prompt": "b"}], files) == ["a", "b"]
    text = {"type": "text", "text": "b"}
    seen = [text, {"type": "image_url", "image_url": "inline:0"}]
    parts = [text, {"type": "image", "image": b"a file"}]
    assert read_sides([{"content": "a"}, {"content": parts}], files) == ["a", seen]
    assert read_sides({"content": parts[:1] * 2}, files) == ["b\nb"]
    with pytest.raises(TypeError, match="texts and contents are compared"):
        read_sides([["a"], [1]][1:], files)
    for wrong in ({"content": 3}, {"content": "a", "prompt": "b"}):
        with pytest.raises(TypeError, match=r"compared: .* got dict"):
            read_sides(wrong, files)
    with pytest.raises(BadRequest, match="content"):
        read_sides({"content": [{"type": "text"}]}, files)


def test_conversations() -> None:
    assert read_conversations([USER]) == [[USER]]
    assert read_conversations([[USER], [USER, USER]]) == [[USER], [USER, USER]]
    assert read_conversations([]) == []
    for wrong in ("a", [["a"]], 3):
        with pytest.raises(TypeError, match="a conversation is a list of messages"):
            read_conversations(wrong)


def test_parameters_for_each_prompt() -> None:
    default, one, two = SamplingParams(), SamplingParams(n=1), SamplingParams(n=2)
    given = "sampling_params", SamplingParams
    assert for_each(*given, None, default, 2) == [default, default]
    assert for_each(*given, one, default, 2) == [one, one]
    assert for_each(*given, [one, two], default, 2) == [one, two]
    with pytest.raises(
        ValueError, match="sampling_params: 2 for 3 prompts; give one for all, or one for each"
    ):
        for_each(*given, [one, two], default, 3)
    with pytest.raises(TypeError, match="is one SamplingParams for all prompts, or a list of them; got dict"):
        for_each(*given, {"n": 1}, default, 1)  # pyright: ignore[reportArgumentType]


def test_parameters_have_the_types_that_requests_have() -> None:
    odd: dict[str, Any] = {"max_tokens": np.int64(3), "stop_token_ids": [np.int64(1)], "ignore_eos": None}
    given = SamplingParams(
        **odd,
        logit_bias={"5": 1},  # pyright: ignore[reportArgumentType]
        output_kind=RequestOutputKind.DELTA,
        structured_outputs=StructuredOutputsParams(regex="null"),
        extra_args={"a": [1.5]},
    )
    one, other = read_params([given, given])
    assert one is other and (type(one.max_tokens), one.max_tokens, one.logit_bias) == (int, 3, {5: 1.0})
    assert (one.stop_token_ids, one.ignore_eos, one.output_kind) == ([1], False, RequestOutputKind.DELTA)
    assert (one.structured_outputs, one.extra_args) == (given.structured_outputs, given.extra_args)
    assert read_params([SamplingParams(max_tokens=None)]) == [SamplingParams(max_tokens=None)]
    assert read_params([SamplingParams(logprobs=True)]) == [SamplingParams(logprobs=1)]
    form = StructuredOutputsParams(regex=5)  # pyright: ignore[reportArgumentType]
    wrong: list[tuple[type[Any], dict[str, Any]]] = [
        (SamplingParams, {"seed": 1.5}),
        (SamplingParams, {"stop_token_ids": [1.5]}),
        (SamplingParams, {"structured_outputs": form}),
        (PoolingParams, {"use_activation": "x"}),
    ]
    for kind, fields in wrong:
        with pytest.raises(BadRequest, match="Params: Expected `"):
            read_params([kind(**fields)])
