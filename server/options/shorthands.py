"""Options that stand for others, and older forms of options: what each of them says in today's."""

from __future__ import annotations

from typing import Annotated, cast

import msgspec

from engine_core.config import OLD_TASKS
from server.options.option_parsing import OptionError
from worker.option_groups import MODEL, SCHEDULER, TEXT
from worker.options import OptionDoc


class Shorthands(msgspec.Struct, frozen=True):
    """Options that stand for others."""

    tokenizer_mode: Annotated[str, OptionDoc(TEXT, ("auto", "hf", "slow", "mistral"))] = "auto"
    """mistral reads tekken.json, with --load-format mistral; slow is auto, for there is one kind here."""
    config_format: Annotated[str, OptionDoc(MODEL, ("auto", "hf", "mistral"))] = "auto"
    """mistral reads params.json, with --load-format mistral."""
    async_scheduling: Annotated[bool | None, OptionDoc(SCHEDULER)] = None
    """Plan a step while another runs; the same as --steps-ahead 1, or 0."""
    spec_method: Annotated[str | None, OptionDoc(SCHEDULER)] = None
    """method of --speculative-config: ngram (the default), suffix, draft_model, eagle, eagle3 or mtp."""
    spec_model: Annotated[str | None, OptionDoc(SCHEDULER)] = None
    """model of --speculative-config."""
    spec_tokens: Annotated[int | None, OptionDoc(SCHEDULER)] = None
    """num_speculative_tokens of --speculative-config."""


_MISTRAL = ("tokenizer_mode", "config_format")

_GUESSES = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""Shorthands and the fields of --speculative-config that they give."""


def expand(values: dict[str, object]) -> None:
    """Puts into `values` what those options ask for that stand for others. Raises OptionError."""
    overlap = values.pop("async_scheduling", None)
    if overlap is not None and values.setdefault("steps_ahead", int(bool(overlap))) != int(bool(overlap)):
        raise OptionError("--async-scheduling and --steps-ahead contradict each other; leave out one")
    _add_guesses(values)
    if values.get("load_format") == "bitsandbytes":
        if values.setdefault("quantization", "bitsandbytes") != "bitsandbytes":
            raise OptionError("--load-format bitsandbytes and --quantization contradict each other")
        values["load_format"] = "auto"  # config.json tells; this was a check of it
    asked = [name for name in _MISTRAL if values.pop(name, "auto") == "mistral"]
    if asked and values.setdefault("load_format", "mistral") != "mistral":
        flag = asked[0].replace("_", "-")
        raise OptionError(
            f"--{flag} mistral goes with --load-format mistral, which reads all files in that form"
        )
    if values.get("model_impl") == "vllm":
        values["model_impl"] = "facet"  # the name that vLLM gives its own model code
    if values.get("api_server_count") == 0:
        values.setdefault("headless", True)
    _replace_old_tasks(values)


def _replace_old_tasks(values: dict[str, object]) -> None:
    """Replace the tasks of older versions of vLLM by the options that ask for the same today."""
    tasks = cast("list[str]", values.get("tasks") or [])
    asked = [(name, *option) for name in tasks if name in OLD_TASKS for option in OLD_TASKS[name].items()]
    for name, field, value in asked:
        if values.get(field, "auto") not in ("auto", value):
            raise OptionError(f"--tasks {name} is --{field} {value}, and another is given")
        values[field] = value
    kept = ["embed" if task == "embedding" else task for task in tasks if task not in OLD_TASKS]
    values["tasks"] = list(dict.fromkeys(kept))


def _add_guesses(values: dict[str, object]) -> None:
    """Put the shorthands of --speculative-config into it. Raises OptionError if they contradict it."""
    asked = {
        field: given for name, field in _GUESSES.items() if (given := values.pop(name, None)) is not None
    }
    if not asked:
        return
    known = values.get("speculative_config", {})
    whole: dict[str, object] = {**(known if isinstance(known, dict) else {})}
    for field, given in asked.items():
        if known is None or whole.setdefault(field, given) != given:
            raise OptionError(
                f"--speculative-config and the flag for its {field} contradict each other; leave out one"
            )
    values["speculative_config"] = whole
