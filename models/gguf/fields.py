"""Typed look-ups in the metadata of a GGUF file, which name file and field if they fail. No torch."""

from __future__ import annotations

import struct
from array import array
from contextlib import suppress

from models.gguf.file import GgufFile, Value
from models.plain_files import FileError


class Fields:
    """Typed look-ups in the metadata, by names without the architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        scope = file.metadata.get("general.architecture")
        if not isinstance(scope, str):
            raise FileError(
                f"{file.path}: the field general.architecture is missing; the file holds no model"
            )
        self.scope = scope

    def get(self, key: str) -> Value | None:
        return self.file.metadata.get(f"{self.scope}.{key}")

    def number(self, key: str) -> int | float | None:
        """A number; an array with one for each layer must have the same everywhere."""
        value = self.get(key)
        if isinstance(value, array):
            if len(set(value)) != 1:
                shown = ", ".join(map(str, value[:4]))
                raise self.wrong(key, f"differs from layer to layer ({shown} ...), which is not served")
            value = value[0]
        if isinstance(value, float):
            return shortest(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self.wrong(key, f"must be a number, not {str(value)[:60]!r}")

    def by_layer(self, key: str, count: int, least: int = 1) -> list[int]:
        """A number of at least `least` for each of so many layers, which a file may say once for all."""
        value = self.get(key)
        numbers = list(value) if isinstance(value, array) else [value] * count
        found = [number for number in numbers if isinstance(number, int) and number >= least]
        if len(found) != count:
            what = "a positive number" if least else "a number that is not negative"
            raise self.wrong(key, f"must be {what}, or one for each of {count} layers")
        return found

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(key, f"must be true or false, not {str(value)[:60]!r}")

    def need(self, key: str) -> int | float:
        if (value := self.number(key)) is None:
            raise self.wrong(key, "is missing; convert the model again with a newer llama.cpp")
        return value

    def wrong(self, key: str, what: str) -> FileError:
        """The error about a field; `what` is the rest of the sentence."""
        return FileError(f"{self.file.path}: the field {self.scope}.{key} {what}")

    def expect(self, key: str, value: int) -> None:
        """Refuse a file in which this field is not the one value that is computed."""
        if (found := self.number(key)) not in (None, value):
            raise self.wrong(
                key,
                f"is {found}, but only {value} is read in this architecture: use the model's own checkpoint",
            )

    def refuse(self, key: str, what: str) -> None:
        """Refuse a file that has this field, and not as 0."""
        if value := self.number(key):
            raise self.wrong(
                key,
                f"is {value}, and {what} are not read from GGUF files of this architecture: use the model's "
                "own checkpoint",
            )

    def rows(self, tensor: str) -> int:
        if tensor not in self.file.tensors:
            raise FileError(
                f"{self.file.path}: the tensor {tensor} is missing; the file holds no whole model"
            )
        return self.file.tensors[tensor].shape[0]

    def has_bias(self, part: str) -> bool:
        return f"blk.0.{part}.bias" in self.file.tensors

    def in_a_layer(self, name: str) -> bool:
        """Whether some layer has this tensor: those of hybrids have different ones."""
        return any(tensor.partition(".")[2].partition(".")[2] == name for tensor in self.file.tensors)

    def factors(self, tensor: str) -> list[float] | None:
        """The numbers of a small tensor of float32, by which a rotation is slowed."""
        found = self.file.tensors.get(tensor)
        if found is None:
            return None
        if found.coding != "F32" or len(found.shape) != 1 or found.nbytes > 1 << 16:
            raise FileError(f"{found.file}: {tensor} must be a short row of F32, not {found.coding}")
        with found.file.open("rb") as opened:
            opened.seek(found.offset)
            return list(struct.unpack(f"<{found.shape[0]}f", opened.read(found.nbytes)))

    def token_ids(self) -> dict[str, object]:
        """The ids of special tokens, by their names in config.json."""
        ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        found = {name: self.file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in ids.items()}
        return {name: id for name, id in found.items() if id is not None}


def shortest(value: float) -> float:
    """The shortest decimal number that is this one in float32: 1e-06, not 9.99999997e-07."""
    short = float(f"{value:.7g}")
    with suppress(OverflowError):  # a number of float64 that no float32 is near
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
