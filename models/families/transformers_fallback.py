"""Decoders without a file of their own run on transformers' code, with our attention over our KV cache.

transformers builds the model and computes everything but attention; it is handed the packed tokens of a step
as a batch of one, without a cache and without a mask. Weights are pulled as for our own models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models.checkpoint.weights import Weights
from models.layers.attention import Attention
from models.layers.linear import frozen
from models.model import ModelSetup

_ATTENTION = "facet"
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class UnsupportedModel(ValueError):
    """transformers' code for this model cannot run on our attention; the message says what is in the way."""


def knows(architecture: str) -> bool:
    """Whether transformers itself has a causal language model of that name."""
    return any(
        architecture == names or (not isinstance(names, str) and architecture in names)
        for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )


class TransformersForCausalLM(nn.Module):
    trunk: nn.Module
    head: nn.Module

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__()
        config = setup.config
        if setup.parallel.size > 1 or setup.parallel.stages > 1:
            raise UnsupportedModel(
                f"{config.architecture} runs on transformers' code, which cannot be cut over ranks: leave "
                "--tensor-parallel-size and --pipeline-parallel-size at 1; --data-parallel-size may be more"
            )
        model_class = _model_class(setup)
        self.hf_config = _hf_config(model_class, setup)
        for obstacle in _obstacles(model_class, self.hf_config):
            raise UnsupportedModel(f"{config.architecture} cannot run on transformers' code here: {obstacle}")
        self.vocab_size = config.vocab_size
        self.head_tokens = setup.head_tokens
        self.trust_remote_code = setup.trust_remote_code
        self.attention = nn.ModuleList(
            Attention(
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.head_dim**-0.5,
            )
            for _ in range(config.num_layers)
        )

    def pull(self, weights: Weights) -> None:
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                self.hf_config,
                dtype=weights.dtype,
                attn_implementation=_ATTENTION,
                trust_remote_code=self.trust_remote_code,
            )
        if any(getattr(module, "is_causal", True) is False for module in model.modules()):
            raise UnsupportedModel(f"{type(model).__name__} is not a decoder: its attention looks ahead")
        _fill(model, weights, with_head=self.head_tokens != ())
        self.trunk = getattr(model, model.base_model_prefix)
        setattr(model, model.base_model_prefix, _GivenHidden())
        self.head = nn.Identity() if self.head_tokens == () else model
        self.to(weights.device).eval()  # the parameters are there; buffers such as rotary frequencies follow

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self.trunk(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            attention_layers=self.attention_layers(),  # passed on to `_attend`
        )
        return output.last_hidden_state[0]  # [T, hidden_size]

    def logits(self, hidden: Tensor) -> Tensor:
        output = self.head(inputs_embeds=hidden[None], use_cache=False)
        logits = output.logits[0, :, : self.vocab_size].float()  # [R, vocab_size]
        return logits if self.head_tokens is None else logits[:, self.head_tokens]

    def attention_layers(self) -> list[Attention]:
        return [layer for layer in self.attention if isinstance(layer, Attention)]


def _model_class(setup: ModelSetup) -> type[PreTrainedModel]:
    architecture, auto_map = setup.config.architecture, setup.config.raw.get("auto_map")
    own_code = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, dict) else None
    if own_code and setup.trust_remote_code:
        return get_class_from_dynamic_module(own_code, str(setup.folder))
    if not knows(architecture):
        raise UnsupportedModel(
            f"transformers has no causal language model named {architecture}, "
            + (
                "and the code that the checkpoint brings is run only with --trust-remote-code"
                if own_code
                else "and the checkpoint brings no code for one (no 'AutoModelForCausalLM' in 'auto_map')"
            )
        )
    return getattr(transformers, architecture)


def _hf_config(model_class: type[PreTrainedModel], setup: ModelSetup) -> PretrainedConfig:
    if model_class.config_class is None:
        raise UnsupportedModel(f"the code of {setup.config.architecture} names no config_class")
    config = model_class.config_class.from_dict(setup.config.raw)
    config.name_or_path = str(setup.folder)  # where from_config looks for code of the checkpoint
    return config


def _obstacles(model_class: type[PreTrainedModel], config: PretrainedConfig) -> Iterator[str]:
    """Why a model would run and be wrong, or fail without saying why."""
    if config.is_encoder_decoder:
        yield "it is not a decoder"
    if config.sub_configs:
        yield f"it is made of several models ({', '.join(config.sub_configs)}), of which text is one"
    if not model_class.is_backend_compatible():
        yield "its code does not call attention through transformers' attention interface"
    if kinds := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        yield f"it has layers of the kind {', '.join(sorted(kinds))}"
    if getattr(config, "kv_lora_rank", None):
        yield "it caches latent vectors instead of keys and values"
    if kinds := _rope_types(config) & {"dynamic", "longrope"}:
        yield f"its rotary embedding ({', '.join(kinds)}) would depend on the longest text in the batch"


def _rope_types(config: PretrainedConfig) -> set[str]:
    """There is one set of rotary parameters, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {kind["rope_type"] for kind in kinds if "rope_type" in kind}


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built in here compute their buffers, but get parameters without memory."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # One that is there already is being tied, and must stay the same object.
        if param is not None and not param.is_meta:
            param = frozen(param.detach().to("meta"))
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _fill(model: PreTrainedModel, weights: Weights, *, with_head: bool) -> None:
    """Pull every parameter, and the buffers that are saved with them, in the dtype the module made it in."""
    state = model.state_dict(keep_vars=True)
    stored = _stored_names(model, state, weights)
    for name, tensor in state.items():
        in_trunk = name.startswith(f"{model.base_model_prefix}.")
        if name in model.all_tied_weights_keys or not (with_head or in_trunk):
            weights.ignore(stored.get(name, name))
            continue
        value = weights.take(stored.get(name, name), tensor.shape, dtype=tensor.dtype)
        owner, _, attribute = name.rpartition(".")
        is_parameter = isinstance(tensor, nn.Parameter)
        setattr(model.get_submodule(owner), attribute, frozen(value) if is_parameter else value)
    model.tie_weights()
    _ignore_leftovers(model, weights)


def _stored_names(model: PreTrainedModel, state: dict[str, Tensor], weights: Weights) -> dict[str, str]:
    """The model's names -> the checkpoint's, by transformers' own rules for checkpoints of all ages."""
    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    names: dict[str, str] = {}
    for stored in weights.reading.names:
        name, converter = rename_source_key(stored, renamings, converters, model.base_model_prefix, state)
        if name not in state and stored in state:
            name = stored
        elif converter is not None:
            raise UnsupportedModel(
                f"{type(model).__name__} cannot run on transformers' code here: {stored} and others would "
                "have to be merged or split on loading, as the weights of experts are"
            )
        names[name] = stored
    return names


def _ignore_leftovers(model: PreTrainedModel, weights: Weights) -> None:
    """What transformers knows that old checkpoints carry and models no longer read."""
    patterns = [r"rotary_emb\.inv_freq$", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    for name in weights.reading.names:
        if any(re.search(pattern, name) for pattern in patterns):
            weights.ignore(name)


class _GivenHidden(nn.Module):
    """Stands where the trunk was, so that a model's own code turns hidden states into logits."""

    def forward(self, *args: object, inputs_embeds: Tensor, **kwargs: object) -> _Output:
        return _Output([inputs_embeds])


class _Output(tuple[Tensor, ...]):
    """What a trunk returns: hidden states, by index or by name, and nothing of what else may be asked for."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def _attend(
    module: Any,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, G, T, D]
    value: Tensor,  # [1, G, T, D]
    attention_mask: None,
    *,
    attention_layers: Sequence[Attention],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, answered by ours: -> [1, T, H, D], and no attention weights."""
    if s_aux is not None or position_bias is not None:
        raise UnsupportedModel(
            f"{type(module).__name__} uses attention sinks or biases, which are not supported"
        )
    layer = attention_layers[module.layer_idx]
    # transformers says these with each call, not when the layer is built.
    layer.scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer.window = sliding_window
    layer.softcap = softcap
    q, k, v = (heads[0].transpose(0, 1).flatten(1) for heads in (query, key, value))  # [T, heads * D] each
    return layer(q, k, v).unflatten(-1, (layer.heads, layer.head_dim))[None], None


AttentionInterface.register(_ATTENTION, _attend)
