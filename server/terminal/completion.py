"""`facet completion`: a script that has a shell complete commands, their words and their flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO

from models.checkpoint.hub import SHORT_NAMES
from server.options.parse_server_options import OPTIONS
from server.terminal.command_table import TERMINAL
from server.terminal.console import parser_of
from server.terminal.launch import AGENTS

_SHELLS = ("bash", "zsh", "fish")
_WORDS = {
    "serve": SHORT_NAMES,
    "run": SHORT_NAMES,
    "embed": SHORT_NAMES,
    "pull": SHORT_NAMES,
    "bench": ("serve",),
    "launch": tuple(AGENTS),
    "keys": ("add", "list", "remove"),
    "completion": _SHELLS,
}
"""Words that may follow a command."""
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_BASH = """_facet() {{
    local found
    if [ "$COMP_CWORD" = 1 ]; then found="{names}"; else case "${{COMP_WORDS[1]}}" in
{cases}
    esac; fi
    COMPREPLY=($(compgen -W "$found" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _facet facet"""


def run(arguments: Sequence[str], command: str) -> int:
    """Prints the script for the shell that is named."""
    parser = parser_of(
        command,
        'Print what has a shell complete commands. Write eval "$(facet completion bash)" into ~/.bashrc, the '
        "same with zsh into ~/.zshrc, or facet completion fish | source into fish's config.",
        "bash|zsh|fish",
    )
    parser.add_argument("shell", choices=_SHELLS)
    shell = parser.parse_args(arguments).shell
    words = {name: _words(name) for name in ("serve", "bench", "version", *TERMINAL)}
    print(_fish(words) if shell == "fish" else _bash(words, is_zsh=shell == "zsh"))
    return 0


def _words(name: str) -> list[str]:
    """What may follow a command: words, and the flags that its help names."""
    serves = name in ("serve", "run", "embed")
    flags = ["--config", "--help", *(option.flag for option in OPTIONS)] if serves else []
    if name in TERMINAL:
        page = StringIO()
        with redirect_stdout(page), suppress(SystemExit):
            import_module(TERMINAL[name]).run(["--help"], f"facet {name}")
        flags += _FLAG.findall(page.getvalue())
    return [*_WORDS.get(name, ()), *dict.fromkeys(flags)]


def _bash(words: dict[str, list[str]], *, is_zsh: bool) -> str:
    cases = (f'        {name}) found="{" ".join(found)}" ;;' for name, found in words.items())
    script = _BASH.format(names=" ".join(words), cases="\n".join(cases))
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if is_zsh else script


def _fish(words: dict[str, list[str]]) -> str:
    lines = [f"complete -c facet -n __fish_use_subcommand -a '{' '.join(words)}'"]
    for name, found in words.items():
        after = f"complete -c facet -n '__fish_seen_subcommand_from {name}' -a"
        lines.append(f"{after} '{' '.join(found)}'")
    return "\n".join(lines)
