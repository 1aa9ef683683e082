"""Decoders without a file of their own run on transformers' code, with our attention over our KV cache.

transformers builds the model and computes everything but attention; it is handed the packed tokens of a step
as a batch of one, without a cache and without a mask. Weights are pulled as for our own models.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models.checkpoint.weights import Weights
from models.families.attention_calls import NAME, AttentionCalls, UnsupportedModel
from models.families.transformers_weights import fill
from models.layers.attention import Attention
from models.layers.linear import frozen
from models.model import ModelSetup

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PARTS_OF_LAYERS = {"attn_config", "ffn_config"}
_TRIAL_TOKENS = 3


def knows(architecture: str) -> bool:
    """Whether transformers itself has a causal language model of that name."""
    return any(
        architecture == names or (not isinstance(names, str) and architecture in names)
        for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    )


class TransformersForCausalLM(nn.Module):
    """Any causal language model of transformers, or of the checkpoint's own code, on one rank."""

    trusts_config: ClassVar[bool] = False
    """False: heads and layers are what a trial run shows, whatever config.json says of them."""
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
        self.vocab_size = config.vocab_size
        self.head_tokens = setup.head_tokens
        self.model_class = _model_class(setup)
        self.calls = AttentionCalls()
        with _obstacles_named(config.architecture):
            _refuse(_obstacles_of(self.model_class))
            self.hf_config = _hf_config(self.model_class, setup)
            _refuse(_obstacles_by(self.hf_config))
            self._try_out(config.output_size)
        config.require("vocab_size", "hidden_size", "max_len")

    @torch.inference_mode()
    def _try_out(self, output_size: int) -> None:
        """Run a copy of the model without weights: finds its calls of attention, and what is in the way."""
        config = deepcopy(self.hf_config)
        with torch.device("meta"):
            model = self._build(config, torch.float32, experts_implementation="eager")
        _refuse(_obstacles_in(model))
        self.trunk, self.head = _parts(model)
        ids = torch.arange(_TRIAL_TOKENS) % self.vocab_size
        with self.calls.noted():
            hidden = self._hidden(ids, ids)
            if self.head_tokens != ():
                self.logits(hidden)
        if not self.calls.layers:
            raise UnsupportedModel("it never calls attention through transformers' attention interface")
        if _slides_by_mask(self.hf_config) and all(layer.window is None for layer in self.calls.layers):
            raise UnsupportedModel("its window is in the mask that its code makes, and not in its calls")
        if hidden.shape[1] != output_size:
            raise UnsupportedModel(
                f"its hidden states are {hidden.shape[1]} wide, and config.json says {output_size}"
            )

    def _build(self, config: PretrainedConfig, dtype: torch.dtype, **options: str) -> PreTrainedModel:
        model = self.model_class._from_config(config, dtype=dtype, attn_implementation=NAME, **options)
        return model.eval()

    def pull(self, weights: Weights) -> None:
        with _parameters_on_meta():
            model = self._build(self.hf_config, weights.dtype)
        fill(model, weights, with_head=self.head_tokens != ())
        self.trunk, self.head = _parts(model)
        if self.head_tokens == ():
            self.head = nn.Identity()
        self.to(weights.device)  # the parameters are there; buffers such as rotary frequencies follow

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        with self.calls.answered():
            return self._hidden(ids, positions)

    def _hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self.trunk(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        return output.last_hidden_state[0]  # [T, output_size]

    def logits(self, hidden: Tensor) -> Tensor:
        output = self.head(inputs_embeds=hidden[None], use_cache=False)
        logits = output.logits[0, :, : self.vocab_size].float()  # [R, vocab_size]
        return logits if self.head_tokens is None else logits[:, self.head_tokens]

    def attention_layers(self) -> list[Attention]:
        return self.calls.layers


@contextmanager
def _obstacles_named(architecture: str) -> Iterator[None]:
    """Turns whatever is raised in this context into a refusal of the architecture, with the reason."""
    try:
        yield
    except Exception as error:
        obstacle = " ".join(str(error).split())
        if isinstance(error, KeyError) and error.args == (NAME,):
            obstacle = "its code knows no attention but its own"
        elif not isinstance(error, UnsupportedModel):
            obstacle = f"a trial run fails with {type(error).__name__}: {obstacle}"
        raise UnsupportedModel(f"{architecture} cannot run on transformers' code here: {obstacle}") from error


def _model_class(setup: ModelSetup) -> Any:
    """A class that extends PreTrainedModel; some of what is asked of it has private names there."""
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
    # By name: a type checker that is shown the whole package reads the code of all its models.
    return getattr(import_module("transformers"), architecture)


def _hf_config(model_class: Any, setup: ModelSetup) -> PretrainedConfig:
    config = model_class.config_class.from_dict(setup.config.raw)
    config.name_or_path = str(setup.folder)  # where code of the checkpoint is looked for
    return config


def _refuse(obstacles: Iterator[str]) -> None:
    """Raise for the first of the reasons why a model would run and be wrong, or fail without saying why."""
    for obstacle in obstacles:
        raise UnsupportedModel(obstacle)


def _obstacles_of(model_class: Any) -> Iterator[str]:
    if model_class.config_class is None:
        yield "its code names no config_class"
    elif parts := model_class.config_class.sub_configs.keys() - _PARTS_OF_LAYERS:
        yield f"it is made of several models ({', '.join(sorted(parts))}), of which text is one"
    if model_class._is_stateful:
        yield "its layers keep a state of their own beside keys and values"


def _obstacles_by(config: PretrainedConfig) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "it is not a decoder"
    if kinds := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        yield f"it has layers of the kind {', '.join(sorted(kinds))}"
    if kinds := _rope_types(config) & {"dynamic", "longrope"}:
        yield f"its rotary embedding ({', '.join(kinds)}) would depend on the longest text in the batch"


def _slides_by_mask(config: PretrainedConfig) -> bool:
    """Whether config.json says that all layers have a window, which is shorter than texts may be."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "layer_types", None) or not getattr(config, "use_sliding_window", True):
        return False
    return window < getattr(config, "max_position_embeddings", window)


def _obstacles_in(model: PreTrainedModel) -> Iterator[str]:
    trunk = getattr(model, model.base_model_prefix, None)
    if not isinstance(trunk, nn.Module):
        yield "its code does not part the layers from the head"
    elif "position_ids" not in inspect.signature(trunk.forward).parameters:
        yield "its code takes no position_ids, and would count the positions of a chunk from 0"
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        yield "its learned positions begin after that of its padding token"
    if kinds := {type(module).__name__ for module in model.modules() if isinstance(module, _CONVOLUTIONS)}:
        yield f"its layers mix neighbouring tokens ({', '.join(sorted(kinds))})"


def _rope_types(config: PretrainedConfig) -> set[str]:
    """The kinds of rotary embedding: there is one for all layers, or one for each kind of layer."""
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


def _parts(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """The trunk, and the model without it, which turns hidden states into logits."""
    trunk = getattr(model, model.base_model_prefix)
    setattr(model, model.base_model_prefix, _GivenHidden())
    return trunk, model


class _GivenHidden(nn.Module):
    """Stands where the trunk was, so that a model's own code turns hidden states into logits."""

    @property
    def decoder(self) -> _GivenHidden:
        """Models of the BART and OPT kinds call a part of their trunk for their logits."""
        return self

    def forward(self, *args: object, inputs_embeds: Tensor, **kwargs: object) -> _Output:
        return _Output([inputs_embeds])


class _Output(tuple[Tensor, ...]):
    """The output of a trunk: hidden states, by index or by name, and None for whatever else is asked for."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None
