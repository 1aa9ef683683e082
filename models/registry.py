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

_CLASSES = {
    "contrastive": "CLIPModel Siglip2Model SiglipModel",
    "decoders.bloom_falcon_mpt": "BloomForCausalLM FalconForCausalLM MptForCausalLM",
    "decoders.cohere": "Cohere2ForCausalLM CohereForCausalLM",
    "decoders.gemma.gemma": "Gemma2ForCausalLM Gemma3ForCausalLM GemmaForCausalLM",
    "decoders.gemma.gemma3n": "Gemma3nForCausalLM",
    "decoders.gemma.gemma4": "Gemma4ForCausalLM Gemma4UnifiedForCausalLM",
    "decoders.gpt": """
        GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM NemotronForCausalLM
        OPTForCausalLM PhiForCausalLM Starcoder2ForCausalLM
    """,
    "decoders.llama": """
        ApertusForCausalLM ArceeForCausalLM Exaone4ForCausalLM Glm4ForCausalLM GlmForCausalLM
        GraniteForCausalLM HeliumForCausalLM HunYuanDenseV1ForCausalLM InternLM2ForCausalLM LlamaForCausalLM
        Ministral3ForCausalLM MistralForCausalLM Phi3ForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM
        SeedOssForCausalLM SmolLM3ForCausalLM StableLmForCausalLM
    """,
    "decoders.olmo": "Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM",
    "encoder_decoders.bart": """
        BartForConditionalGeneration MarianMTModel MBartForConditionalGeneration
        PegasusForConditionalGeneration
    """,
    "encoder_decoders.t5": "MT5ForConditionalGeneration T5ForConditionalGeneration",
    "encoder_decoders.whisper": "WhisperForConditionalGeneration",
    "gliner": "GLiNERModel",
    "hybrids.bamba": "BambaForCausalLM FalconH1ForCausalLM GraniteMoeHybridForCausalLM JambaForCausalLM",
    "hybrids.delta": "KimiLinearForCausalLM OlmoHybridForCausalLM Qwen3NextForCausalLM",
    "hybrids.lfm2": "Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM",
    "hybrids.mamba": "FalconMambaForCausalLM Mamba2ForCausalLM MambaForCausalLM NemotronHForCausalLM",
    "latent": """
        DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM
        GlmMoeDsaForCausalLM MiniCPM3ForCausalLM Mistral4ForCausalLM YoutuForCausalLM
    """,
    "mixtures": """
        Dots1ForCausalLM Glm4MoeForCausalLM GptOssForCausalLM GraniteMoeForCausalLM MiniMaxM2ForCausalLM
        MixtralForCausalLM OlmoeForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM
    """,
    "reward": "InternLM2ForRewardModel Qwen2ForProcessRewardModel Qwen2ForRewardModel",
    "static": "StaticModel",
}
"""The classes that are named as the architectures which they serve, by their modules."""

_OTHER_NAMES = {
    "DeepseekOcr2ForConditionalGeneration": "latent:DeepseekV2WithHeadsForCausalLM",
    "Ernie4_5_MoeForCausalLM": "mixtures:Ernie45MoeForCausalLM",
    "Ernie4_5ForCausalLM": "decoders.llama:Ernie45ForCausalLM",
    "GraniteMoeSharedForCausalLM": "mixtures:GraniteMoeForCausalLM",
    "KimiK2ForCausalLM": "latent:DeepseekV3ForCausalLM",
    "MPTForCausalLM": "decoders.bloom_falcon_mpt:MptForCausalLM",
    "Qwen3_5ForCausalLM": "hybrids.delta:Qwen35ForCausalLM",
    "Qwen3_5MoeForCausalLM": "hybrids.delta:Qwen35MoeForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "mixtures:Qwen3VLMoeForCausalLM",
    "UMT5ForConditionalGeneration": "encoder_decoders.t5:T5ForConditionalGeneration",
    **{f"{name}EncoderModel": "encoder_decoders.t5:T5EncoderModel" for name in ("T5", "MT5", "UMT5")},
}
"""The classes of other architectures."""

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

ARCHITECTURES: dict[str, str] = {
    **{name: f"{module}:{name}" for module, names in _CLASSES.items() for name in names.split()},
    **_OTHER_NAMES,
} | {
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
