"""Options as objects, for programs that build them in one place and use them in another.

And the tokenizer of transformers, for programs that ask for it; the engine and the server have their own.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from server.options.server_config import ServerConfig
from server.options.server_options import OPTIONS, from_python
from server.requests.checkpoint_facts import tokenizer_folder
from server.text.tokenizer_files import template_text

_DEFAULTS = {option.field: option.default for option in OPTIONS}


class EngineArgs:
    """The options of `serve`, with underscores, as attributes that can be read and changed.

    args = EngineArgs("Qwen/Qwen3-0.6B", max_model_len=4096)
    engine = LLMEngine.from_engine_args(args)
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        """Raises ValueError if an option is unknown or its value is wrong."""
        from_python({"model": model, **options})
        self.model = model
        self.__dict__.update(options)

    def options(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __getattr__(self, name: str) -> Any:
        """Returns the default of an option that was not given."""
        if name not in _DEFAULTS:
            raise AttributeError(f"there is no option {name}")
        return _DEFAULTS[name]

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({given})"


class AsyncEngineArgs(EngineArgs):
    """The same options for `AsyncLLM.from_engine_args`."""


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
