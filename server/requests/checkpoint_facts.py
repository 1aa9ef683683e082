"""Reads the tokenizer and the facts of a checkpoint, once the engine knows its folder."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from engine_core.protocol import Ready
from engine_core.resolve_checkpoint import find_checkpoint
from models.checkpoint.hub import resolve
from models.config import ConfigError, ModelConfig, read_config
from models.pooling.config import JINA_RANKING, PoolingConfig, read_pooling
from server.model_facts import GENERATE, Facts, SourceFacts, score_type
from server.options.server_flags import ServerConfig
from server.output_parsing.format_detection import describe_format
from server.output_parsing.parser_plugins import load_parsers
from server.requests.decisions import read_temperatures
from server.requests.generation_config import read_defaults, read_generation_config
from server.requests.vectors import read_ranges
from server.text.tokenizer import Tokenizer
from server.text.tokenizer_files import TokenizerFiles, template_text
from worker.host.machine import cache_folder

_log = logging.getLogger(__name__)

QWEN3_RERANKER = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ instruction or 'Given a web search query, retrieve relevant passages that answer the query' }}
<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}
<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ '' }}"""
"""The template that Qwen3-Reranker was published with. The last expression keeps Jinja from dropping the line
break before it."""

JINA_RERANKER = """\
**Document**:
{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}
**Query**:
{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"""
"""How the code of jina-reranker-m0 writes a pair, ahead of the token by which it is scored."""


def find_folder(config: ServerConfig) -> Path:
    """The folder of the checkpoint's small files, on a machine that runs no engine."""
    return find_checkpoint(config.engine, lambda _: None, weights=False)


def tokenizer_folder(config: ServerConfig, folder: Path) -> Path:
    """The folder of the checkpoint's own tokenizer, or of the one of --tokenizer."""
    revision = config.tokenizer_revision
    if config.tokenizer is None and revision is None:
        return folder
    name = config.tokenizer or config.engine.model
    return resolve(name, revision, config.engine.download_dir, lambda _: None, "dummy")


def tokenizer_files(config: ServerConfig, folder: Path) -> TokenizerFiles:
    """Finds the tokenizer of a checkpoint, which is downloaded if it is another's."""
    skipped = config.skip_tokenizer_init
    return TokenizerFiles(
        str(folder if skipped else tokenizer_folder(config, folder)),
        str(cache_folder()),
        config.chat_template,
        config.chat_template_content_format,
        config.engine.worker.trust_remote_code,
        skipped,
        config.special_tokens_in_messages,
    )


async def load_tokenizer(source: TokenizerFiles, config: ServerConfig) -> Tokenizer:
    """Loads a tokenizer in a thread, and logs how the answers of its model will be read."""
    found: list[Tokenizer] = []  # the futures that tell of a result are a circle, which would keep it
    await asyncio.to_thread(lambda: found.append(_load_tokenizer(source, config)))
    return found.pop()


def _load_tokenizer(source: TokenizerFiles, config: ServerConfig) -> Tokenizer:
    load_parsers(config.plugins.parsers)
    tokenizer = source.load()
    for fault in tokenizer.chat.faults:
        _log.warning("%s", fault)
    _log.info(describe_format(tokenizer, config.tool_call_parser, config.reasoning_parser))
    return tokenizer


def open_transformers_tokenizer(config: ServerConfig, folder: Path) -> Any:
    """Loads the checkpoint's tokenizer, or the one of the option `tokenizer`, by AutoTokenizer."""
    transformers = import_module("transformers")  # by name: it brings torch, which the server never imports
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        tokenizer_folder(config, folder),
        trust_remote_code=config.engine.worker.trust_remote_code,
        local_files_only=True,
    )
    if config.chat_template is not None:
        tokenizer.chat_template = template_text(config.chat_template)
    return tokenizer


def find_facts(config: ServerConfig, ready: Ready, folder: Path, tokenizer: Tokenizer) -> Facts:
    """Collects the facts. `folder` is the checkpoint's on this machine."""
    model = read_config(folder, config.engine.hf_overrides)
    if tokenizer.largest_id >= ready.vocab_size:
        _log.warning(
            "the tokenizer has ids up to %d, but the model only %d tokens: texts with larger ids are refused",
            tokenizer.largest_id,
            ready.vocab_size,
        )
    ends = [id for id in (tokenizer.eos_id, *model.eos_token_ids) if id is not None and id < ready.vocab_size]
    tasks = ready.worker.tasks
    pools = set(tasks) != {GENERATE}
    pooling = read_pooling(folder, model, config.engine.pooler_config) if pools else PoolingConfig()
    max_text_len = _max_text_len(config, ready, pooling)
    defaults = read_defaults(
        folder, config.engine.model, config.generation_config, config.override_generation_config
    )
    if GENERATE in tasks:
        _log.info("sampling defaults: %s", defaults)
    return Facts(
        model_names=config.model_names,
        root=config.root,
        created=int(time.time()),
        ready=ready,
        max_model_len=ready.worker.max_model_len if GENERATE in tasks else max_text_len,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        defaults=defaults.values,
        limits=defaults.limits,
        max_logprobs=config.max_logprobs,
        logprobs_mode=config.logprobs_mode,
        max_text_len=max_text_len,
        pooling=pooling,
        default_prompt_name=_default_prompt_name(config, pooling),
        score_type=score_type(tasks, pooling),
        score_template=_score_template(tokenizer, model, pooling),
        sources=_sources(config, ready, folder, model),
        int8_ranges=() if config.vectors.int8_ranges is None else _ranges(config.vectors.int8_ranges, ready),
        temperatures=_temperatures(config),
    )


def _temperatures(config: ServerConfig) -> dict[str, float]:
    if (file := config.decisions.calibration) is None:
        return {}
    return dict(read_temperatures(Path(file).expanduser()).items())


def _sources(config: ServerConfig, ready: Ready, folder: Path, model: ModelConfig) -> SourceFacts | None:
    if ready.worker.source_kind != "tokens":
        return None
    given = read_generation_config(folder, config.generation_config, config.override_generation_config)
    return read_source_facts(ready.worker.source_len, {**model.raw, **given})


def _max_text_len(config: ServerConfig, ready: Ready, pooling: PoolingConfig) -> int:
    """The longest text to pool: the limit of a sentence encoder, unless the operator has set one."""
    limit, longest = pooling.texts.max_len, ready.worker.max_model_len
    return longest if limit is None or config.engine.worker.max_model_len is not None else min(limit, longest)


def _ranges(file: str, ready: Ready) -> tuple[tuple[float, ...], ...]:
    ranges, widths = read_ranges(Path(file).expanduser()), ready.worker.widths
    if ranges.shape[1] not in (widths.get("embed"), widths.get("token_embed")):
        raise ConfigError(
            f"--int8-ranges: {file} has ranges for {ranges.shape[1]} numbers, and the model's vectors have "
            f"{widths.get('embed', widths.get('token_embed', 'none'))}"
        )
    return tuple(map(tuple, ranges.tolist()))


def _default_prompt_name(config: ServerConfig, pooling: PoolingConfig) -> str | None:
    name, prompts = config.vectors.default_prompt_name, pooling.texts.prompts
    if name is None:
        return pooling.texts.default_prompt_name
    if name not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        raise ConfigError(f"--default-prompt-name: the model has no prompt named {name!r}. It has: {known}")
    return name


def _score_template(tokenizer: Tokenizer, model: ModelConfig, pooling: PoolingConfig) -> str | None:
    if tokenizer.chat.writes_pairs:
        return "default"
    if model.architecture == JINA_RANKING:
        return JINA_RERANKER
    # Qwen3-Reranker comes with the chat template of the model that it was made of.
    is_qwen3_reranker = pooling.two_way and any(name.startswith("Qwen3") for name in model.architectures)
    return QWEN3_RERANKER if is_qwen3_reranker else None


def read_source_facts(longest: int, fields: Mapping[str, object]) -> SourceFacts:
    """Finds how answers begin. `fields`: of config.json, below those of generation_config.json."""
    start = _ids(fields, "decoder_start_token_id") or _ids(fields, "bos_token_id")
    if not start:
        raise ConfigError(
            "neither config.json nor generation_config.json has 'decoder_start_token_id', with which answers "
            "begin: say it with --override-generation-config '{\"decoder_start_token_id\": 2}'"
        )
    banned = fields.get("bad_words_ids")
    words = cast("list[object]", banned) if isinstance(banned, list) else []
    alone = [word[0] for word in words if isinstance(word, list) and len(cast("list[object]", word)) == 1]
    never = (*_ids({"bad_words_ids": alone}, "bad_words_ids"), *_ids(fields, "suppress_tokens"))
    return SourceFacts(longest, (*start[:1], *_ids(fields, "forced_bos_token_id")[:1]), never)


def _ids(fields: Mapping[str, object], name: str) -> tuple[int, ...]:
    """The ids of a field that has one, or a list of them, or nothing."""
    value = fields.get(name)
    ids = cast("list[object]", value) if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise ConfigError(f"generation config: {name} must be a token id, or a list of them, got {value!r}")
    return tuple(cast("list[int]", ids))
