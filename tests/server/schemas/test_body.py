"""Fields of bodies: nothing that a client sends is silently ignored."""

from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from server.errors import BadRequest
from server.schemas.body import Body
from server.schemas.chat import ChatRequest
from server.schemas.completions import CompletionRequest

TEXT = {"prompt": "a"}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({**TEXT, **fields})


def refusal_of(make: Any, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refused:
        make(**fields)
    return refused.value


def test_many_unknown_fields_make_a_short_error() -> None:
    error = refusal_of(completion, **{f"{'x' * 10_000}{i}": 1 for i in range(1_000)})
    assert "(and 995 more)" in error.message
    assert len(error.message) < 1_000
    assert error.param is not None and len(error.param) < 100


def test_an_unknown_field_with_half_a_surrogate_can_be_told() -> None:
    error = refusal_of(completion, **{"a\ud800": 1})
    error.message.encode()
    (error.param or "").encode()


@pytest.mark.parametrize(
    ("base", "body"),
    [
        (chat_params.CompletionCreateParamsBase, ChatRequest),
        (text_params.CompletionCreateParamsBase, CompletionRequest),
    ],
)
def test_every_field_of_openais_client_is_known(base: Any, body: type[Body]) -> None:
    assert {*base.__annotations__} <= {*body.model_fields, *body.unsupported, *body.meaningless}
