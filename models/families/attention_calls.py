"""Attention calls in a forward pass of transformers' code: found by a trial run, then answered by our layers.

transformers hands each call to a function that is registered under a name, here `_attend`. Its code need
not do what config.json says of heads and their widths, so a model is run once before its weights are read:
parameters are on the meta device, and what is computed from them is zeros. The calls of that run say which
attention layers there must be. Each call has a layer, and so a KV cache, of its own, even if one module
calls twice. Later passes must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers.modeling_utils import AttentionInterface

from models.layers.attention import Attention

NAME = "facet"
"""The name under which transformers finds our attention."""

_WITHOUT_EFFECT = {"dropout", "position_ids", "use_cache", "output_attentions"}
"""Options of a call that change nothing here: there is no dropout, and positions are in keys and queries."""

_UNSUPPORTED = {"position_bias": "biases of positions (position_bias)"}


class UnsupportedModel(ValueError):
    """transformers' code for this model cannot run on our attention; the message says what is in the way."""


class AttentionCall(NamedTuple):
    """The shapes and options of one call of attention. A tuple, for one is made of each call in each step."""

    module: str
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool

    @property
    def width(self) -> int:
        """Keys and values share a cache: the narrower ones are filled up with zeros, which change nothing."""
        return max(self.key_width, self.value_width)

    def layer(self) -> Attention:
        return Attention(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.width,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )


class AttentionCalls:
    """The calls of attention in one forward pass, in order, and the layers that answer them."""

    def __init__(self) -> None:
        self.layers: list[Attention] = []
        self._calls: list[AttentionCall] = []
        self._next = 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """A trial run: the calls made in this context are those of every later pass. They return zeros."""
        with _ZerosForMeta(), _answered_by(self._note):
            yield
        self.layers = [call.layer() for call in self._calls]

    @contextmanager
    def answered(self) -> Iterator[None]:
        """One forward pass, whose calls the layers answer in their order."""
        self._next = 0
        with _answered_by(self._compute):
            yield
        if self._next != len(self.layers):
            times = f"{self._next} times in a step, but {len(self.layers)} times at start"
            raise UnsupportedModel(f"the model called attention {times}")

    def _note(
        self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        self._calls.append(call)
        return query.new_zeros(1, query.shape[2], call.heads, call.value_width)

    def _compute(
        self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
    ) -> Tensor:
        expected = self._calls[self._next] if self._next < len(self._calls) else None
        if call != expected:
            raise UnsupportedModel(_other_call(self._next, call, expected))
        layer = self.layers[self._next]
        self._next += 1
        layer.sinks = None if sinks is None else sinks.float()
        q, k, v = (_flat(heads, call.width) for heads in (query, key, value))
        out = layer(q, k, v).unflatten(-1, (call.heads, call.width))  # [T, H, width]
        return out[None, ..., : call.value_width]


def _flat(heads: Tensor, width: int) -> Tensor:
    """[1, H, T, D] -> [T, H * width]."""
    if heads.shape[-1] < width:
        heads = F.pad(heads, (0, width - heads.shape[-1]))
    return heads[0].transpose(0, 1).flatten(1)


def _other_call(number: int, call: AttentionCall, expected: AttentionCall | None) -> str:
    """The difference between a call and the one in its place at start, for an error message."""
    if expected is None:
        return f"{call.module} called attention once more than the model did at start"
    before, now = expected._asdict(), call._asdict()
    changes = (f"{name} {now[name]} instead of {before[name]}" for name in now if now[name] != before[name])
    return f"call {number} of attention asks for other things than at start: {', '.join(changes)}"


_Answer = Callable[[AttentionCall, Tensor, Tensor, Tensor, Tensor | None], Tensor]
_answer: _Answer | None = None


@contextmanager
def _answered_by(answer: _Answer) -> Iterator[None]:
    global _answer
    _answer = answer
    try:
        yield
    finally:
        _answer = None


def _attend(
    module: Any,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, G, T, D]
    value: Tensor,  # [1, G, T, E]
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: -> [1, T, H, E], and no attention weights."""
    if _answer is None:
        raise RuntimeError("transformers' code called attention outside a pass of its model")
    sinks: Tensor | None = options.pop("s_aux", None)  # [H]
    call = _read_call(module, query, key, value, sinks, attention_mask, options)
    return _answer(call, query, key, value, sinks), None


def _read_call(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    mask: Tensor | None,
    options: Mapping[str, Any],
) -> AttentionCall:
    options = {name: option for name, option in options.items() if option is not None}
    if mask is not None:
        raise UnsupportedModel("it makes an attention mask of its own")
    if options.pop("is_causal", getattr(module, "is_causal", True)) is False:
        raise UnsupportedModel("it is not a decoder: its attention looks ahead")
    call = AttentionCall(
        module=type(module).__name__,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        key_width=key.shape[3],
        value_width=value.shape[3],
        scale=options.pop("scaling", query.shape[3] ** -0.5),
        window=options.pop("sliding_window", None),
        softcap=options.pop("softcap", None),
        has_sinks=sinks is not None,
    )
    if unknown := sorted(options.keys() - _WITHOUT_EFFECT):
        asked = ", ".join(_UNSUPPORTED.get(name, name) for name in unknown)
        raise UnsupportedModel(f"it asks attention for {asked}, which ours does not know")
    _check_shapes(call, query, key, value)
    if sinks is not None and sinks.shape != (call.heads,):
        raise UnsupportedModel(f"it calls attention with sinks of the shape {tuple(sinks.shape)}")
    return call


def _check_shapes(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> None:
    tokens = query.shape[2]
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    wanted = [
        (1, call.heads, tokens, call.key_width),
        (1, call.kv_heads, tokens, call.key_width),
        (1, call.kv_heads, tokens, call.value_width),
    ]
    if shapes != wanted or call.heads % call.kv_heads:
        named = "queries of the shape {}, keys of {} and values of {}".format(*shapes)
        raise UnsupportedModel(f"it calls attention with {named}")


AttentionInterface.register(NAME, _attend)


class _ZerosForMeta(TorchDispatchMode):
    """Makes zeros on the CPU of what is computed from tensors on the meta device and from others.

    So a model's code may look at values, as the routing of experts does.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
        target = {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}
        if "meta" not in devices or devices | target == {"meta"}:
            return func(*args, **kwargs)
        args_on_meta, kwargs_on_meta = tree_map(_on_meta, (args, kwargs))
        result = func(*args_on_meta, **kwargs_on_meta)
        return args[0] if func._schema.is_mutable else tree_map(_zeros_like, result)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _zeros_like(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value
