"""Reads from sentence-transformers' files how texts become tokens, and how vectors are compared.

No torch: the server reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from models.config import ConfigError
from models.media.files import has_files
from models.pooling.representations import Expansion, ExpansionFile, read_expansion
from models.pooling.sentence_files import TRANSFORMERS, Module, list_modules, read_file, read_settings

_TRANSFORMER_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_PADDING = frozenset(
    ("padding", "padding_side", "pad_to_multiple_of", "truncation", "return_tensors", "logits_to_keep")
)
"""Arguments of a processor on which no vector depends."""
Similarity = Literal["cosine", "dot", "euclidean", "manhattan", "maxsim", "meanmaxsim"]
"""The last two compare a vector for each token; the mean is over the tokens of the query."""


class ChatForm(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation into which each text is put, as the model was trained."""

    add_generation_prompt: bool = False
    kwargs: dict[str, object] = {}
    """Variables for the chat template."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds its own tokens to what the template has written."""
    keeps_ending: bool = True
    """Whether a text that is cut ends as the template does."""


class TextFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the server needs: how texts become tokens, and how vectors are compared."""

    max_len: int | None = None
    lower_case: bool = False
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    suffix: str = ""
    """What is written behind each text."""
    has_special: bool = False
    """Whether the tokenizer adds no special tokens: they are in what is written, or there are none."""
    pair_end: int | None = None
    """The token behind each pair of texts, which no text can have, and by which the pair is scored."""
    chat: ChatForm | None = None
    """Set if the chat template writes each text as what a user says, and an instruction as the system."""
    similarity: Similarity = "cosine"
    """The measure by which two texts are compared."""
    truncate_dim: int | None = None
    activation: str | None = None
    """The activation of a cross-encoder's scores, as the name of a class of torch.nn."""
    query_length: int | None = None
    """The longest query in tokens, and the longest document, where a model has its own bounds for them."""
    document_length: int | None = None
    expansion: Expansion | None = None
    max_active_dims: int | None = None
    """The most numbers of a sparse vector that are not zero: the largest ones are kept."""

    def most_tokens(self, *, query: bool) -> int | None:
        """The longest text of that role, or None if it has no bound of its own."""
        if query and self.expansion is not None and self.expansion.fixed:
            return self.expansion.length
        return self.query_length if query else self.document_length


class _TransformerFile(msgspec.Struct):
    max_seq_length: int | None = None
    do_lower_case: bool = False
    modality_config: dict[str, dict[str, object]] = {}
    processing_kwargs: dict[str, dict[str, object]] = {}
    query_length: int | None = None
    document_length: int | None = None
    query_expansion: ExpansionFile | None = None


class _TokenizerFile(msgspec.Struct):
    model_max_length: Annotated[float, msgspec.Meta(ge=1)] | None = None


_NO_LENGTH = 1e9
"""What tokenizers say that cut nothing is larger."""


def read_texts(folder: Path) -> TextFacts:
    settings_path = folder / "config_sentence_transformers.json"
    settings, modules = read_settings(folder), list_modules(folder)
    places = [folder / module.path for module in modules if module.kind in TRANSFORMERS] or [folder]
    paths = (place / name for place in places for name in _TRANSFORMER_FILES)
    transformer_path = next((path for path in paths if path.is_file()), None)
    transformer = read_file(transformer_path, _TransformerFile) if transformer_path else _TransformerFile()
    embeds = any(module.kind == "Pooling" for module in modules)
    chat = None
    if embeds and transformer_path is not None:  # pairs are written by a template anyway
        chat = _chat_form(transformer_path, transformer, has_processor=has_files(folder))
    prompts, expansion = settings.all_prompts, transformer.query_expansion or settings.expansion
    if settings.default_prompt_name is not None and settings.default_prompt_name not in prompts:
        raise ConfigError(
            f"{settings_path}: 'default_prompt_name' is {settings.default_prompt_name!r}, "
            f"but there are {', '.join(prompts) or 'no prompts'}"
        )
    return TextFacts(
        max_len=transformer.max_seq_length or (_tokenizer_length(folder) if modules else None),
        has_special=any(module.kind == "StaticEmbedding" for module in modules),
        lower_case=transformer.do_lower_case,
        prompts=prompts,
        default_prompt_name=settings.default_prompt_name,
        similarity=_similarity(settings_path, settings.similarity_fn_name or _usual_similarity(modules)),
        truncate_dim=settings.truncate_dim,
        activation=settings.activation_fn,
        chat=chat,
        query_length=transformer.query_length or (None if expansion else settings.query_length),
        document_length=transformer.document_length or settings.document_length,
        expansion=None if expansion is None else read_expansion(folder, expansion),
        max_active_dims=settings.max_active_dims,
    )


def _tokenizer_length(folder: Path) -> int | None:
    """The length to which the tokenizer cuts, where sentence-transformers since version 6 keeps it alone."""
    path = folder / "tokenizer_config.json"
    length = read_file(path, _TokenizerFile).model_max_length if path.is_file() else None
    return None if length is None or length >= _NO_LENGTH else int(length)


def _usual_similarity(modules: list[Module]) -> str:
    """The measure of a model whose files name none."""
    sparse = any(module.kind in ("SpladePooling", "SparseAutoEncoder") for module in modules)
    return "dot" if sparse else "cosine"


def _chat_form(path: Path, file: _TransformerFile, *, has_processor: bool) -> ChatForm | None:
    message = file.modality_config.get("message")
    if message is None:
        return None
    for name, usual in (("method", "forward"), ("method_output_name", "last_hidden_state")):
        if message.get(name, usual) != usual:
            raise ConfigError(
                f"{path}: '{name}' of 'message' in 'modality_config' is {message[name]!r}, and only "
                f"{usual!r} is served"
            )
    for kind, given in file.processing_kwargs.items():
        if kind != "chat_template" and (unknown := sorted(given.keys() - _PADDING)):
            raise ConfigError(
                f"{path}: '{unknown[0]}' of '{kind}' in 'processing_kwargs' is not supported: vectors would "
                "differ. If it is one of a picture's settings, remove it there and say it with "
                "--mm-processor-kwargs."
            )
    kwargs = dict(file.processing_kwargs.get("chat_template", {}))
    keeps_ending = kwargs.pop("restore_suffix", True) is not False
    generation = kwargs.pop("add_generation_prompt", False) is True
    return ChatForm(
        add_generation_prompt=generation,
        kwargs=kwargs,
        add_special_tokens=has_processor,
        keeps_ending=keeps_ending,
    )


def _similarity(path: Path, name: str) -> Similarity:
    known = {similarity: similarity for similarity in get_args(Similarity)}
    similarity = known.get(name.lower())  # PyLate writes MaxSim
    if similarity is None:
        raise ConfigError(f"{path}: 'similarity_fn_name' is {name!r}, but must be one of {', '.join(known)}")
    return similarity
