"""Prompts that are too long: refused before they are tokenized."""

import pytest
from pooling_facts import bert, facts

from server.errors import BadRequest
from server.requests.prompt_length import check_prompt_characters


def test_a_prompt_too_long_for_any_cut_is_refused_before_it_is_tokenized() -> None:
    tokenizer, ten = bert(), facts(max_model_len=10)
    most = 10 * tokenizer.longest_token
    check_prompt_characters("x" * most, ten, tokenizer)
    with pytest.raises(BadRequest, match=f"contains {most + 1} characters") as caught:
        check_prompt_characters("x" * (most + 1), ten, tokenizer)
    assert caught.value.param == "input_text"
