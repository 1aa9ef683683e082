"""What the server side reads from a checkpoint, once the engine knows where it lies: tokenizer, and facts."""

from __future__ import annotations

import time
from pathlib import Path

from engine_core.protocol import Ready
from models.config import read_config
from models.hub import resolve
from server.config import ServerConfig
from server.facts import Facts, read_defaults
from server.tokenizer import Tokenizer, load_tokenizer


def open_tokenizer(config: ServerConfig, folder: Path) -> Tokenizer:
    """The checkpoint's own, or the one of --tokenizer."""
    if config.tokenizer is not None:
        folder = resolve(config.tokenizer, None, config.engine.download_dir, lambda _: None, "dummy")
    return load_tokenizer(
        folder,
        chat_template=config.chat_template,
        content_format=config.chat_template_content_format,
        trust_remote_code=config.engine.trust_remote_code,
        cache=config.cache_folder,
    )


def find_facts(config: ServerConfig, ready: Ready, tokenizer: Tokenizer) -> Facts:
    folder = Path(ready.folder)
    model = read_config(folder, config.engine.hf_overrides)
    ends = [id for id in (tokenizer.eos_id, *model.eos_token_ids) if id is not None]
    return Facts(
        model_names=config.model_names,
        root=config.engine.model,
        created=int(time.time()),
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        defaults=read_defaults(folder, config.generation_config, config.override_generation_config),
        max_logprobs=config.max_logprobs,
        max_num_seqs=ready.max_num_seqs,
        enable_prefix_caching=ready.enable_prefix_caching,
        scheduling_policy=ready.scheduling_policy,
    )
