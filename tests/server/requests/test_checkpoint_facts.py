"""Facts of a model that pools, from the engine's message and the checkpoint's files."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from model_facts import READY, changed

from models.config import ConfigError
from server.model_facts import Facts
from server.options.parse_server_options import parse
from server.requests.checkpoint_facts import (
    QWEN3_RERANKER,
    find_facts,
    load_tokenizer,
    tokenizer_files,
)


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def config(folder: Path, **fields: object) -> None:
    write(folder, "config.json", {**json.loads((folder / "config.json").read_text()), **fields})


def find(folder: Path, *flags: str, tasks: tuple[str, ...] = ("embed", "token_embed"), **said: Any) -> Facts:
    ready = changed(READY, tasks=tasks, widths=dict.fromkeys(tasks, 8), **said)
    options = parse([str(folder), *flags], {})
    return find_facts(options, ready, folder, tokenizer_files(options, folder).load())


def test_a_sentence_encoder_may_read_less_than_its_window(folder: Path) -> None:
    write(folder, "sentence_bert_config.json", {"max_seq_length": 32, "do_lower_case": True})
    facts = find(folder)
    assert (facts.max_model_len, facts.max_text_len) == (32, 32)
    assert facts.pooling.texts.lower_case
    assert find(folder, "--max-model-len", "64", max_model_len=64).max_text_len == 64
    both = find(folder, tasks=("generate", "embed"))
    assert (both.max_model_len, both.max_text_len) == (100, 32)


def test_a_folder_is_called_by_its_last_part(folder: Path) -> None:
    facts = find(folder)
    assert (facts.model_names, facts.root) == ((folder.name,), folder.name)
    assert find(folder, "--show-root", "--served-model-name", "m").root == str(folder)


def test_prompts(folder: Path) -> None:
    write(
        folder,
        "config_sentence_transformers.json",
        {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "document"},
    )
    assert find(folder).default_prompt_name == "document"
    assert find(folder, "--default-prompt-name", "query").default_prompt_name == "query"
    with pytest.raises(ConfigError, match=r"no prompt named 'poem'\. It has: 'query', 'document'"):
        find(folder, "--default-prompt-name", "poem")


def test_kinds_of_scores(folder: Path) -> None:
    assert find(folder).score_type == "bi-encoder"
    assert find(folder, tasks=("token_embed",)).score_type == "late-interaction"
    assert find(folder, "--pooler-config", '{"task": "token_embed"}').score_type == "late-interaction"
    assert find(folder, tasks=("classify",)).score_type is None
    config(folder, id2label={"0": "relevant"}, num_labels=1)
    facts = find(folder, tasks=("classify",))
    assert (facts.score_type, facts.score_template) == ("cross-encoder", None)
    assert facts.pooling.labels == ("relevant",)


def test_score_templates(folder: Path) -> None:
    config(
        folder,
        architectures=["Qwen3ForCausalLM"],
        is_original_qwen3_reranker=True,
        classifier_from_token=[3, 4],
    )
    facts = find(folder, tasks=("classify",))
    assert (facts.score_type, facts.score_template) == ("cross-encoder", QWEN3_RERANKER)
    template = "{% for m in messages if m.role in ['query', 'document'] %}{{ m.content }}{% endfor %}"
    facts = find(folder, "--chat-template", template, tasks=("classify",))
    assert facts.score_template == "default"


def test_a_model_that_only_generates_has_no_files_read_for_pooling(folder: Path) -> None:
    write(folder, "modules.json", {"not": "modules"})
    assert find(folder, tasks=("generate",)).max_text_len == 100
    with pytest.raises(ConfigError, match=r"modules\.json"):
        find(folder)


def test_ids_beyond_the_vocabulary_end_no_text(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An engine would refuse every request that names them. The tokenizer's other ids are warned of."""
    with caplog.at_level(logging.WARNING, "server"):
        facts = find(folder, tasks=("generate",))
    assert facts.eos_token_ids and caplog.messages == []
    largest = max(facts.eos_token_ids)
    options = parse([str(folder)], {})
    few = changed(READY, vocab_size=largest)
    with caplog.at_level(logging.WARNING, "server"):
        found = find_facts(options, few, folder, tokenizer_files(options, folder).load())
    assert largest not in found.eos_token_ids
    (line,) = caplog.messages
    assert f"but the model only {largest} tokens: texts with larger ids are refused" in line


async def test_a_broken_template_is_told_at_the_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }")
    options = parse([str(folder)], {})
    with caplog.at_level(logging.WARNING, "server"):
        await load_tokenizer(tokenizer_files(options, folder), options)
    assert any("chat template 'default' is not valid Jinja" in message for message in caplog.messages)
