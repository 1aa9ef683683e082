"""The config.json of the model in a GGUF file, whose metadata says the same in other words. No torch."""

from __future__ import annotations

from models.gguf.families import DENSE
from models.gguf.fields import Fields
from models.gguf.file import GgufFile
from models.gguf.gemma import GEMMAS
from models.gguf.hybrids import HYBRIDS
from models.gguf.mixtures import WITH_EXPERTS
from models.gguf.tensor_mapping import placed_tensors
from models.plain_files import FileError
from models.quantization.methods.gguf import PLAIN, module_of_all

FAMILIES = {**DENSE, **GEMMAS, **WITH_EXPERTS, **HYBRIDS}
"""The architectures that are read, by the name that the field `general.architecture` has."""

_RANKS = 4
_FILE_TYPES = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S"), start=7)),
    **dict(enumerate(("Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S"), start=15)),
    **dict(enumerate(("IQ3_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S"), start=22)),
    **dict(enumerate(("IQ2_M", "IQ4_XS", "IQ1_M", "BF16"), start=29)),
    **dict(enumerate(("TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0"), start=36)),
}
"""llama.cpp's names of mixtures of codings, by the number in `general.file_type`."""


def raw_config(file: GgufFile) -> dict[str, object]:
    """The config.json of the model in a file. Raises FileError if a field is missing, or cannot be served."""
    fields = Fields(file)
    family = FAMILIES.get(fields.scope)
    if family is None:
        raise FileError(
            f"{file.path}: general.architecture is '{fields.scope}', which is not read from GGUF files, but "
            f"only {', '.join(FAMILIES)}: use the model's own checkpoint"
        )
    if fields.number("pooling_type") == _RANKS and "cls.weight" not in file.tensors:
        raise fields.wrong(
            "pooling_type",
            "is 4, a reranker's, which is read with the head of BERT alone (cls.weight): use the model's own "
            "checkpoint",
        )
    raw: dict[str, object] = {"architectures": [family.architecture], "model_type": family.model_type}
    for name, key in family.needed.items():
        raw[name] = fields.need(key)
    for name, key in family.others.items():
        if (value := fields.number(key)) is not None:
            raw[name] = value
    raw |= family.fixed
    raw |= {
        "vocab_size": fields.rows("token_embd.weight"),
        "dtype": _dtype(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "quantization_config": _quantization(file),
        **fields.token_ids(),
    }
    return raw | family.more(fields, raw)


def _dtype(file: GgufFile) -> str:
    """The number type to serve the model in: no file says in which it was trained."""
    matrices = {tensor.coding for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return "float32" if matrices <= {"F32"} else "bfloat16"


def _quantization(file: GgufFile) -> dict[str, object]:
    """How the matrices are stored, by the names of their modules in the model's own checkpoint."""
    codings = {
        module_of_all(place.name.removesuffix(".weight")): tensor.coding
        for place, tensor in placed_tensors(file)
        if tensor.coding not in PLAIN
    }
    return {"quant_method": "gguf", "file_type": file_type(file), "codings": codings}


def file_type(file: GgufFile) -> str:
    """llama.cpp's name of the mixture of codings, or else the coding that most of the weights have."""
    number = file.metadata.get("general.file_type")
    if isinstance(number, int) and number in _FILE_TYPES:
        return _FILE_TYPES[number]
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.coding] = sizes.get(tensor.coding, 0) + tensor.nbytes
    return max(sizes, key=lambda name: sizes[name], default="F32")
