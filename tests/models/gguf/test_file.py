import os
import struct
from array import array
from pathlib import Path

import pytest
from gguf_writer import ARRAY, F64, I8, I16, I64, U8, U16, U64, Blob, Typed, field, string, write_gguf

from models.gguf.file import read_gguf
from models.plain_files import FileError
from models.quantization.methods.gguf import GGML_TYPES

_MAGIC = b"GGUF" + struct.pack("<I", 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_is_read_as_it_was_written(path: Path, version: int) -> None:
    values = {
        "general.architecture": "llama",
        "a.number": 7,
        "a.byte": Typed(U8, 200),
        "a.small": Typed(I8, -3),
        "a.short": Typed(U16, 60_000),
        "a.signed": Typed(I16, -30_000),
        "a.long": Typed(U64, 1 << 40),
        "a.far": Typed(I64, -(1 << 40)),
        "a.fraction": 0.5,
        "a.double": Typed(F64, 1e-300),
        "a.switch": True,
        "some.words": ["", "a", "ĠÄ€", "日本"],
        "some.numbers": [1, -2, 3],
        "some.fractions": [0.25, -1.5],
        "some.switches": [True, False],
        "no.words": Typed(ARRAY, [], 8),
    }
    found = read_gguf(write_gguf(path, values, version=version)).metadata
    plain = {name: one.value if isinstance(one, Typed) else one for name, one in values.items()}
    assert {name: list(one) if isinstance(one, array) else one for name, one in found.items()} == plain
    assert found["a.switch"] is True


@pytest.mark.parametrize("alignment", [32, 64, 1024])
def test_tensors_are_found_where_their_bytes_lie(path: Path, alignment: int) -> None:
    one, two, three = os.urandom(3 * 8 * 4), os.urandom(2 * 2 * 34), os.urandom(5 * 144)
    blobs = [Blob("a", (3, 8), 0, one), Blob("b", (2, 64), 8, two), Blob("c", (5, 256), 12, three)]
    file = read_gguf(write_gguf(path, {"x": 1}, blobs, alignment=alignment))
    assert [(t.name, t.shape, t.coding) for t in file.tensors.values()] == [
        ("a", (3, 8), "F32"),
        ("b", (2, 64), "Q8_0"),
        ("c", (5, 256), "Q4_K"),
    ]
    content = path.read_bytes()
    for blob in blobs:
        tensor = file.tensors[blob.name]
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == blob.data
        assert tensor.offset % alignment == 0


def test_a_split_file_is_read_whole_from_any_of_its_parts(tmp_path: Path) -> None:
    for n in range(3):
        fields: dict[str, object] = {"split.no": Typed(U16, n), "split.count": Typed(U16, 3)}
        fields |= {"split.tensors.count": 3, **({"general.architecture": "llama"} if n == 0 else {})}
        write_gguf(tmp_path / f"m-0000{n + 1}-of-00003.gguf", fields, [Blob(f"t{n}", (4,), 0, bytes(16))])
    file = read_gguf(tmp_path / "m-00002-of-00003.gguf")
    assert file.metadata["general.architecture"] == "llama"
    assert [tensor.file.name for tensor in file.tensors.values()] == [part.name for part in file.parts]
    (tmp_path / "m-00003-of-00003.gguf").rename(tmp_path / "away")
    with pytest.raises(FileError, match=r"m-00003-of-00003\.gguf is missing: .* one of 3 parts"):
        read_gguf(tmp_path / "m-00001-of-00003.gguf")
    (tmp_path / "m-00001-of-00003.gguf").rename(tmp_path / "m.gguf")
    with pytest.raises(FileError, match=r"split\.count is 3, but the name is not that of a part"):
        read_gguf(tmp_path / "m.gguf")


def test_parts_of_another_file_are_noticed(tmp_path: Path) -> None:
    for n in range(2):
        fields = {"split.no": 0, "split.count": 2}
        write_gguf(tmp_path / f"m-0000{n + 1}-of-00002.gguf", fields, [Blob("t", (4,), 0, bytes(16))])
    with pytest.raises(FileError, match=r"m-00002-of-00002\.gguf: split\.no is 0, but its name says 1"):
        read_gguf(tmp_path / "m-00001-of-00002.gguf")


_HUGE = 1 << 60
_ARRAY_OF = string("a") + struct.pack("<I", 9)
_BROKEN = {
    "empty": (b"", "is not a GGUF file"),
    "something else": (b"PK\x03\x04 and so on", "is not a GGUF file: it begins with"),
    "version 1": (b"GGUF" + struct.pack("<I", 1), "GGUF version 1 is not read, only 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "only the magic": (_MAGIC, "the header reaches up to byte 16, but the file ends at byte 8"),
    "a huge count of tensors": (
        _MAGIC + struct.pack("<QQ", _HUGE, 0),
        "the header says .* tensors, for which",
    ),
    "a huge count of fields": (_MAGIC + struct.pack("<QQ", 0, _HUGE), "fields of metadata, for which"),
    "a long name": (
        _MAGIC + struct.pack("<QQQ", 0, 1, _HUGE) + bytes(16),
        "the name of field 0 of 1 reaches up to byte",
    ),
    "a long string": (
        _MAGIC + struct.pack("<QQ", 0, 1) + string("a.b") + struct.pack("<IQ", 8, _HUGE),
        "the field 'a.b' reaches up to byte",
    ),
    "a long array": (
        _MAGIC + struct.pack("<QQ", 0, 1) + _ARRAY_OF + struct.pack("<IQ", 4, _HUGE),
        "the field 'a' says .* numbers, for which",
    ),
    "an array of many strings": (
        _MAGIC + struct.pack("<QQ", 0, 1) + _ARRAY_OF + struct.pack("<IQ", 8, _HUGE),
        "the field 'a' says .* strings, for which",
    ),
    "a nested array": (
        _MAGIC + struct.pack("<QQ", 0, 1) + _ARRAY_OF + struct.pack("<IQIQ", 9, 1, 4, 1) + bytes(4),
        "the field 'a' is an array of arrays",
    ),
    "an unknown type": (
        _MAGIC + struct.pack("<QQ", 0, 1) + string("a.b") + struct.pack("<IQ", 77, 1),
        "the field 'a.b' has a value of type 77",
    ),
    "the same field twice": (
        _MAGIC + struct.pack("<QQ", 0, 2) + field("a", 1) + field("a", 2),
        "a field of the metadata is there twice",
    ),
    "seven dimensions": (
        _MAGIC + struct.pack("<QQ", 1, 0) + string("t") + struct.pack("<I", 7) + bytes(99),
        "the tensor t has 7 dimensions",
    ),
}


@pytest.mark.parametrize("name", _BROKEN)
def test_broken_files_are_refused_by_name(path: Path, name: str) -> None:
    content, message = _BROKEN[name]
    path.write_bytes(content)
    with pytest.raises(FileError, match=message) as error:
        read_gguf(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (Blob("t", (2, 40), 8, bytes(99)), "rows of 40, but Q8_0 has blocks of 32"),
        (Blob("t", (4, 32), 4, bytes(99)), "stored as Q4_2, which is not read; convert"),
        (Blob("t", (4, 32), 99, bytes(99)), "has type 99, which is not read"),
        (Blob("t", (_HUGE, _HUGE), 0, bytes(8)), r"lies up to byte 5\S+e\+36, but the file ends"),
        (Blob("t", (4, 1024), 0, bytes(64)), "cut off: download it again"),
    ],
)
def test_tensors_that_cannot_lie_in_the_file_are_refused(path: Path, blob: Blob, message: str) -> None:
    write_gguf(path, {}, [blob])
    with pytest.raises(FileError, match=f"the tensor t .*{message}"):
        read_gguf(path)


def test_an_alignment_that_is_none_is_refused(path: Path) -> None:
    for wrong in (0, 48, 1 << 31):
        with pytest.raises(FileError, match=r"general\.alignment is .*, not a power of two"):
            read_gguf(write_gguf(path, {"general.alignment": wrong}))


def test_every_cut_of_a_file_is_refused(path: Path) -> None:
    fields = {"a": "text", "b": [1, 2], "c": ["x", "y"]}
    whole = write_gguf(path, fields, [Blob("t", (8,), 0, bytes(32))]).read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(FileError):
            read_gguf(path)


def test_a_pipe_and_a_folder_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(FileError, match=r"is a pipe \(FIFO\)"):
        read_gguf(tmp_path / "model.gguf")


def test_no_coding_is_named_twice() -> None:
    names = [coding.name for coding in GGML_TYPES.values()]
    assert len(set(names)) == len(names)


def test_our_sizes_of_blocks_are_those_of_the_package_gguf() -> None:
    constants = pytest.importorskip("gguf.constants")
    for kind, (numbers, nbytes) in constants.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # in no file; the package counts its sums with four bytes, GGML with two
            assert (GGML_TYPES[kind.value].name, GGML_TYPES[kind.value].numbers) == (kind.name, numbers)
            assert GGML_TYPES[kind.value].nbytes == nbytes
