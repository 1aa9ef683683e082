"""Transcripts of real servers: which servers there are, and how a transcript is asked of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from live import LiveServer, serving, wait_until
from tiny import tiny_checkpoint
from transcripts import Case, answer_of, asking, changed, keep, read, request_of

SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", "16M")


def _demo(_: Path) -> list[str]:
    """The built-in model as everybody would serve it."""
    return ["demo", "--dtype", "float32", "--kv-cache-memory-bytes", "256M"]


def _decoder(folder: Path) -> list[str]:
    """A model that generates and embeds, behind a key, with files, batches and what operators may ask."""
    checkpoint = tiny_checkpoint("Qwen3ForCausalLM", folder / "tiny")
    named = [str(checkpoint), "--served-model-name", "tiny", "--tasks", "generate,embed,token_embed"]
    allowed = ["--enable-sleep-mode", "--enable-request-id-headers", "--enable-lora", "--allow-runtime-lora"]
    kept = ["--response-store", "600", "--batch-dir", str(folder / "work"), "--lora-dir", str(folder)]
    return [*named, *SMALL, "--api-key", "sk-test", *allowed, *kept]


def _several(folder: Path) -> list[str]:
    """Models that compare texts, sort them by kinds, and label their tokens."""
    kinds = {str(n): name for n, name in enumerate(("low", "middle", "high"))}
    tiny_checkpoint("BertForSequenceClassification", folder / "models" / "kinds", id2label=kinds)
    tiny_checkpoint("BertForSequenceClassification", folder / "models" / "ranker", num_labels=1)
    tiny_checkpoint("BertForTokenClassification", folder / "models" / "parts", num_labels=2)
    return ["--models", str(folder / "models"), *SMALL]


SERVERS: dict[str, Callable[[Path], list[str]]] = {"demo": _demo, "decoder": _decoder, "several": _several}
"""By the name of its transcripts, what makes a server's flags, and the checkpoints in a folder."""


@contextmanager
def started(name: str, folder: Path) -> Iterator[LiveServer]:
    with serving(*SERVERS[name](folder), watched=False) as server:
        yield server


def replay(cases: Sequence[Case], server: LiveServer) -> Iterator[Case]:
    """Yields the cases with the answers that the server gives now."""
    kept: dict[str, str] = {}
    with httpx.Client(base_url=server.url, timeout=60, verify=False) as client:
        for case in cases:
            response = client.request(**request_of(case, kept))
            if "until" in case:
                response = _asked_until(client, case, kept)
            keep(case, response, kept)
            yield {**asking(case), **answer_of(case, response, live=True)}


def _asked_until(client: httpx.Client, case: Case, kept: dict[str, str]) -> httpx.Response:
    """Asks until a field of the answer has one of some values."""
    [(field, values)] = case["until"].items()
    answers: list[httpx.Response] = []

    def is_there() -> bool:
        answers.append(client.request(**request_of(case, kept)))
        return answers[-1].json().get(field) in values

    wait_until(is_there, 20, lambda: answers[-1].text)
    return answers[-1]


def changes(name: str, server: LiveServer) -> list[str]:
    """Returns a line for each difference between the answers of a server and its transcripts."""
    cases = read(name)
    return changed(cases, replay(cases, server))
