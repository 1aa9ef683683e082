"""The facts of a small model that pools, as a server has them, and the tokenizer of a small encoder."""

from __future__ import annotations

from functools import cache
from typing import Any

import tokenizers
import zoo
from model_facts import READY, changed
from tokenizers.processors import BertProcessing

from server.model_facts import Facts
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer


def facts(**fields: Any) -> Facts:
    base = Facts(model_names=("m",), root="m", created=0, ready=READY, max_model_len=2000, eos_token_ids=())
    tasks = ("embed", "token_embed")
    known = {"max_text_len": 20, "vocab_size": 500, "tasks": tasks, "widths": dict.fromkeys(tasks, 32)}
    return changed(base, **{**known, **fields})


def raw_bert() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(_bert())


@cache  # training it twice does not give the same tokens
def _bert() -> str:
    raw = zoo.wordpiece()
    raw.add_special_tokens(["[CLS]", "[SEP]"])
    raw.post_processor = BertProcessing(
        ("[SEP]", raw.token_to_id("[SEP]")), ("[CLS]", raw.token_to_id("[CLS]"))
    )
    return raw.to_str()


def bert() -> Tokenizer:
    return Tokenizer(raw_bert(), ChatTemplate({}, {}))
