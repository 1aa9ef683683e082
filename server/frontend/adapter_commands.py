"""Orders to load and unload adapters of several models: which model one means, and what it does."""

from __future__ import annotations

from server.access.client_identity import Caller
from server.errors import BadRequest, NotFound
from server.frontend.many_models import ManyModels, Named


async def load_into(
    models: ManyModels, name: str, path: str, *, model: str, in_place: bool, caller: Caller | None
) -> None:
    """Load an adapter beside one of several models, which is loaded first, and again whenever that is.

    Raises ApiError if it cannot be.
    """
    state, own = _meant(models, name, model, caller)
    async with models.using(state, retry=True) as frontend:
        await frontend.adapters.load(own, path, in_place=in_place)
        state.ordered[own] = path


async def unload_from(models: ManyModels, name: str, *, model: str, caller: Caller | None) -> None:
    """Unload an adapter that was ordered, or found by its name. Raises ApiError if there is none."""
    state, own = _meant(models, name, model, caller)
    ordered, served = state.ordered.pop(own, None), state.slot.served
    if served is not None and (ordered is None or served.adapters.find(own) is not None):
        await served.adapters.unload(own)
    elif ordered is None:
        raise NotFound(f"The lora adapter '{name}' cannot be found.", "lora_name")


def _meant(models: ManyModels, name: str, model: str, caller: Caller | None) -> Named:
    """The model that an order means, and the adapter's name without the model's. Raises ApiError."""
    named = dict(models.named(caller))
    takers = {state.entry.name: state for state in named.values() if state.entry.takes_orders}
    base, colon, own = name.rpartition(":")
    if not takers:
        raise NotFound("No model takes adapters here: give some enable-lora and allow-runtime-lora.")
    if not (colon and base in named):
        base, own = model, name
    owners = [state for state in takers.values() if own in state.adapters]
    found = [models.find(each, caller) for each in (base, model) if each] or owners or list(takers.values())
    state = found[0]
    if any(one is not state for one in found):
        raise BadRequest(f"Say by `model` which one is to have `{own}`: {' or '.join(takers)}.", "model")
    if state.entry.name not in takers:
        raise BadRequest(
            f"`{state.entry.name}` takes no orders: give its table enable-lora and allow-runtime-lora.",
            "model",
        )
    if own in state.entry.adapters:
        raise BadRequest(
            f"`{own}` stands in the table of `{state.entry.name}`: change it there.", "lora_name"
        )
    others = [one.entry.name for one in models.states if one is not state and own in one.adapters]
    if own in dict(models.named()) or others:
        whose = f"an adapter of `{others[0]}`" if others else "a model"
        raise BadRequest(f"`{own}` is the name of {whose}: choose another one.", "lora_name")
    return Named(state, own)
