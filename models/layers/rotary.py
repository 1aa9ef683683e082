"""Rotary positions: the frequencies of every rope kind, and a step's cosines and sines.

A `Rope` is plain numbers, read from config.json; layers that rotate alike share one. Both spellings of
config.json are read: `rope_theta` with `rope_scaling`, and `rope_parameters`, which may have an entry for
each kind of layer. The results are Hugging Face's, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights


@dataclass(frozen=True)
class Rope:
    """The numbers that define a rotation."""

    frequencies: tuple[float, ...]
    """Radians by which a pair of dimensions turns from one position to the next, for each rotated pair."""
    scale: float = 1.0
    """A factor of cosines and sines."""
    axes: tuple[int, ...] = field(default=(), hash=False)
    """The axis that turns each pair: 0 for time, 1 for rows, 2 for columns; empty if there is one only."""


class Rotary(nn.Module):
    frequencies: Tensor  # [pairs] float32
    axes: Tensor  # [pairs] int64

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rope = rope

    def pull(self, weights: Weights) -> None:
        """Nothing is read from the checkpoint, but here the device becomes known."""
        self.frequencies = torch.tensor(self.rope.frequencies, dtype=torch.float32, device=weights.device)
        self.axes = torch.tensor(self.rope.axes, dtype=torch.int64, device=weights.device)

    def forward(self, positions: Tensor) -> Tensor:
        """Angles of positions [T], or [axes, T], -> [T, 2 * pairs] float32: the cosines, then the sines."""
        axes = self.axes if positions.dim() > 1 else None
        return ops.angles(positions, self.frequencies, self.rope.scale, axes)


def read_rope(
    raw: Mapping[str, object],
    head_dim: int,
    max_len: int,
    *,
    layer_type: str | None = None,
    default_theta: float = 10000.0,
) -> Rope:
    """Read the rope of the layers of `layer_type`, in a model that will serve sequences up to `max_len`."""
    fields = _read_fields(raw, layer_type, default_theta)
    dim = int(head_dim * fields.partial_rotary_factor)
    if not 0 < dim <= head_dim or dim % 2:
        raise ValueError(
            f"the rope parameters in config.json rotate {dim} of the {head_dim} dimensions of a head "
            "('head_dim' times 'partial_rotary_factor'), which must be an even number of them"
        )
    try:
        rope = fields.rope(dim, max_len)
    except ArithmeticError:
        rope = Rope((math.nan,))
    if not all(0 < number < math.inf for number in (*rope.frequencies[: dim // 2], rope.scale)):
        given = msgspec.structs.asdict(fields).items()
        numbers = ", ".join(f"{name} {value}" for name, value in given if isinstance(value, float))
        raise ValueError(f"the rope parameters in config.json give no rotation: {numbers}")
    return replace(rope, axes=fields.axes(dim // 2))


def read_sharpening(raw: Mapping[str, object]) -> float:
    """The factor that YaRN puts on the scale of attention, where it says one for all dimensions of a head."""
    fields = _read_fields(raw, None, 1.0)
    if not isinstance(fields, YarnRope) or not fields.mscale_all_dim:
        return 1.0
    return _yarn_scale(fields.stretch, fields.mscale_all_dim) ** 2


def plain_rope(theta: float, dim: int) -> Rope:
    """The rope without any scaling."""
    return _rope(_frequencies(theta, dim))


class DefaultRope(msgspec.Struct, frozen=True, kw_only=True):
    """The rope fields of config.json for one kind of layer; each kind of rope adds its own fields."""

    rope_theta: float
    partial_rotary_factor: float = 1.0
    max_position_embeddings: int
    original_max_position_embeddings: int
    mrope_section: tuple[int, int, int] | None = None
    """The number of pairs that turn with time, rows and columns, where tokens of pictures have three axes."""
    mrope_interleaved: bool = False

    def rope(self, dim: int, max_len: int) -> Rope:
        return plain_rope(self.rope_theta, dim)

    def axes(self, pairs: int) -> tuple[int, ...]:
        """The axis of each pair: in runs, or by turns as long as rows and columns have some left."""
        counts = self.mrope_section
        if counts is None:
            return ()
        if self.mrope_interleaved:
            return tuple(pair % 3 if pair < 3 * counts[pair % 3] else 0 for pair in range(pairs))
        if min(counts) < 0 or sum(counts) != pairs:
            raise ValueError(
                f"'mrope_section' in config.json is {list(counts)}, but must have the {pairs} pairs of "
                "dimensions that are rotated"
            )
        return tuple(axis for axis, count in enumerate(counts) for _ in range(count))


class LinearRope(DefaultRope, frozen=True, kw_only=True):
    factor: float

    def rope(self, dim: int, max_len: int) -> Rope:
        return _rope(_frequencies(self.rope_theta, dim) / self.factor)


class DynamicRope(DefaultRope, frozen=True, kw_only=True):
    """The base grows with the length. It is chosen once, by `max_len`: cached keys are not rotated again."""

    factor: float
    alpha: float | None = None
    """HunYuan's number by which it grows, whatever the length."""

    def rope(self, dim: int, max_len: int) -> Rope:
        stretch = self.alpha or self.factor * max(1.0, max_len / self.max_position_embeddings) - (
            self.factor - 1
        )
        return _rope(_frequencies(self.rope_theta * stretch ** (dim / (dim - 2)), dim))


class NtkRope(DefaultRope, frozen=True, kw_only=True):
    """Long waves are slowed by `factor`, and shorter ones ever less, as in GTE's encoders."""

    factor: float
    mixed_b: None = None  # a number here, which would mix them otherwise, is refused

    def rope(self, dim: int, max_len: int) -> Rope:
        return _rope(_frequencies(self.rope_theta * self.factor, dim) / self.factor ** (2 / dim))


class Llama3Rope(DefaultRope, frozen=True, kw_only=True):
    """Long waves are slowed by `factor`, short ones stay, with a smooth passage between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float

    def rope(self, dim: int, max_len: int) -> Rope:
        plain = _frequencies(self.rope_theta, dim)
        waves = self.original_max_position_embeddings / (2 * math.pi / plain)  # turns in the old length
        smooth = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        between = (1 - smooth) * plain / self.factor + smooth * plain
        slowed = torch.where(waves < self.low_freq_factor, plain / self.factor, between)
        return _rope(torch.where(waves > self.high_freq_factor, plain, slowed))


class YarnRope(DefaultRope, frozen=True, kw_only=True):
    """Like Llama 3, but the passage is a ramp over dimensions, and attention is sharpened by scaling."""

    factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @property
    def stretch(self) -> float:
        """The number of times that sequences are longer than they were before."""
        return self.factor or self.max_position_embeddings / self.original_max_position_embeddings

    def rope(self, dim: int, max_len: int) -> Rope:
        factor = self.stretch
        plain = _frequencies(self.rope_theta, dim)
        low, high = self._ramp(dim)
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return _rope(plain / factor * ramp + plain * (1 - ramp), self._scale(factor))

    def _ramp(self, dim: int) -> tuple[float, float]:
        """The two dimensions between which the passage lies: they turn beta times within the old length."""

        def dimension(turns: float) -> float:
            length = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return dim * math.log(length) / (2 * math.log(self.rope_theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return low, high if high != low else high + 0.001

    def _scale(self, factor: float) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_scale(factor, self.mscale) / _yarn_scale(factor, self.mscale_all_dim)
        return _yarn_scale(factor)


class ProportionalRope(DefaultRope, frozen=True, kw_only=True):
    """The first pairs of a head turn as they do where the whole head turns, and the others stand still."""

    factor: float = 1.0

    def rope(self, dim: int, max_len: int) -> Rope:
        whole = round(dim / self.partial_rotary_factor)
        turning = _frequencies(self.rope_theta, whole)[: dim // 2] / self.factor
        return _rope(torch.nn.functional.pad(turning, (0, (whole - dim) // 2)))


class LongRope(DefaultRope, frozen=True, kw_only=True):
    """A factor for each dimension, with one set for short and one for long sequences.

    Cached keys cannot be rotated again when a sequence grows long, so the set is chosen once, by `max_len`.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float | None = None
    attention_factor: float | None = None

    def rope(self, dim: int, max_len: int) -> Rope:
        is_long = max_len > self.original_max_position_embeddings
        factors = torch.tensor(self.long_factor if is_long else self.short_factor, dtype=torch.float32)
        if len(factors) != dim // 2:
            raise ValueError(f"longrope in config.json needs {dim // 2} factors, not {len(factors)}")
        return _rope(_frequencies(self.rope_theta, dim) / factors, self._scale())

    def _scale(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        factor = self.factor or self.max_position_embeddings / self.original_max_position_embeddings
        if factor <= 1.0:
            return 1.0
        return math.sqrt(1 + math.log(factor) / math.log(self.original_max_position_embeddings))


_KINDS: dict[str, type[DefaultRope]] = {
    "default": DefaultRope,
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "ntk": NtkRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "proportional": ProportionalRope,
    "longrope": LongRope,
    "su": LongRope,  # its name in the first Phi-3 checkpoints
    "mrope": DefaultRope,  # the name of one with sections in the first Qwen2-VL checkpoints
}


def _read_fields(raw: Mapping[str, object], layer_type: str | None, default_theta: float) -> DefaultRope:
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if isinstance(given, Mapping) and layer_type in given:
        given = given[layer_type]
    if not isinstance(given, Mapping):
        raise ValueError(f"the rope parameters in config.json must be an object, not {given!r}")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _KINDS:
        raise ValueError(f"config.json names the rope type {kind!r}; there are {', '.join(_KINDS)}")
    longest = raw.get("max_position_embeddings", 2048)
    fields = {
        "rope_theta": default_theta,
        "max_position_embeddings": longest,
        "original_max_position_embeddings": longest,
        **_given(raw, "rope_theta", "partial_rotary_factor"),
        **_given(given, *given),
        # Phi-3 has this field beside the rope parameters, and it overrides the one among them.
        **_given(raw, "original_max_position_embeddings"),
    }
    try:
        return msgspec.convert(fields, _KINDS[kind])
    except msgspec.ValidationError as error:
        raise ValueError(f"the rope parameters of type {kind!r} in config.json: {error}") from error


def _given(fields: Mapping[str, object], *names: str) -> dict[str, object]:
    return {name: fields[name] for name in names if fields.get(name) is not None}


def _frequencies(theta: float, dim: int) -> Tensor:
    """The frequencies without scaling, [dim / 2] float32, from 1 down to almost 1 / theta."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _rope(frequencies: Tensor, scale: float = 1.0) -> Rope:
    return Rope(tuple(frequencies.tolist()), scale)
