"""The registry of models: which class serves which architecture.

Values are "module:Class" strings: the list costs no import, a model's code is loaded when it is needed. Other
distributions add theirs through the entry-point group "facet.models", programs with `register_model`; where a
name is known twice, the class that was installed or registered on purpose wins.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from models.composites import COMPOSITES
from models.config import ModelConfig
from models.plugins import load, register_model, registered

_DECODERS = {
    "ApertusForCausalLM": "decoders.llama:ApertusForCausalLM",
    "ArceeForCausalLM": "decoders.llama:ArceeForCausalLM",
    "BambaForCausalLM": "hybrids.bamba:BambaForCausalLM",
    "BloomForCausalLM": "decoders.bloom_falcon_mpt:BloomForCausalLM",
    "Cohere2ForCausalLM": "decoders.cohere:Cohere2ForCausalLM",
    "CohereForCausalLM": "decoders.cohere:CohereForCausalLM",
    "DeepseekOcr2ForConditionalGeneration": "latent:DeepseekV2WithHeadsForCausalLM",
    "DeepseekV2ForCausalLM": "latent:DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM": "latent:DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM": "latent:DeepseekV3ForCausalLM",
    "Dots1ForCausalLM": "mixtures:Dots1ForCausalLM",
    "Ernie4_5_MoeForCausalLM": "mixtures:Ernie45MoeForCausalLM",
    "Ernie4_5ForCausalLM": "decoders.llama:Ernie45ForCausalLM",
    "Exaone4ForCausalLM": "decoders.llama:Exaone4ForCausalLM",
    "FalconForCausalLM": "decoders.bloom_falcon_mpt:FalconForCausalLM",
    "FalconH1ForCausalLM": "hybrids.bamba:FalconH1ForCausalLM",
    "FalconMambaForCausalLM": "hybrids.mamba:FalconMambaForCausalLM",
    "Gemma2ForCausalLM": "decoders.gemma.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "decoders.gemma.gemma:Gemma3ForCausalLM",
    "Gemma3nForCausalLM": "decoders.gemma.gemma3n:Gemma3nForCausalLM",
    "Gemma4ForCausalLM": "decoders.gemma.gemma4:Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM": "decoders.gemma.gemma4:Gemma4UnifiedForCausalLM",
    "GemmaForCausalLM": "decoders.gemma.gemma:GemmaForCausalLM",
    "Glm4ForCausalLM": "decoders.llama:Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "mixtures:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "latent:Glm4MoeLiteForCausalLM",
    "GlmForCausalLM": "decoders.llama:GlmForCausalLM",
    "GlmMoeDsaForCausalLM": "latent:GlmMoeDsaForCausalLM",
    "GPT2LMHeadModel": "decoders.gpt:GPT2LMHeadModel",
    "GPTBigCodeForCausalLM": "decoders.gpt:GPTBigCodeForCausalLM",
    "GPTJForCausalLM": "decoders.gpt:GPTJForCausalLM",
    "GPTNeoXForCausalLM": "decoders.gpt:GPTNeoXForCausalLM",
    "GptOssForCausalLM": "mixtures:GptOssForCausalLM",
    "GraniteForCausalLM": "decoders.llama:GraniteForCausalLM",
    "GraniteMoeForCausalLM": "mixtures:GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM": "hybrids.bamba:GraniteMoeHybridForCausalLM",
    "GraniteMoeSharedForCausalLM": "mixtures:GraniteMoeForCausalLM",
    "HeliumForCausalLM": "decoders.llama:HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM": "decoders.llama:HunYuanDenseV1ForCausalLM",
    "InternLM2ForCausalLM": "decoders.llama:InternLM2ForCausalLM",
    "InternLM2ForRewardModel": "reward:InternLM2ForRewardModel",
    "JambaForCausalLM": "hybrids.bamba:JambaForCausalLM",
    "KimiK2ForCausalLM": "latent:DeepseekV3ForCausalLM",
    "KimiLinearForCausalLM": "hybrids.delta:KimiLinearForCausalLM",
    "Lfm2ForCausalLM": "hybrids.lfm2:Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM": "hybrids.lfm2:Lfm2MoeForCausalLM",
    "LlamaForCausalLM": "decoders.llama:LlamaForCausalLM",
    "Mamba2ForCausalLM": "hybrids.mamba:Mamba2ForCausalLM",
    "MambaForCausalLM": "hybrids.mamba:MambaForCausalLM",
    "MiniCPM3ForCausalLM": "latent:MiniCPM3ForCausalLM",
    "MiniMaxM2ForCausalLM": "mixtures:MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM": "decoders.llama:Ministral3ForCausalLM",
    "Mistral4ForCausalLM": "latent:Mistral4ForCausalLM",
    "MistralForCausalLM": "decoders.llama:MistralForCausalLM",
    "MixtralForCausalLM": "mixtures:MixtralForCausalLM",
    "MptForCausalLM": "decoders.bloom_falcon_mpt:MptForCausalLM",
    "MPTForCausalLM": "decoders.bloom_falcon_mpt:MptForCausalLM",
    "NemotronForCausalLM": "decoders.gpt:NemotronForCausalLM",
    "NemotronHForCausalLM": "hybrids.mamba:NemotronHForCausalLM",
    "Olmo2ForCausalLM": "decoders.olmo:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "decoders.olmo:Olmo3ForCausalLM",
    "OlmoHybridForCausalLM": "hybrids.delta:OlmoHybridForCausalLM",
    "OlmoeForCausalLM": "mixtures:OlmoeForCausalLM",
    "OlmoForCausalLM": "decoders.olmo:OlmoForCausalLM",
    "OPTForCausalLM": "decoders.gpt:OPTForCausalLM",
    "Phi3ForCausalLM": "decoders.llama:Phi3ForCausalLM",
    "PhiForCausalLM": "decoders.gpt:PhiForCausalLM",
    "Qwen2ForCausalLM": "decoders.llama:Qwen2ForCausalLM",
    "Qwen2ForProcessRewardModel": "reward:Qwen2ForProcessRewardModel",
    "Qwen2ForRewardModel": "reward:Qwen2ForRewardModel",
    "Qwen2MoeForCausalLM": "mixtures:Qwen2MoeForCausalLM",
    "Qwen3_5ForCausalLM": "hybrids.delta:Qwen35ForCausalLM",
    "Qwen3_5MoeForCausalLM": "hybrids.delta:Qwen35MoeForCausalLM",
    "Qwen3ForCausalLM": "decoders.llama:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "mixtures:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "hybrids.delta:Qwen3NextForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "mixtures:Qwen3VLMoeForCausalLM",
    "SeedOssForCausalLM": "decoders.llama:SeedOssForCausalLM",
    "SmolLM3ForCausalLM": "decoders.llama:SmolLM3ForCausalLM",
    "StableLmForCausalLM": "decoders.llama:StableLmForCausalLM",
    "Starcoder2ForCausalLM": "decoders.gpt:Starcoder2ForCausalLM",
    "YoutuForCausalLM": "latent:YoutuForCausalLM",
}
_ENCODERS = {
    "Albert": "encoders.bert:Albert",
    "Bert": "encoders.bert:Bert",
    "Camembert": "encoders.bert:Roberta",
    "DebertaV2": "encoders.deberta:Deberta",
    "DistilBert": "encoders.bert:DistilBert",
    "Electra": "encoders.bert:Electra",
    "Gte": "encoders.gte:Gte",
    "JinaBert": "encoders.jina_bert:JinaBert",
    "JinaEmbeddingsV3": "encoders.bert:Roberta",
    "ModernBert": "encoders.modernbert:ModernBert",
    "MPNet": "encoders.bert:MPNet",
    "New": "encoders.gte:Gte",
    "NomicBert": "encoders.nomic_bert:NomicBert",
    "Roberta": "encoders.bert:Roberta",
    "XLMRoberta": "encoders.bert:Roberta",
}
"""The beginnings of encoders' names, and of those of their classes: each family has one for each ending."""

_SPEECH = {
    "BartForConditionalGeneration": "encoder_decoders.bart:BartForConditionalGeneration",
    "MBartForConditionalGeneration": "encoder_decoders.bart:MBartForConditionalGeneration",
    "MarianMTModel": "encoder_decoders.bart:MarianMTModel",
    "MT5ForConditionalGeneration": "encoder_decoders.t5:MT5ForConditionalGeneration",
    "PegasusForConditionalGeneration": "encoder_decoders.bart:PegasusForConditionalGeneration",
    "T5ForConditionalGeneration": "encoder_decoders.t5:T5ForConditionalGeneration",
    "UMT5ForConditionalGeneration": "encoder_decoders.t5:T5ForConditionalGeneration",
    "WhisperForConditionalGeneration": "encoder_decoders.whisper:WhisperForConditionalGeneration",
}
"""Models whose decoder answers to a source that an encoder has read."""

_COMPARED = {
    "CLIPModel": "contrastive:CLIPModel",
    "Siglip2Model": "contrastive:Siglip2Model",
    "SiglipModel": "contrastive:SiglipModel",
}
"""Models of pictures and texts, whose vectors are compared."""

_T5_ENCODERS = {f"{name}EncoderModel": "encoder_decoders.t5:T5EncoderModel" for name in ("T5", "MT5", "UMT5")}
"""The encoders of models that answer to a source, alone."""

_STATIC = {"StaticModel": "static:StaticModel"}
"""A vector for each token, and no layers."""

_ENTITIES = {"GLiNERModel": "gliner:GLiNERModel"}
"""An encoder of labels and a text, which finds entities."""

_OTHERS = {**_COMPARED, **_STATIC, **_ENTITIES, **_SPEECH, **_T5_ENCODERS}

ARCHITECTURES: dict[str, str] = {**_DECODERS, **_OTHERS} | {
    f"{name}{ending}": f"{own}{own_ending}"
    for name, own in _ENCODERS.items()
    for ending, own_ending in {
        "ForMaskedLM": "Model",
        "ForSequenceClassification": "ForSequenceClassification",
        "ForTokenClassification": "ForTokenClassification",
        "Model": "Model",
    }.items()
}

_FAMILIES = "models.families."
_FALLBACK = "models.families.transformers_fallback"


class ModelRegistry:
    """vLLM's names for the functions that register classes and list architectures."""

    register_model = staticmethod(register_model)

    @staticmethod
    def get_supported_archs() -> list[str]:
        """The architectures that are served with code of our own or a registered class."""
        return supported()


class UnknownArchitecture(ValueError):
    """No class serves this architecture; the message names the next step."""


def supported() -> list[str]:
    """The architectures that have a class of their own, without those that run on transformers' code."""
    return sorted({**ARCHITECTURES, **COMPOSITES, **_plugins(), **registered()}, key=str.lower)


def resolve(config: ModelConfig, model_impl: str = "auto", trust_remote_code: bool = False) -> type:
    """Find the class that serves `config.architecture`: our own, or transformers' code with our attention.

    Code that comes with a checkpoint is known to that checkpoint only: with `trust_remote_code` an unknown
    name goes to the fallback, which looks there.
    """
    if model_impl not in ("auto", "facet", "transformers"):
        raise ValueError(f"model_impl is {model_impl!r}, but must be one of auto, facet, transformers")
    name = config.architecture
    external = _external(name)
    has_own_class = external is not None or name in ARCHITECTURES or name in COMPOSITES
    if has_own_class and model_impl != "transformers":
        return load(name, external or _FAMILIES + ARCHITECTURES[_computed_as(config)])
    if model_impl != "facet" and (trust_remote_code or _transformers_knows(name)):
        return import_module(_FALLBACK).TransformersForCausalLM
    raise UnknownArchitecture(" ".join(_refusal(config, model_impl, has_own_class=has_own_class)))


def is_served(config: ModelConfig, model_impl: str = "auto", trust_remote_code: bool = False) -> bool:
    """Whether `resolve` has a class for `config.architecture`, importing transformers if need be."""
    if model_impl != "transformers" and config.architecture in supported():
        return True
    if model_impl == "facet":
        return False
    return (trust_remote_code and config.brings_code) or _transformers_knows(config.architecture)


def generates(architecture: str) -> bool:
    """Whether a class that a program or another distribution brings generates; names tell of our own."""
    own = _external(architecture)
    return own is not None and hasattr(load(architecture, own), "logits")


def _external(architecture: str) -> type | str | None:
    return registered().get(architecture) or _plugins().get(architecture)


def _computed_as(config: ModelConfig) -> str:
    """The architecture whose class computes the text. What a composite has beside those known is refused."""
    composite = COMPOSITES.get(config.architecture)
    if composite is None:
        return config.architecture
    kind = config.raw.get("model_type")
    if not isinstance(kind, str) or kind not in composite.texts:
        *others, last = map(repr, composite.texts)
        served = f"{', '.join(others)} and {last}" if others else last
        raise UnknownArchitecture(
            f"The text of this {config.architecture} is of the model_type {kind!r}, and only that of "
            f"{served} is served."
        )
    return composite.texts[kind]


def _transformers_knows(architecture: str) -> bool:
    return import_module(_FALLBACK).knows(architecture)


def _refusal(config: ModelConfig, model_impl: str, *, has_own_class: bool) -> Iterator[str]:
    """The sentences of the refusal: what is not served, then each next step that can work."""
    name = config.architecture
    if has_own_class:
        yield f"transformers has no causal language model named '{name}', and its code serves no other kind."
        yield "There is a class of our own for it: leave --model-impl out."
        return
    of = "" if name in config.architectures else f" (of which {config.architectures[0]} would be made)"
    nor = "" if model_impl == "facet" else ", and transformers has no causal language model of that name"
    yield f"No class of our own serves the architecture '{name}'{of}{nor}."
    if name in config.architectures and (sibling := _sibling(config)):
        yield (
            f"Its model_type is {config.raw['model_type']!r}: if it is built like those models, say "
            f"""--hf-overrides '{{"architectures": ["{sibling}"]}}'."""
        )
    if model_impl == "facet" and _transformers_knows(name):
        yield "transformers has a model of that name: leave --model-impl out."
    elif config.brings_code:
        alone = " instead of --model-impl facet" if model_impl == "facet" else ""
        yield f"The checkpoint brings code of its own: if you trust it, say --trust-remote-code{alone}."
    else:
        yield "docs/models.md lists what is served."


def _sibling(config: ModelConfig) -> str | None:
    """An architecture of the same model_type with the same kind of head: weights of others do not fit."""
    family = str(config.raw.get("model_type")).replace("-", "").replace("_", "").lower()
    near = (name for name in supported() if name.lower().startswith(family))
    return next((name for name in near if config.architecture.endswith(name[len(family) :])), None)


@cache
def _plugins() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group="facet.models")}
