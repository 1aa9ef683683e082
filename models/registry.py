"""Which class serves which architecture.

Values are "module:Class" strings: the list costs no import, a model's code is loaded when it is needed. Other
distributions add theirs through the entry-point group "facet.models"; where a name is known twice, the one
that was installed or registered on purpose wins.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

ARCHITECTURES: dict[str, str] = {
    "AlbertForMaskedLM": "models.albert:AlbertModel",
    "AlbertForSequenceClassification": "models.albert:AlbertForSequenceClassification",
    "AlbertForTokenClassification": "models.albert:AlbertForTokenClassification",
    "AlbertModel": "models.albert:AlbertModel",
    "BertForMaskedLM": "models.bert:BertModel",
    "BertForSequenceClassification": "models.bert:BertForSequenceClassification",
    "BertForTokenClassification": "models.bert:BertForTokenClassification",
    "BertModel": "models.bert:BertModel",
    "CamembertForMaskedLM": "models.bert:RobertaModel",
    "CamembertForSequenceClassification": "models.bert:RobertaForSequenceClassification",
    "CamembertForTokenClassification": "models.bert:RobertaForTokenClassification",
    "CamembertModel": "models.bert:RobertaModel",
    "DistilBertForMaskedLM": "models.distilbert:DistilBertModel",
    "DistilBertForSequenceClassification": "models.distilbert:DistilBertForSequenceClassification",
    "DistilBertForTokenClassification": "models.distilbert:DistilBertForTokenClassification",
    "DistilBertModel": "models.distilbert:DistilBertModel",
    "ElectraForMaskedLM": "models.bert:ElectraModel",
    "ElectraForSequenceClassification": "models.bert:ElectraForSequenceClassification",
    "ElectraForTokenClassification": "models.bert:ElectraForTokenClassification",
    "ElectraModel": "models.bert:ElectraModel",
    "Gemma2ForCausalLM": "models.gemma:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "models.gemma:Gemma3ForCausalLM",
    "GemmaForCausalLM": "models.gemma:GemmaForCausalLM",
    "GPT2LMHeadModel": "models.gpt2:GPT2LMHeadModel",
    "GraniteForCausalLM": "models.granite:GraniteForCausalLM",
    "GteForMaskedLM": "models.gte:GteModel",
    "GteForSequenceClassification": "models.gte:GteForSequenceClassification",
    "GteForTokenClassification": "models.gte:GteForTokenClassification",
    "GteModel": "models.gte:GteModel",
    "InternLM2ForCausalLM": "models.internlm2:InternLM2ForCausalLM",
    "InternLM2ForRewardModel": "models.reward:InternLM2ForRewardModel",
    "LlamaForCausalLM": "models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "models.llama:MistralForCausalLM",
    "ModernBertForMaskedLM": "models.modernbert:ModernBertModel",
    "ModernBertForSequenceClassification": "models.modernbert:ModernBertForSequenceClassification",
    "ModernBertForTokenClassification": "models.modernbert:ModernBertForTokenClassification",
    "ModernBertModel": "models.modernbert:ModernBertModel",
    "MPNetForMaskedLM": "models.mpnet:MPNetModel",
    "MPNetForSequenceClassification": "models.mpnet:MPNetForSequenceClassification",
    "MPNetForTokenClassification": "models.mpnet:MPNetForTokenClassification",
    "MPNetModel": "models.mpnet:MPNetModel",
    "NewForMaskedLM": "models.gte:GteModel",
    "NewForSequenceClassification": "models.gte:GteForSequenceClassification",
    "NewForTokenClassification": "models.gte:GteForTokenClassification",
    "NewModel": "models.gte:GteModel",
    "NomicBertForMaskedLM": "models.nomic_bert:NomicBertModel",
    "NomicBertForSequenceClassification": "models.nomic_bert:NomicBertForSequenceClassification",
    "NomicBertForTokenClassification": "models.nomic_bert:NomicBertForTokenClassification",
    "NomicBertModel": "models.nomic_bert:NomicBertModel",
    "Olmo2ForCausalLM": "models.olmo2:Olmo2ForCausalLM",
    "OPTForCausalLM": "models.opt:OPTForCausalLM",
    "Phi3ForCausalLM": "models.phi3:Phi3ForCausalLM",
    "Qwen2ForCausalLM": "models.qwen2:Qwen2ForCausalLM",
    "Qwen2ForProcessRewardModel": "models.reward:Qwen2ForProcessRewardModel",
    "Qwen2ForRewardModel": "models.reward:Qwen2ForRewardModel",
    "Qwen3ForCausalLM": "models.qwen3:Qwen3ForCausalLM",
    "RobertaForMaskedLM": "models.bert:RobertaModel",
    "RobertaForSequenceClassification": "models.bert:RobertaForSequenceClassification",
    "RobertaForTokenClassification": "models.bert:RobertaForTokenClassification",
    "RobertaModel": "models.bert:RobertaModel",
    "SmolLM3ForCausalLM": "models.smollm3:SmolLM3ForCausalLM",
    "XLMRobertaForMaskedLM": "models.bert:RobertaModel",
    "XLMRobertaForSequenceClassification": "models.bert:RobertaForSequenceClassification",
    "XLMRobertaForTokenClassification": "models.bert:RobertaForTokenClassification",
    "XLMRobertaModel": "models.bert:RobertaModel",
}

_FALLBACK = "models.transformers_fallback"
_registered: dict[str, str] = {}


class UnknownArchitecture(ValueError):
    """No class serves this architecture; the message names the nearest that are served, and the next step."""


def register_model(architecture: str, path: str) -> None:
    """Serve `architecture` with the class at `path`, written "module:Class"."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{path!r} does not name a class; write it as 'module:Class'")
    _registered[architecture] = path


def supported() -> list[str]:
    """The architectures that have a class of their own, without those that run on transformers' code."""
    return sorted({**ARCHITECTURES, **_plugins(), **_registered}, key=str.lower)


def resolve(architecture: str, model_impl: str = "auto", trust_remote_code: bool = False) -> type:
    """The class that serves `architecture`: our own, or else transformers' code with our attention.

    Code that comes with a checkpoint is known to that checkpoint only: with `trust_remote_code` an unknown
    name goes to the fallback, which looks there.
    """
    if model_impl not in ("auto", "facet", "transformers"):
        raise ValueError(f"model_impl is {model_impl!r}, but must be one of auto, facet, transformers")
    path = _registered.get(architecture) or _plugins().get(architecture) or ARCHITECTURES.get(architecture)
    if path is not None and model_impl != "transformers":
        return _load(path)
    if model_impl == "facet":
        raise UnknownArchitecture(f"{_unknown(architecture)} Or try --model-impl transformers.")
    fallback = import_module(_FALLBACK)
    if not trust_remote_code and not fallback.knows(architecture):
        raise UnknownArchitecture(
            f"{_unknown(architecture)} Nor has transformers a causal language model of that name. If the "
            "checkpoint brings its own code, and you trust it, add --trust-remote-code."
        )
    return fallback.TransformersForCausalLM


def _unknown(architecture: str) -> str:
    message = f"No class serves the architecture '{architecture}'."
    near = get_close_matches(architecture, supported(), n=3)
    if not near:
        return f"{message} Those served are {', '.join(supported())}."
    return (
        f"{message} The nearest that are served: {', '.join(near)}. "
        f"""To use one, say --hf-overrides '{{"architectures": ["{near[0]}"]}}'."""
    )


@cache
def _plugins() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group="facet.models")}


def _load(path: str) -> type:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
