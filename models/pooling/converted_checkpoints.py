"""Converts checkpoints of other layouts into folders that look like any other; each is made once.

No torch. Static vectors (model2vec's, and sentence-transformers' module) have no layers and often no
config.json. GLiNER's settings are in a file of another name. A checkpoint of Stanford's ColBERT says in a
file of its own how it reads texts, and has its last layer among the weights of BERT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from models.made_folder import link, made_once, write_json, write_tensors
from models.plain_files import FileError, read_object, read_tensor_header
from models.pooling import routed_folder
from models.pooling.entity_files import GLINER_FILE, make_config
from models.pooling.sentence_files import list_modules, read_file

_STATIC = "StaticEmbedding"
_STATIC_MODULE = {"idx": 0, "name": "0", "path": "", "type": f"sentence_transformers.models.{_STATIC}"}
_NORMALIZE = {"idx": 1, "name": "1", "path": "1_Normalize", "type": "sentence_transformers.models.Normalize"}
_LONGEST = 32768
"""The longest text of static vectors, which have no bound of their own."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_WEIGHTS = "model.safetensors"
_METADATA = "artifact.metadata"

_Size = Annotated[int, msgspec.Meta(ge=1)]


class _Colbert(msgspec.Struct, frozen=True):
    """The fields of artifact.metadata."""

    query_token_id: str = "[unused0]"
    doc_token_id: str = "[unused1]"
    query_maxlen: _Size = 32
    doc_maxlen: _Size = 220
    attend_to_mask_tokens: bool = False
    mask_punctuation: bool = True
    similarity: str = "cosine"


def find_or_make(folder: Path, make_private: Callable[[str, Path], Path]) -> Path:
    """The folder itself, or the one that is made of it; `make_private` finds a place for it by a name.

    Raises FileError.
    """
    modules = list_modules(folder)
    if modules and modules[0].kind == _STATIC:
        return _make_static(folder, folder / modules[0].path, make_private("static", folder))
    if routed_folder.is_routed(folder):
        return routed_folder.make_folder(folder, make_private("routed", folder))
    path = folder / "config.json"
    if not path.is_file():
        is_gliner = (folder / GLINER_FILE).is_file()
        return _make_gliner(folder, make_private("gliner", folder)) if is_gliner else folder
    config = read_object(path)
    if config.get("model_type") == "model2vec" or config.get("architectures") == ["StaticModel"]:
        return _make_static(folder, folder, make_private("static", folder))
    if config.get("architectures") == ["HF_ColBERT"]:
        return _make_colbert(folder, config, make_private("colbert", folder))
    return folder


def _make_gliner(folder: Path, cache: Path) -> Path:
    others = sorted(path for path in folder.iterdir() if path.is_file())

    def fill(made: Path) -> None:
        write_json(made / "config.json", make_config(folder))
        link(made, others)

    return made_once(cache, others, Path(__file__).parent, fill)


def _make_static(folder: Path, own: Path, cache: Path) -> Path:
    """`own` has the weights and the tokenizer."""
    weights, names = own / _WEIGHTS, ("config.json", "modules.json", "config_sentence_transformers.json")
    beside = [folder / name for name in names if (folder / name).is_file()]
    tokenizer = [own / name for name in _TOKENIZER if (own / name).is_file()]

    def fill(made: Path) -> None:
        said = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
        if "vocab_size" in said:  # it was made here
            config = said
        else:
            config = _static_config(weights)
        write_json(made / "config.json", config)
        if (folder / "modules.json").is_file():
            modules = folder.glob("[1-9]_*")
            link(made, [folder / "modules.json", *modules])
        else:
            normalize = [_NORMALIZE] if said.get("normalize") else []
            write_json(made / "modules.json", [_STATIC_MODULE, *normalize])
        link(made, [weights, *tokenizer, *(path for path in beside if path.name not in names[:2])])

    _require(weights)
    return made_once(cache, [weights, *tokenizer, *beside], Path(__file__).parent, fill)


def _static_config(weights: Path) -> dict[str, object]:
    tensors = read_tensor_header(weights)
    table = tensors.get("embedding.weight") or tensors.get("embeddings")
    if table is None or len(table.shape) != 2:
        raise FileError(f"{weights} has neither 'embedding.weight' nor 'embeddings', a vector for each token")
    rows, size = table.shape
    mapping = tensors.get("mapping")
    return {
        "architectures": ["StaticModel"],
        "model_type": "static",
        "vocab_size": rows if mapping is None else mapping.shape[0],
        "rows": rows,
        "hidden_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": _LONGEST,
    }


def _make_colbert(folder: Path, config: Mapping[str, object], cache: Path) -> Path:
    weights, metadata = folder / _WEIGHTS, folder / _METADATA
    if config.get("model_type") != "bert":
        raise FileError(f"{folder}: only a ColBERT made of BERT is read, not of {config.get('model_type')!r}")
    said = read_file(metadata, _Colbert) if metadata.is_file() else _Colbert()
    if said.similarity != "cosine":
        raise FileError(f"{metadata}: 'similarity' is {said.similarity!r}, and only 'cosine' is served")
    files = [folder / name for name in _TOKENIZER if (folder / name).is_file()]
    beside = [*files, *([metadata] if metadata.is_file() else [])]

    def fill(made: Path) -> None:
        dtype, shape, values = _tensor(weights, "linear.weight")
        write_json(made / "config.json", {**config, "architectures": ["BertModel"]})
        settings = {
            "model_type": "ColBERT",
            "similarity_fn_name": "MaxSim",
            "query_prefix": said.query_token_id,
            "document_prefix": said.doc_token_id,
            "query_length": said.query_maxlen,
            "document_length": said.doc_maxlen,
            "attend_to_expansion_tokens": said.attend_to_mask_tokens,
            **({} if said.mask_punctuation else {"skiplist_words": []}),
        }
        write_json(made / "config_sentence_transformers.json", settings)
        kinds = ("sentence_transformers.models.Transformer", ""), ("pylate.models.Dense.Dense", "1_Dense")
        modules = [
            {"idx": index, "name": str(index), "path": path, "type": kind}
            for index, (kind, path) in enumerate(kinds)
        ]
        write_json(made / "modules.json", modules)
        (made / "1_Dense").mkdir()
        dense = {
            "in_features": shape[1],
            "out_features": shape[0],
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        write_json(made / "1_Dense" / "config.json", dense)
        write_tensors(made / "1_Dense" / _WEIGHTS, {"linear.weight": (dtype, shape, values)})
        link(made, [weights, *files])

    _require(weights)
    return made_once(cache, [folder / "config.json", weights, *beside], Path(__file__).parent, fill)


def _require(weights: Path) -> None:
    if not weights.is_file():
        raise FileError(f"{weights} is missing: of such models it is the only form of weights that is read")


def _tensor(path: Path, name: str) -> tuple[str, tuple[int, ...], bytes]:
    """The number type, the shape and the bytes of a matrix."""
    found = read_tensor_header(path).get(name)
    if found is None or len(found.shape) != 2:
        raise FileError(f"{path} has no matrix {name!r}, which makes vectors of ColBERT's tokens")
    with path.open("rb") as file:
        file.seek(found.start)
        return found.dtype, found.shape, file.read(found.stop - found.start)
