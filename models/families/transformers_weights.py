"""Weights for a model that transformers' code computes: pulled by its own rules for names.

transformers keeps rules that bring a checkpoint's tensors to those of its classes: some are renamed, others,
as the matrices of experts, are joined or divided.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple, cast

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import PreTrainedModel

from models.checkpoint.weights import Weights
from models.families.attention_calls import UnsupportedModel
from models.layers.linear import frozen


class Part(NamedTuple):
    """A tensor of the checkpoint of which, with others, tensors of the model are made."""

    stored: str
    pattern: str
    """The pattern of the rule that its name fits."""


class Plan(NamedTuple):
    """The sources of the model's tensors, by their names."""

    renamed: Mapping[str, str]
    """The checkpoint's name of each tensor that is read as it is."""
    made: Mapping[str, Sequence[Part]]
    """The parts of what a rule makes, by the first tensor that it makes."""
    rules: Mapping[str, WeightConverter]
    """The rules by their patterns."""


def fill(model: PreTrainedModel, weights: Weights, *, with_head: bool) -> None:
    """Pull every parameter, and the buffers that are saved with them, in the dtype the module made it in."""
    state = model.state_dict(keep_vars=True)
    plan = _plan(model, state, weights)
    prefix = f"{model.base_model_prefix}."
    unused = {name for name in state if not with_head and not name.startswith(prefix)}
    unused |= model.all_tied_weights_keys.keys()
    done = set[str]()
    for name, parts in plan.made.items():
        if name in unused:
            weights.ignore(*(part.stored for part in parts))
            continue
        made = _made(model, name, parts, plan.rules, state, weights)
        for target, value in made.items():
            _set(model, target, value, state[target])
        done.update(made)
    for name, tensor in state.items():
        stored = plan.renamed.get(name, name)
        if name in unused:
            weights.ignore(stored)
        elif name not in done:
            _set(model, name, weights.take(stored, tensor.shape, dtype=tensor.dtype), tensor)
    model.tie_weights()
    _ignore_leftovers(model, weights)


def _set(model: PreTrainedModel, name: str, value: Tensor, before: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    is_parameter = isinstance(before, nn.Parameter)
    setattr(model.get_submodule(owner), attribute, frozen(value) if is_parameter else value)


def _plan(model: PreTrainedModel, state: Mapping[str, Tensor], weights: Weights) -> Plan:
    """Apply transformers' rules to the names of a checkpoint, also of old ones."""
    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    renamed: dict[str, str] = {}
    made: defaultdict[str, list[Part]] = defaultdict(list)
    for stored in sorted(weights.reading.names, key=dot_natural_key):  # experts in the order of their numbers
        name, pattern = rename_source_key(stored, renamings, converters, model.base_model_prefix, dict(state))
        if name not in state and stored in state:
            renamed[stored] = stored
        elif pattern is not None:
            made[name].append(Part(stored, pattern))
        else:
            renamed[name] = stored
    rules = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    return Plan(renamed, made, rules)


def _made(
    model: PreTrainedModel,
    name: str,
    parts: Sequence[Part],
    rules: Mapping[str, WeightConverter],
    state: Mapping[str, Tensor],
    weights: Weights,
) -> dict[str, Tensor]:
    """Read the parts of what a rule makes, and make it: tensors of the model by their names."""
    target = state.get(name)
    if target is None:
        raise _unmade(model, parts, f"they would make {name}, which the model does not have")
    rule = deepcopy(rules[parts[0].pattern])
    for part in parts:
        shape = weights.stored_shape(part.stored) or ()
        value = weights.take(part.stored, shape, dtype=target.dtype)
        rule.add_tensor(name, part.stored, part.pattern, value)  # pyright: ignore[reportArgumentType]
    try:
        found = cast("dict[str, Tensor]", rule.convert(name, model=model, config=model.config))
    except Exception as error:
        raise _unmade(model, parts, " ".join(str(error).split())) from error
    for made, value in found.items():
        if made not in state or state[made].shape != value.shape:
            shape = f"; the model wants {list(state[made].shape)}" if made in state else ""
            raise _unmade(model, parts, f"they make {made} {list(value.shape)}{shape}")
    return {made: value.contiguous() for made, value in found.items()}


def _unmade(model: PreTrainedModel, parts: Sequence[Part], problem: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(model).__name__} cannot run on transformers' code here: {parts[0].stored} and others cannot "
        f"be brought into the form of its weights: {problem}"
    )


def _ignore_leftovers(model: PreTrainedModel, weights: Weights) -> None:
    """Ignore what old checkpoints carry and models no longer read, as far as transformers knows it."""
    patterns = [r"rotary_emb\.inv_freq$", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    for name in weights.reading.names:
        if any(re.search(pattern, name) for pattern in patterns):
            weights.ignore(name)
