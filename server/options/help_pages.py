"""Writes what `serve --help` prints: the options that most people use, all, or those of a group."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from textwrap import wrap

from server.options.option_parsing import Option, OptionError, argparse_form

EVERYDAY = (
    *("host", "port", "api_key", "served_model_name", "models", "memory"),
    *("device", "dtype", "quantization", "max_model_len", "kv_cache_memory_bytes", "gpu_memory_utilization"),
    *("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "cpu_threads"),
    *("chat_template", "lora_modules", "speculative_config", "tasks"),
)
"""The fields of the options that `--help` alone shows, in this order."""
_CLAUSE_END = re.compile(r"[.;:](?:\s|$)")
_COLUMN, _WIDTH = 34, 110


def asked_help(arguments: Sequence[str]) -> str | None:
    """Returns what a command line asks help for: "" for nothing in particular; None if it asks for none."""
    for argument in arguments:
        name, _, word = argument.partition("=")
        if name in ("--help", "-h"):
            return word
    return None


def help_page(parser: argparse.ArgumentParser, options: Sequence[Option], word: str) -> str:
    """Returns the page for `--help=word`. Raises OptionError if there is nothing of that name."""
    if word.lower() == "all":
        return parser.format_help()
    groups = list(dict.fromkeys(option.doc.group for option in options))
    if word:
        chosen = _named(options, word)
        if not chosen:
            names = ", ".join(group.split()[0].lower() for group in groups)
            raise OptionError(
                f"--help={word}: no group or option has that name; write --help=all, or of groups {names}"
            )
    else:
        by_field = {option.field: option for option in options}
        chosen = [by_field[field] for field in EVERYDAY]
    lines = [f"usage: {parser.prog} [MODEL...] [options]", ""]
    if not word:
        lines += _row("MODEL", "Folder, hub id, GGUF file; or demo, which is built in.")
    for option in chosen:
        lines += _row(_written(option), _about(option, whole=bool(word)))
    if not word:
        lines += ["", *wrap(_more(groups, len(options)), _WIDTH)]
    return "\n".join([*lines, ""])


def _named(options: Sequence[Option], word: str) -> list[Option]:
    """The options of the group with this word in its name, or those with the word in theirs."""
    words = set(word.lower().replace("-", " ").replace("_", " ").split())
    of_group = [option for option in options if words <= set(option.doc.group.lower().split())]
    name = word.lstrip("-").replace("-", "_")
    return of_group or [option for option in options if name in option.field]


def _written(option: Option) -> str:
    if option.is_switch:
        return f"{option.flag}, --no-{option.flag[2:]}"
    metavar = argparse_form(option).get("metavar", "")
    value = "|".join(option.doc.choices) if option.doc.choices and len(option.doc.choices) < 4 else metavar
    return f"{', '.join(reversed(option.flags))} {value if len(value) < 16 else 'NAME'}".strip()


def _about(option: Option, *, whole: bool) -> str:
    """What the option is; its first words alone unless `whole`."""
    text = option.text if whole else _CLAUSE_END.split(option.text)[0] + "."
    return f"{text} (default: {option.written_default})" if option.written_default else text


def _row(flag: str, text: str) -> list[str]:
    lines = wrap(text, _WIDTH - _COLUMN)
    if len(flag) + 3 > _COLUMN:
        return [f"  {flag}", *(" " * _COLUMN + line for line in lines)]
    return [f"  {flag:<{_COLUMN - 2}}{lines[0]}", *(" " * _COLUMN + line for line in lines[1:])]


def _more(groups: Sequence[str], count: int) -> str:
    names = ", ".join(group.split()[0].lower() for group in groups)
    return (
        f"--help=all shows all {count} options, --help=GROUP those of a group ({names}), --help=NAME those "
        "with NAME in theirs. Every option can also be set by a variable, FACET_MAX_MODEL_LEN for "
        "--max-model-len, or in the file of --config; the command line wins over variables, and those over "
        "the file."
    )
