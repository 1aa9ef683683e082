"""Options as objects, for programs that build them in one place and use them in another."""

from __future__ import annotations

from typing import Any

from server.options.server_options import OPTIONS, from_python

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
