"""Reads and checks the options of a server, from the command line, variables, a file and keywords: the only
reader of the environment but for what the system says there (`worker.host.machine`).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from server.options.adapter_options import AdapterOptions
from server.options.foreign_options import LLAMA_FLAGS, VLLM_FLAGS, read_variables
from server.options.help_pages import asked_help, help_page
from server.options.model_list import GivenModel, ModelEntry, check_models, numbered, read_models
from server.options.model_name import shown_name
from server.options.option_checks import check
from server.options.option_parsing import (
    ATTACHED,
    Option,
    OptionError,
    VllmFlag,
    argparse_form,
    assemble,
    build_parser,
    canonical,
    options_of,
    undotted,
)
from server.options.option_sources import from_environment, from_file, from_keywords
from server.options.server_flags import ServerConfig
from server.options.shorthands import Shorthands, expand
from worker.option_groups import GROUPS

PREFIX = "FACET_"
FILE = f"{PREFIX}CONFIG"
"""The variable that names the file of --config."""


OPTIONS: list[Option] = sorted(
    [*options_of(ServerConfig), *options_of(Shorthands)], key=lambda option: GROUPS.index(option.doc.group)
)
"""Every option, for the parsers below and for the reference page."""


_EPILOG = (
    f"Every option can also be set by a variable, {PREFIX}MAX_MODEL_LEN for --max-model-len, or in the file "
    "of --config; the command line wins over variables, and those over the file."
)


class Given(NamedTuple):
    """The options that a command line, variables and a file give a server."""

    values: dict[str, object]
    tags: list[str]
    """The models that are named without a flag."""
    typed: Mapping[str, str] = {}
    """Options by their flags, of which the command line has another name."""

    @property
    def has_several(self) -> bool:
        return len(self.tags) > 1 or self.values.get("models") is not None

    def config(self) -> ServerConfig:
        """The configuration of a server of one model. Raises OptionError."""
        with _in_words_of(self.typed):
            return self._config()

    def _config(self) -> ServerConfig:
        if self.has_several:
            raise OptionError("several models are for `serve` alone: name one")
        if self.values.get("memory") is not None:
            raise OptionError(
                "--memory is shared by several models: name them, or see --kv-cache-memory-bytes"
            )
        values = dict(self.values)
        _set_model(values, self.tags[0] if self.tags else None)
        return _build(values)

    def read_models(self, known: Sequence[ModelEntry] = ()) -> list[ModelEntry]:
        """The models of a server of several. Those among `known` that have not changed keep their ids.

        Raises OptionError if any of them cannot be served.
        """
        if self.values.get("lora_modules"):
            raise OptionError("--lora-modules are those of one model: give them in a file of --models")
        if self.values.get("served_model_name"):
            raise OptionError("--served-model-name is for one model: give names in a file of --models")
        file, ignored = self.values.get("models"), list[VllmFlag]()
        if file is not None and (self.tags or "model" in self.values):
            raise OptionError("--models names all models of the server: leave out the others")
        given = [GivenModel({"model": tag}) for tag in self.tags]
        given += read_models(Path(str(file)), OPTIONS, VLLM_FLAGS, ignored) if file is not None else []
        found: list[ModelEntry] = []
        for model in given:
            name = model.name or shown_name(str(model.values["model"]))
            with _in_words_of(self.typed):
                config = _build({**self.values, **model.values, "served_model_name": [name]})
            found.append(ModelEntry(name=name, config=config, aliases=model.aliases))
        check_models(found)
        return numbered(found, known)


def parse(
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    command: str = "serve",
    notes: list[str] | None = None,
) -> ServerConfig:
    """Read the options of a server of one model. Raises OptionError; --help prints and exits.

    `notes` gets sentences on what was given and changes nothing.
    """
    return read(arguments, environ, command=command, notes=notes).config()


def read(
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    command: str = "serve",
    notes: list[str] | None = None,
) -> Given:
    """Read the command line, variables and the file. Raises OptionError; --help prints and exits."""
    notes = [] if notes is None else notes
    _load_plugins(environ)
    without_effect: list[VllmFlag] = []
    others = [*VLLM_FLAGS, *LLAMA_FLAGS]
    parser = build_parser(command, OPTIONS, others, _EPILOG)
    parser.add_argument("model_tags", nargs="*", metavar="MODEL", help="Folder, hub id, GGUF file; or demo.")
    parser.add_argument("--config", metavar="FILE", help="YAML file of options.")
    if (asked := asked_help(arguments)) is not None:
        print(help_page(parser, OPTIONS, asked), end="")
        sys.exit(0)
    words = canonical(undotted(arguments, [*OPTIONS, *others]), parser)
    typed = _typed_names(words)
    with _in_words_of(typed):
        given = vars(parser.parse_intermixed_args(words))
    for other in others:
        if other.flag in given:
            other.take(given.pop(other.flag), without_effect)
    tags, file = given.pop("model_tags", []), given.pop("config", environ.get(FILE))
    values = {
        **(from_file(OPTIONS, VLLM_FLAGS, Path(file), without_effect) if file else {}),
        **from_environment(OPTIONS, environ, PREFIX, others=(FILE,)),
        **{
            option.field: option.value(given[option.field], typed.get(option.flag, option.flag))
            for option in OPTIONS
            if option.field in given
        },
    }
    variables = read_variables({option.field: option for option in OPTIONS}, environ, notes)
    if not any(values.get(name) for name in ("enable_lora", "lora_modules", "lora_resolver")):
        variables.pop("lora_resolver", None)  # vLLM's variables let nobody name adapters by themselves
    values = {**variables, **values}
    if len(tags) > 1 and "model" in given:
        tags.append(str(values["model"]))
    elif tags and "model" in given and tags[0] != values["model"]:
        notes.append(f"{tags[0]} is served: the model without a flag wins over --model {values['model']}")
    if without_effect:
        flags = ", ".join(dict.fromkeys(other.flag for other in without_effect))
        notes.append(f"these flags change nothing here: {flags} (docs/options.md lists all of them)")
    return Given(values, tags, typed)


def from_python(keywords: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> ServerConfig:
    """Read keyword options, such as max_model_len="32k", as flags are read.

    Of the variables only that of the cluster's key counts, as a secret should not stand in a program, those
    that say which of several programs this is, and that of installed plug-ins. A struct of fields, such as a
    PoolerConfig, is a JSON object. Raises OptionError, which names options as keywords.
    """
    _load_plugins(environ)
    keywords = {name: _as_object(given) for name, given in keywords.items()}
    try:
        key = {name: text for name, text in environ.items() if name == f"{PREFIX}CLUSTER_KEY"}
        ranked = [name for name in ("RANK", "SIZE") if f"VLLM_DP_{name}" in environ]
        key |= {f"{PREFIX}DATA_PARALLEL_{name}": environ[f"VLLM_DP_{name}"] for name in ranked}
        values = from_environment(OPTIONS, key, PREFIX) | from_keywords(OPTIONS, VLLM_FLAGS, keywords)
        _set_model(values, None)
        config = _build(values)
        if config.adapters != AdapterOptions():
            raise OptionError("adapters of programs are named by their calls: lora_request=LoRARequest(...)")
        return config
    except OptionError as error:
        text = str(error).replace(f"{PREFIX}DATA_PARALLEL_", "VLLM_DP_")
        raise OptionError(_FLAG.sub(lambda flag: flag[1].replace("-", "_"), text)) from error


def program_config(model: str | ServerConfig, options: Mapping[str, object]) -> ServerConfig:
    """The configuration that a program gives, or what the options say of the model that it names."""
    if not isinstance(model, ServerConfig):
        return from_python({"model": model, **options})
    if options:
        raise TypeError(f"a configuration has all options in it: {next(iter(options))} is one more")
    return model


def _as_object(given: object) -> object:
    """The fields of a struct that differ from its defaults, or the value itself."""
    if not isinstance(given, msgspec.Struct):
        return given
    fields = {field.name: field.default for field in msgspec.structs.fields(given)}
    return {name: value for name, default in fields.items() if (value := getattr(given, name)) != default}


_FLAG = re.compile(r"(?<!\S)--([a-z][a-z-]+)")


def _typed_names(words: Sequence[str]) -> dict[str, str]:
    flags = {name: option.flag for option in OPTIONS for name in option.flags}
    attached = {word: found[1] for word in words if (found := ATTACHED.fullmatch(word))}
    names = [attached.get(word, word.partition("=")[0]) for word in words]
    return {flags[name]: name for name in names if name in flags}


@contextmanager
def _in_words_of(typed: Mapping[str, str]) -> Iterator[None]:
    """Has errors name flags as the command line does."""
    try:
        yield
    except OptionError as error:
        raise OptionError(_FLAG.sub(lambda flag: typed.get(flag[0], flag[0]), str(error))) from error


def _load_plugins(environ: Mapping[str, str]) -> None:
    names = environ.get("VLLM_PLUGINS", "").split(",")
    if others := [name for name in names if name.strip()]:
        from models.plugins import load_general_plugins  # few have some

        load_general_plugins(",".join(others))


def _set_model(values: dict[str, object], tag: str | None) -> None:
    if tag is not None:
        values["model"] = tag
    values.setdefault("model", "demo")


def _build(values: dict[str, object]) -> ServerConfig:
    if (model := str(values["model"])).lower() in ("true", "false"):  # behind a switch
        raise OptionError(f"{model} is no model: switches have no value, and --no- before one turns it off")
    expand(values)
    config = assemble(ServerConfig, values)
    if config.adapters.need_adapters:
        config = assemble(ServerConfig, {**values, "enable_lora": True})
    check(config)
    if not config.media.takes_any:
        config = assemble(ServerConfig, {**values, "language_model_only": True})
    return config


_DEFAULTS = {
    option.field: None if option.default is msgspec.NODEFAULT else option.default for option in OPTIONS
}


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

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds the options of `serve` to a program's own parser, for `from_cli_args`; returns the parser."""
        for option in OPTIONS:
            default = _DEFAULTS[option.field]
            text = option.text.replace("%", "%%")
            parser.add_argument(
                *option.flags, dest=option.field, default=default, help=text, **argparse_form(option)
            )
        for other in VLLM_FLAGS:
            form = {**argparse_form(other), "dest": other.keyword, "default": None}
            parser.add_argument(*other.flags, help=argparse.SUPPRESS, **form)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Reads what a parser with these options has found. Other arguments of the program are passed over.

        Raises ValueError as the constructor does.
        """
        known = {**_DEFAULTS, **{other.keyword: None for other in VLLM_FLAGS}}
        given = {name: value for name, value in vars(args).items() if value != known.get(name, value)}
        return cls(**given)

    def create_engine_config(self, usage_context: object = None) -> ServerConfig:
        """Reads the options into the configuration of an engine. Nothing is told of the usage to anybody."""
        return from_python(self.options())

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


def key_file_of_environment(environ: Mapping[str, str] = os.environ) -> str | None:
    """The file of keys that a server started now would use by its variable."""
    return environ.get(f"{PREFIX}API_KEY_FILE") or None


def client_key_of_environment(environ: Mapping[str, str] = os.environ) -> str | None:
    """The key that commands send to a server, by the same variables as the server's own, or OpenAI's. The
    first may hold several."""
    others = (environ.get(name, "").strip() for name in ("VLLM_API_KEY", "OPENAI_API_KEY"))
    return next(filter(None, [*environ.get(f"{PREFIX}API_KEY", "").split(), *others]), None)


def share_metrics(folder: Path) -> None:
    """Let prometheus_client count for several processes. It reads this variable when first imported."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
