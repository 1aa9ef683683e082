"""Files of weights that are no such files, or that lie: each is refused in a line that names it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from broken import (
    EMBEDDINGS,
    GATE,
    INDEX,
    NORM,
    WEIGHTS,
    Case,
    assert_refused,
    assert_told,
    case,
    cut,
    described,
    header,
    index,
    put,
    refusal,
    replaced,
    sharded,
    with_header,
)
from safetensors.torch import load_file, save_file

from models.plain_files import MOST_JSON_BYTES

DEEP = b"[" * 100_000
NOT_WHOLE = (WEIGHTS, "not a whole safetensors file")


def overlapping(tensors: dict[str, dict[str, Any]]) -> None:
    start, stop = tensors[NORM]["data_offsets"]
    tensors[NORM]["data_offsets"] = [start - 4, stop - 4]


def with_a_hole(tensors: dict[str, dict[str, Any]]) -> None:
    tensors.pop(NORM)


def in_two_files(folder: Path) -> None:
    sharded(folder)
    (folder / INDEX).unlink()
    everything = load_file(folder / "model-0.safetensors") | load_file(folder / "model-1.safetensors")
    save_file(
        {GATE: everything[GATE], **load_file(folder / "model-0.safetensors")}, folder / "model-0.safetensors"
    )
    save_file(
        {GATE: everything[GATE], **load_file(folder / "model-1.safetensors")}, folder / "model-1.safetensors"
    )


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST_JSON_BYTES + 1)  # no byte of it is on the disk


FILES: list[Case] = [
    case("no weights", put(None), "holds no weights: no model.safetensors"),
    case("empty", put(b""), *NOT_WHOLE),
    case("too short for a length", put(b"\x10\0\0\0"), *NOT_WHOLE),
    case("a pointer of Git LFS", put("version https://git-lfs.github.com/spec/v1\noid 1"), "`git lfs pull`"),
    case("a header longer than the file", put(b"\xff\xff\0\0\0\0\0\0{}"), *NOT_WHOLE),
    case("a header of 2^63 bytes", put(b"\xff" * 7 + b"\x7f{}"), *NOT_WHOLE),
    case("no header", put(bytes(8)), *NOT_WHOLE),
    case("a header that is not JSON", put(with_header(b"{'a': 1}")), *NOT_WHOLE),
    case("a header that is not text", put(with_header(b"\xff\xfe\xfd\xfc")), *NOT_WHOLE),
    case("a header that is a list", put(with_header(b"[1, 2]  ")), *NOT_WHOLE),
    case("a nested header", put(with_header(DEEP)), *NOT_WHOLE),
    case("cut in the header", cut(lambda size: 100), *NOT_WHOLE),
    case("cut in the data", cut(lambda size: size // 2), "lies up to byte", *NOT_WHOLE),
    case("the last byte is missing", cut(lambda size: size - 1), "lies up to byte", *NOT_WHOLE),
    case("bytes that no tensor has", lambda folder: append(folder / WEIGHTS, b"more"), *NOT_WHOLE),
    case("a tensor without a type", described(NORM, dtype=None), NORM, *NOT_WHOLE),
    case("a type that nobody knows", described(NORM, dtype="F128"), *NOT_WHOLE),
    case("a negative shape", described(NORM, shape=[-32]), NORM, *NOT_WHOLE),
    case("a shape with more numbers", described(GATE, shape=[48, 64]), GATE, *NOT_WHOLE),
    case("a shape whose size overflows", described(GATE, shape=[1 << 40, 1 << 40]), GATE, *NOT_WHOLE),
    case("offsets past the end", described(NORM, data_offsets=[1 << 40, (1 << 40) + 128]), NORM, *NOT_WHOLE),
    case("offsets that end before they begin", described(NORM, data_offsets=[128, 0]), NORM, *NOT_WHOLE),
    case("tensors that overlap", header(overlapping), NORM, "overlaps", *NOT_WHOLE),
    case("a hole between tensors", header(with_a_hole), "behind a hole", *NOT_WHOLE),
    case("a folder", replaced(Path.mkdir), WEIGHTS, "is a folder, not a regular file"),
    case("a pipe", replaced(os.mkfifo), WEIGHTS, "is a pipe (FIFO), not a regular file"),
    case("a device", replaced(lambda path: path.symlink_to("/dev/zero")), WEIGHTS, "is a device"),
    case(
        "a link to nothing",
        replaced(lambda path: path.symlink_to("gone")),
        WEIGHTS,
        "a link, but there is no",
    ),
    case(
        "a link to itself", replaced(lambda path: path.symlink_to(path)), WEIGHTS, "a link, but there is no"
    ),
]

INDICES: list[Case] = [
    case("not JSON", put("weight_map", INDEX), INDEX, "cannot be read as JSON"),
    case("nested", put(DEEP, INDEX), INDEX, "nested too deeply"),
    case("a list", put("[]", INDEX), INDEX, "not an index of weight files"),
    case("without a map", put("{}", INDEX), INDEX, "not an index of weight files"),
    case("an empty map", put('{"weight_map": {}}', INDEX), "holds no weights"),
    case("a map that is a list", put('{"weight_map": []}', INDEX), INDEX, "not an index of weight files"),
    case("a map to numbers", put('{"weight_map": {"a": 1}}', INDEX), INDEX, "not an index of weight files"),
    case("a pipe", replaced(os.mkfifo, INDEX), INDEX, "is a pipe (FIFO)"),
    case("a folder", replaced(Path.mkdir, INDEX), INDEX, "is a folder"),
    case("too long to be one", replaced(huge, INDEX), INDEX, "256 MiB long, and 256 are allowed"),
    case(
        "a file above",
        index(lambda places: places.update({NORM: "../../etc/passwd"})),
        INDEX,
        NORM,
        "'../../etc/passwd'",
    ),
    case(
        "a file elsewhere",
        index(lambda places: places.update({NORM: "/etc/passwd"})),
        INDEX,
        NORM,
        "'/etc/passwd'",
    ),
    case(
        "a way out",
        index(lambda places: places.update({NORM: "a/../../b"})),
        INDEX,
        NORM,
        "outside of the model's folder",
    ),
    case(
        "a name with a zero byte", index(lambda places: places.update({NORM: "a\0b"})), INDEX, NORM, "outside"
    ),
    case("a file without a name", index(lambda places: places.update({NORM: ""})), INDEX, NORM, "outside"),
    case(
        "a file that is not there",
        index(lambda places: places.update({NORM: "model-7.safetensors"})),
        "model-7.safetensors",
        INDEX,
        "no such file",
    ),
    case(
        "a tensor that its file has not",
        index(lambda places: None),
        f"{NORM} is missing",
    ),
    case("a tensor in two files", in_two_files, GATE, "model-0.safetensors and in model-1.safetensors"),
]


def append(path: Path, more: bytes) -> None:
    path.write_bytes(path.read_bytes() + more)


@pytest.mark.parametrize("broken", FILES, ids=lambda each: each.name)
def test_a_file_that_lies_is_refused(broken: Case, folder: Path) -> None:
    assert_refused(broken, folder)


@pytest.mark.parametrize("broken", INDICES, ids=lambda each: each.name)
def test_an_index_that_lies_is_refused(broken: Case, folder: Path) -> None:
    broken.breaks(folder)
    if broken.name == "a tensor that its file has not":
        for path in folder.glob("model-*.safetensors"):
            save_file({name: value for name, value in load_file(path).items() if name != NORM}, path)
    assert_told(refusal(folder), broken.told)


def test_a_tensor_in_two_files_is_that_of_the_one_the_index_names(folder: Path) -> None:
    in_two_files(folder)
    wrong = load_file(folder / "model-1.safetensors")
    save_file({**wrong, GATE: torch.full_like(wrong[GATE], torch.nan)}, folder / "model-1.safetensors")
    places = dict.fromkeys([GATE, EMBEDDINGS], "model-0.safetensors") | {
        "lm_head.weight": "model-1.safetensors"
    }
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(AssertionError, match="was loaded"):
        refusal(folder)


class TestPickles:
    def refused(self, folder: Path) -> str:
        (folder / WEIGHTS).unlink()
        return refusal(folder, "pt")

    def test_not_asked_for(self, folder: Path) -> None:
        torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()
        assert_told(refusal(folder), ("*.bin only", "add --load-format pt"))

    def test_no_pickle(self, folder: Path) -> None:
        (folder / "pytorch_model.bin").write_bytes(b"nonsense")
        assert_told(self.refused(folder), ("pytorch_model.bin: not a file of tensors",))

    def test_code(self, folder: Path) -> None:
        torch.save({NORM: Path("/")}, folder / "pytorch_model.bin")
        assert_told(self.refused(folder), ("pytorch_model.bin: not a file of tensors",))

    def test_no_dictionary(self, folder: Path) -> None:
        torch.save([torch.zeros(1)], folder / "pytorch_model.bin")
        assert_told(self.refused(folder), ("pytorch_model.bin: holds a list, not a dictionary of tensors",))

    def test_cut(self, folder: Path) -> None:
        torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
        cut(lambda size: size // 2, "pytorch_model.bin")(folder)
        assert_told(self.refused(folder), ("pytorch_model.bin: not a file of tensors",))

    def test_a_pipe(self, folder: Path) -> None:
        os.mkfifo(folder / "pytorch_model.bin")
        assert_told(self.refused(folder), ("pytorch_model.bin is a pipe",))

    def test_sparse_tensors(self, folder: Path) -> None:
        everything = load_file(folder / WEIGHTS)
        torch.save({**everything, GATE: everything[GATE].to_sparse()}, folder / "pytorch_model.bin")
        assert_told(self.refused(folder), ("pytorch_model.bin", GATE, "of the type sparse_coo"))
