"""The decision what a checkpoint is served as, and which class is built for it.

It goes by --runner, --convert, the architecture's name and files, before any model code is loaded: no torch.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec

from models.config import ConfigError, ModelConfig
from models.plain_files import read_tensor_header
from models.pooling.config import scores_by_tokens
from models.pooling.sentence_files import makes_scores, makes_vectors
from models.registry import generates, is_served, supported

logger = logging.getLogger(__name__)

Runner = Literal["generate", "pooling"]
Convert = Literal["none", "embed", "classify", "reward"]


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """The decision: a model is served by `runner`, from the class of `architecture`, changed by `convert`."""

    runner: Runner
    convert: Convert
    architecture: str
    """The architecture whose class is built: the checkpoint's own, or the generating one to be converted."""
    labels_tokens: bool = False
    """True if a classifier's labels are for single tokens, never for a whole text."""


# The first suffix that an architecture's name ends with says what it was made for.
_SUFFIXES: tuple[tuple[str, Runner, Convert], ...] = (
    ("ForCausalLM", "generate", "none"),
    ("ForConditionalGeneration", "generate", "none"),
    ("ChatModel", "generate", "none"),
    ("LMHeadModel", "generate", "none"),
    ("MTModel", "generate", "none"),
    ("ForTextEncoding", "pooling", "embed"),
    ("EmbeddingModel", "pooling", "embed"),
    ("ForRetrieval", "pooling", "embed"),
    ("ForMaskedLM", "pooling", "embed"),
    ("ForRanking", "pooling", "classify"),
    ("ClassificationModel", "pooling", "classify"),
    ("ForRewardModeling", "pooling", "reward"),
    ("ForProcessRewardModel", "pooling", "reward"),
    ("ForRewardModel", "pooling", "reward"),
    ("RewardModel", "pooling", "reward"),
    ("Model", "pooling", "embed"),
)
_CLASSIFIER = re.compile(r"(.+?)For(?:[A-Z]\w*)?Classification")
"""A classifier's name, whatever it classifies: sequences, tokens, questions, images."""
_GENERATING = {
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "Gemma3TextForSequenceClassification": "Gemma3ForCausalLM",
    "Gemma3nTextModel": "Gemma3nForCausalLM",
}
"""Generating classes whose names are not the same with another ending."""


def resolve_conversion(
    config: ModelConfig,
    folder: Path,
    *,
    runner: str = "auto",
    convert: str = "auto",
    model_impl: str = "auto",
    trust_remote_code: bool = False,
) -> Conversion:
    """Decide how to serve the first architecture that is served; what cannot be is refused."""
    _check("runner", runner, get_args(Runner))
    _check("convert", convert, get_args(Convert))
    case = _choose(config, folder, model_impl, trust_remote_code)
    chosen = case.runner(convert) if runner == "auto" else runner
    return case.pooling(convert) if chosen == "pooling" else case.generating(convert)


def _choose(config: ModelConfig, folder: Path, model_impl: str, trust_remote_code: bool) -> _Case:
    names = config.architectures
    if len(names) < 2:
        return _Case(config, folder)
    for name in names:
        case = _Case(msgspec.structs.replace(config, architecture=name), folder)
        built = msgspec.structs.replace(config, architecture=case.built)
        if is_served(built, model_impl, trust_remote_code):
            logger.info("config.json names the architectures %s: %s is served", ", ".join(names), name)
            return case
    raise ConfigError(
        f"config.json names the architectures {', '.join(names)}, none of which is served; "
        "docs/models.md lists those that are"
    )


class _Case:
    """One architecture of a checkpoint, and what it can be served as."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.name = config.architecture
        self.made_for: Runner
        self.kind: Convert
        self.stem, self.made_for, self.kind = _read_name(self.name)
        if self.made_for == "pooling" and generates(self.name):
            self.made_for, self.kind = "generate", "none"  # whatever its name says, its class generates
        self.own_class = self.name in supported()

    @property
    def generates(self) -> bool:
        return self.made_for != "pooling"

    @property
    def built(self) -> str:
        """The architecture whose class is loaded, if it is to do what it was made for."""
        return self.name if self.own_class else self._generating_class()

    @property
    def is_native(self) -> bool:
        """Whether there is a class that pools by itself."""
        return self.own_class and not self.generates

    def runner(self, convert: str) -> Runner:
        if convert not in ("auto", "none"):
            return "pooling"
        if convert == "none" and self.generates:
            return "generate"
        pools = makes_vectors(self.folder) or makes_scores(self.folder)
        return "pooling" if pools else self.made_for

    def pooling(self, convert: str) -> Conversion:
        if self.is_native:
            self._tell_what_stays(convert)
            return self._as("pooling", "none", self.name)
        if convert == "none":
            raise ConfigError(
                f"{self.name} generates, and does not pool by itself: "
                "say --convert embed or --convert classify beside --runner pooling"
            )
        chosen = self._natural_convert() if convert == "auto" else cast("Convert", convert)
        return self._as("pooling", chosen, self._generating_class())

    def generating(self, convert: str) -> Conversion:
        """A model that generates may pool as well; `convert` says what it must be able to do."""
        if not self.generates:
            raise ConfigError(self._cannot_generate())
        if looks_ahead(self.config):
            raise ConfigError(
                f"this {self.name} attends in both directions, so it cannot generate; use --runner pooling"
            )
        if convert == "reward" or (convert == "classify" and not self._scores_by_tokens()):
            raise ConfigError(
                f"--runner generate with --convert {convert}: a model that generates has no head but the "
                "one for tokens. Use --runner pooling, or let tokens be the labels: --hf-overrides "
                """'{"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}'"""
            )
        return self._as("generate", "none" if convert == "auto" else cast("Convert", convert), self.name)

    def _natural_convert(self) -> Convert:
        if self._scores_by_tokens():
            return "classify"
        if self.generates or (self.kind == "reward" and not self._has_rewards()):
            return "embed"
        return self.kind

    def _has_rewards(self) -> bool:
        """Whether the files have a head for rewards. Pickles, which are read only to be loaded, may have."""
        files = list(self.folder.glob("*.safetensors"))
        if any("score.weight" in read_tensor_header(path) for path in files):
            return True
        return not files and any(path.suffix in (".bin", ".pt") for path in self.folder.iterdir())

    def _scores_by_tokens(self) -> bool:
        return scores_by_tokens(self.config) or makes_scores(self.folder)

    def _generating_class(self) -> str:
        """XForCausalLM, or XLMHeadModel, for XModel or XForSequenceClassification: ours or transformers'."""
        if self.generates:
            return self.name
        known = supported()
        names = [_GENERATING.get(self.name, ""), f"{self.stem}ForCausalLM", f"{self.stem}LMHeadModel"]
        return next((name for name in names if name in known), f"{self.stem}ForCausalLM")

    def _cannot_generate(self) -> str:
        message = f"{self.name} has no head that generates: serve it with --runner pooling"
        sibling = self._generating_class()
        if sibling not in supported():
            return message
        override = f"""--hf-overrides '{{"architectures": ["{sibling}"]}}'"""
        return f"{message}; or, if the checkpoint has one, say {override}"

    def _tell_what_stays(self, convert: str) -> None:
        """Logs that a model which pools by itself keeps its own head, whatever `convert` asks for."""
        if convert in ("auto", "none", self.kind):
            return
        trunk = f"{self.stem}Model"
        way = ""
        if convert == "embed" and trunk in supported():
            way = f"""; to embed, serve its trunk with --hf-overrides '{{"architectures": ["{trunk}"]}}'"""
        logger.warning(
            "--convert %s changes nothing: %s keeps its own head, and will %s%s",
            convert,
            self.name,
            _DOES[self.kind],
            way,
        )

    def _as(self, runner: Runner, convert: Convert, architecture: str) -> Conversion:
        return Conversion(
            runner=runner,
            convert=convert,
            architecture=architecture,
            labels_tokens=self.name.endswith("ForTokenClassification") or convert == "reward",
        )


_DOES = {"embed": "embed", "classify": "classify", "reward": "give rewards"}


def looks_ahead(config: ModelConfig) -> bool:
    """Whether a decoder was made an encoder, whose tokens see the whole text."""
    return config.raw.get("is_causal") is False or config.raw.get("use_bidirectional_attention") is True


def stem(architecture: str) -> str:
    """The name of the family in an architecture's name: Qwen3 in Qwen3ForCausalLM."""
    return _read_name(architecture)[0]


def _read_name(name: str) -> tuple[str, Runner, Convert]:
    """Split a name: -> (the family, what models with this ending were made for, and which kind they are)."""
    for suffix, runner, convert in _SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix), runner, convert
    if classifier := _CLASSIFIER.fullmatch(name):
        return classifier[1], "pooling", "classify"
    return name, "generate", "none"


def _check(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value != "auto" and value not in allowed:
        raise ConfigError(f"--{option} {value}: must be one of auto, {', '.join(allowed)}")
