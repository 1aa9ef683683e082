"""`facet kernels compile`: makes the kernels of a model ahead of its start and without a card."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import get_args

from models.checkpoint.hub import HubError, resolve
from models.config import read_config
from models.parallel.experts import Transport, check_experts
from models.parallel.rank_shares import check_cut
from server.options.option_table import OptionError
from server.terminal.console import parser_of

CAPABILITIES = (80, 86, 87, 89, 90, 100, 103, 120, 121)
"""The compute capabilities whose shared memory is known, as whole numbers: 90 for 9.0."""
_COUNTS = {"--tensor-parallel-size": "-tp", "--pipeline-parallel-size": "-pp", "--data-parallel-size": "-dp"}
"""The options that are numbers of ranks, stages and replicas, and their short forms."""
_DTYPES = ("bfloat16", "float16", "float32")
_CHOICES = {
    "--dtype": ("auto", *_DTYPES),
    "--kv-cache-dtype": ("auto", *_DTYPES, "fp8", "fp8_e4m3", "fp8_e5m2"),
    "--quantization": ("none", "fp8"),
    "--all2all-backend": get_args(Transport),
}
"""The options that are one of several words, of which the first is the default."""


def run(arguments: Sequence[str], command: str) -> int:
    """Starts a process that compiles, and returns its exit code. It needs Triton, and no card."""
    given = _parser(command).parse_args(arguments)
    counts = {flag: getattr(given, flag[2:].replace("-", "_")) for flag in _COUNTS}
    for flag, value in counts.items():
        if value < 1:
            raise OptionError(f"{flag} is {value}, but must be at least 1")
    if find_spec("triton") is None:
        raise OptionError("Triton is not installed: it comes with torch for CUDA, or by pip install triton")
    _check_cache(given.kv_cache_dtype, given.capabilities)
    ranks, stages, replicas = counts.values()
    try:
        folder = resolve(given.model, None, None, lambda part: None, load_format="dummy")
        model = read_config(folder)
        check_cut(model, ranks, stages)
        if given.enable_expert_parallel:
            check_experts(model, ranks * replicas)
    except (HubError, ValueError) as error:
        raise OptionError(str(error)) from None
    program = [sys.executable, "-P", "-m", "worker.kernels.cuda.compiling.command"]
    return subprocess.run([*program, json.dumps({**vars(given), "folder": str(folder)})]).returncode


def _parser(command: str) -> argparse.ArgumentParser:
    does = "Compile a model's CUDA kernels ahead of its start."
    parser = parser_of(command, does, "compile MODEL [options]")
    parser.add_argument("action", choices=("compile",))
    parser.add_argument("model", metavar="MODEL", help="A folder or a hub id, of which the config is read.")
    parser.add_argument(
        "--capability",
        dest="capabilities",
        nargs="+",
        type=_capability,
        required=True,
        metavar="N",
        help="Compute capabilities of the cards, such as 9.0.",
    )
    for flag, words in _CHOICES.items():
        parser.add_argument(flag, choices=words, default=words[0], help=f"As for serve ({words[0]}).")
    for flag, default in (("--block-size", 64), ("--max-lora-rank", 16)):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"As for serve ({default}).")
    for flag, short in _COUNTS.items():
        parser.add_argument(flag, short, type=int, default=1, metavar="N", help="As for serve (1).")
    for flag in ("--enable-expert-parallel", "--enable-lora"):
        parser.add_argument(flag, action="store_true", help="As for serve.")
    return parser


def _capability(text: str) -> int:
    """9.0, 90 and sm_90 mean 90."""
    digits = text.removeprefix("sm_").replace(".", "")
    number = int(digits) if digits.isdecimal() else 0
    if number not in CAPABILITIES:
        known = ", ".join(f"{each // 10}.{each % 10}" for each in CAPABILITIES)
        raise argparse.ArgumentTypeError(
            f"{text!r} is no compute capability that is known: there are {known}"
        )
    return number


def _check_cache(asked: str, capabilities: Sequence[int]) -> None:
    older = [f"{each // 10}.{each % 10}" for each in capabilities if each < 89]
    if asked in ("fp8", "fp8_e4m3") and older:
        raise OptionError(
            f"--kv-cache-dtype {asked} needs compute capability 8.9, and {older[0]} was asked for: pass "
            "fp8_e5m2, or leave it out"
        )
