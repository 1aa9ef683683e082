"""Messages on adapters between servers and engines."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from worker.calls.messages import AdapterFacts
from worker.worker_facts import WorkerFacts


class Adapter(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An adapter under a name. Two names may mean the same one."""

    name: str
    digest: str
    """A digest of all that decides what it computes."""
    folder: str
    stamp: str
    """What changes when its files are written."""
    root: str
    """Where it came from, as clients are told."""
    source: str = ""
    """The folder, or the name on the hub, by which it was asked for."""
    chat_template: str = ""
    """The template by which its conversations are written, if it is not the model's own."""
    invocation: tuple[int, ...] = ()
    """The tokens from whose last occurrence in a prompt on it computes; none: from the beginning."""
    labels: tuple[str, ...] = ()
    """The names of what its head tells apart, if the operator has given some."""
    prompt: str = ""
    """The name of the model's prompt that is written before texts for which a request names none."""
    ordered: int = 0
    """When it was ordered, in nanoseconds. Of two orders for a name the later one counts, in whichever order
    they reach an engine."""


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An order to load an adapter, to which its name refers from then on. `AdapterState` is the answer."""

    adapter: Adapter
    facts: AdapterFacts | None = None
    """What workers told of it elsewhere; None: it is new."""


class DropAdapter(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An order that a name refers to no adapter any more. What runs goes on. `AdapterState` is the answer."""

    name: str
    ordered: int
    """When it was given, in nanoseconds."""


class AdapterState(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """A notice to every server that an engine has loaded or dropped an adapter, or cannot load it."""

    adapter: Adapter
    facts: AdapterFacts | None = None
    """None: the name refers to no adapter there."""
    error: str = ""
    """Why it cannot be loaded, if it cannot."""
    seconds: float = 0.0
    """How long loading took."""


def adapted_facts(base: WorkerFacts, told: AdapterFacts) -> WorkerFacts:
    """The facts of a model whose requests an adapter computes, which may have a head of its own."""
    tasks = tuple(dict.fromkeys((*base.tasks, *told.tasks)))
    return replace(base, tasks=tasks, widths={**base.widths, **told.widths})
