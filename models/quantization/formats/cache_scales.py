"""The scales that a checkpoint has for the cached keys and values of a layer, under all their names."""

from __future__ import annotations

from models.checkpoint.weights import Weights
from models.ops.narrow import CacheScales
from models.quantization.formats.scope import read_one_scale

_OF_KEYS = ("k_scale", "attn.k_scale", "k_proj.k_scale", "qkv_proj.k_scale", "k_proj.output_scale")
_OF_VALUES = ("v_scale", "attn.v_scale", "v_proj.v_scale", "qkv_proj.v_scale", "v_proj.output_scale")
_OF_BOTH = ("kv_scale", "attn.kv_scale")


def read_cache_scales(scope: Weights) -> CacheScales | None:
    """Read the scales beside the projections of a layer of attention; None if there are none.

    Scales of heads are left unread: only `--kv-cache-dtype` makes a difference of them, and refuses them.
    """
    if not scope.is_real:
        return None
    keys, values = (read_one_scale(scope, (*names, *_OF_BOTH)) for names in (_OF_KEYS, _OF_VALUES))
    if keys is None and values is None:
        return None
    return CacheScales(keys or values or 1.0, values or keys or 1.0)
