"""The sparse and multi-vector forms of a text: weights of tokens, and a vector for each token.

SPLADE, BGE-M3 and the sparse and multi-vector models of sentence-transformers say so in files of their own,
which are read here as those libraries read them. No torch: weights are not read.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from models.config import ConfigError
from models.plain_files import read_text_bytes

_SPARSE_FILE, _TOKENS_FILE = "sparse_linear", "colbert_linear"
"""The layers that BGE-M3 has beside its checkpoint."""
_WEIGHT_ENDINGS = (".safetensors", ".pt")
_UNWEIGHTED = ("cls_token", "eos_token", "pad_token", "unk_token")
"""The tokens to which FlagEmbedding gives no weight."""


class Splade(msgspec.Struct, frozen=True, tag=True):
    """Weights of the vocabulary, by the logits of a head for masked tokens."""

    pooling_strategy: Literal["max", "sum"] = "max"
    activation_function: Literal["relu", "log1p_relu"] = "relu"


class TokenWeights(msgspec.Struct, frozen=True, tag=True):
    """A weight for each token of the text, of which the largest counts where a token stands several times."""

    file: str
    """The file of the linear layer, beside the checkpoint."""
    without: tuple[int, ...] = ()
    """Tokens that get no weight."""


class TokenPooling(msgspec.Struct, frozen=True, kw_only=True):
    """Similar tokens' vectors become one, the mean of their group, by Ward's clustering."""

    pool_factor: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    """How many times fewer vectors remain."""
    num_protected_tokens: Annotated[int, msgspec.Meta(ge=0)] = 1
    """Vectors at the beginning that stay as they are."""
    normalize_embeddings: bool = False
    tasks: str | tuple[str, ...] = ("document",)


class TokenVectors(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that have vectors, and what becomes of these."""

    file: str = ""
    """The file of a linear layer beside the checkpoint; empty if there is none."""
    first: int = 0
    """The tokens at the beginning that have no vector."""
    skipped: tuple[int, ...] = ()
    """Tokens that have none where they stand in a text of one of these roles:"""
    skipped_in: tuple[str, ...] = ("document",)
    kept: tuple[int, ...] = ()
    """The only tokens of documents that have one, if there are any."""
    pooling: TokenPooling | None = None

    def counts(self, tokens: Sequence[int], *, query: bool) -> Sequence[int]:
        """The positions whose vectors count. A text that is no query is a document."""
        skipped = self.skipped if ("query" if query else "document") in self.skipped_in else ()
        kept = () if query else self.kept
        if not skipped and not kept:
            return range(min(self.first, len(tokens)), len(tokens))
        return [
            at
            for at, token in enumerate(tokens)
            if at >= self.first and token not in skipped and (not kept or token in kept)
        ]

    def pools(self, *, query: bool) -> bool:
        """Whether vectors of such a text become fewer or are normalised."""
        return self.pooling is not None and ("query" if query else "document") in _listed(self.pooling.tasks)


class CosineScores(msgspec.Struct, frozen=True, gc=False):
    """Makes scores of cosines between pictures and texts: scale * cosine + bias, activated."""

    scale: float
    bias: float
    activation: Literal["softmax", "sigmoid"]
    """Softmax divides one among all texts that a picture is compared with; sigmoid takes each for itself."""


class MaskFile(msgspec.Struct, frozen=True):
    """The fields of a MultiVectorMask: words whose tokens are skipped, or ids of those that are kept."""

    skiplist_words: tuple[str, ...] = ()
    skiplist_tasks: str | tuple[str, ...] | None = None
    keep_only_token_ids: tuple[int, ...] | None = None

    @property
    def skipped_in(self) -> tuple[str, ...]:
        return ("document",) if self.skiplist_tasks is None else _listed(self.skiplist_tasks)


PUNCTUATION = MaskFile(skiplist_words=tuple(string.punctuation))
"""What PyLate skips if a checkpoint does not say."""


class ExpansionFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Transformer's settings by which queries are filled up."""

    strategy: Literal["fixed", "min"]
    length: Annotated[int, msgspec.Meta(ge=1)]
    attend: bool = False
    token: str | None = None


class Expansion(msgspec.Struct, frozen=True, kw_only=True):
    """Queries are filled up by a token to a length. Each such token has a vector that is compared."""

    length: int
    token: int
    fixed: bool
    """Whether longer queries are cut, and not only shorter ones filled up."""
    attends: bool
    """Whether other tokens see these."""


def _listed(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def read_flag_heads(folder: Path) -> tuple[TokenWeights | None, TokenVectors | None]:
    """The heads of BGE-M3, if their files lie beside the checkpoint."""
    sparse, tokens = _weight_file(folder, _SPARSE_FILE), _weight_file(folder, _TOKENS_FILE)
    weights = None
    if sparse is not None:
        names = special_names(folder)
        unweighted = find_token_ids(folder, [names[kind] for kind in _UNWEIGHTED if kind in names])
        weights = TokenWeights(sparse, tuple(id for id in unweighted if id is not None))
    return weights, None if tokens is None else TokenVectors(file=tokens, first=1)


def _weight_file(folder: Path, name: str) -> str | None:
    return next((name + end for end in _WEIGHT_ENDINGS if (folder / (name + end)).is_file()), None)


def token_vectors(folder: Path, mask: MaskFile | None, pooling: TokenPooling | None) -> TokenVectors:
    """The tokens that have vectors by the modules of a multi-vector model."""
    mask = mask or MaskFile()
    ids = find_token_ids(folder, mask.skiplist_words)
    return TokenVectors(
        skipped=tuple(sorted({id for id in ids if id is not None})),  # others are several tokens, which count
        skipped_in=mask.skipped_in,
        kept=mask.keep_only_token_ids or (),
        pooling=pooling,
    )


def read_expansion(folder: Path, file: ExpansionFile) -> Expansion:
    names = special_names(folder)
    token = file.token or names.get("mask_token") or names.get("eos_token")
    found = None if token is None else find_token_ids(folder, [token])[0]
    if found is None:
        raise ConfigError(
            f"{folder}: queries are filled up with the token {token!r}, which its tokenizer does not have"
        )
    return Expansion(length=file.length, token=found, fixed=file.strategy == "fixed", attends=file.attend)


class _Names(msgspec.Struct):
    cls_token: object = None
    eos_token: object = None
    pad_token: object = None
    unk_token: object = None
    mask_token: object = None


def special_names(folder: Path) -> dict[str, str]:
    """The texts of special tokens by their kinds, as far as files beside the tokenizer say them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        try:
            said = msgspec.to_builtins(msgspec.json.decode(read_text_bytes(folder / name), type=_Names))
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{folder / name}: {error}") from None
        for kind, token in said.items():
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                found[kind] = content
    return found


def find_token_ids(folder: Path, names: Sequence[str]) -> list[int | None]:
    """The ids of tokens; None for a text that is no token."""
    if not names:
        return []
    from tokenizers import Tokenizer  # a worker needs it for nothing else, and may not have it

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} is needed to look up the tokens {', '.join(map(repr, names[:3]))}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return [tokenizer.token_to_id(name) for name in names]
