"""Files of tensors: all that torch and numpy write of one is read, nothing else is, and no pickle is run."""

import io
import pickle
import zipfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from server.media.tensor_files import read_matrix, read_tensor

ROWS = torch.linspace(-3, 3, 700 * 6).view(700, 6)


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        ROWS.half(),
        ROWS.bfloat16(),
        ROWS[300:302],
        ROWS.view(7, 100, 6)[3].requires_grad_() * 2,
        ROWS.view(7, 100, 6)[:, -1, :][2:3],
        ROWS.repeat(20, 60),
    ],
    ids=["float32", "float16", "bfloat16", "rows of a table", "gradient", "last of a batch", "large"],
)
def test_the_values_are_those_of_torch(rows: torch.Tensor) -> None:
    assert np.array_equal(read_matrix(saved(rows)), rows.detach().float().numpy())
    tensors = {"rows": rows.detach().contiguous()}
    file = safetensors.torch.save(tensors, {"format": "pt"})
    assert np.array_equal(read_matrix(file), tensors["rows"].float().numpy())


def npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


@pytest.mark.parametrize(
    "rows",
    [
        ROWS[5],
        ROWS[:, 2].contiguous(),
        ROWS.view(7, 100, 6)[2:4],
        ROWS[None].half(),
        ROWS.long(),
        ROWS[3].long(),
    ],
    ids=["row", "column", "batch", "batch of one", "integers", "row of integers"],
)
def test_tensors_have_up_to_three_dimensions(rows: torch.Tensor) -> None:
    files = saved(rows), safetensors.torch.save({"rows": rows.contiguous()}), npy(rows.numpy())
    for file in files:
        found = read_tensor(file)
        assert found.dtype == (np.int64 if rows.dtype == torch.int64 else np.float32)
        assert np.array_equal(found, rows.numpy())


class Runs:
    """What runs when its pickle is read as a program."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._made,)


def changed(change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file of torch with other entries."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(ROWS))) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return file.getvalue()


def with_pickle(old: bytes, new: bytes) -> bytes:
    return changed(lambda name, data: data.replace(old, new) if name.endswith("data.pkl") else data)


def many_entries() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for number in range(40):
            archive.writestr(f"a/{number}", b"")
    return file.getvalue()


def test_the_changes_below_start_from_a_good_file() -> None:
    assert np.array_equal(read_matrix(changed(lambda _, data: data)), ROWS.numpy())


def test_tensors_may_have_been_in_any_memory() -> None:
    file = with_pickle(b"\3\0\0\0cpu", b"\6\0\0\0cuda:0")
    assert b"cuda:0" in file and np.array_equal(read_matrix(file), ROWS.numpy())


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"PK\3\4",
        b"A" * 100,
        b"\xff" * 100,
        saved(ROWS)[:-30],
        saved(ROWS)[:100] + bytes(40) + saved(ROWS)[140:],
        saved(ROWS, _use_new_zipfile_serialization=False),
        saved([ROWS]),
        saved({"rows": ROWS}),
        saved(torch.nn.Parameter(ROWS)),
        saved(ROWS.long()),
        saved(ROWS.double()),
        saved(ROWS[0]),
        saved(torch.stack([ROWS, ROWS])),
        saved(ROWS.T),
        saved(ROWS[:, :3]),
        saved(ROWS.to_sparse()),
        changed(lambda _, data: data, zipfile.ZIP_DEFLATED),
        changed(lambda name, data: b"big" if name.endswith("byteorder") else data),
        changed(lambda name, data: data[:-8] if name.endswith("data/0") else data),
        changed(lambda name, data: data * 100 if name.endswith("data.pkl") else b""),
        with_pickle(b"torch._utils\n_rebuild_tensor_v2", b"os\nsystem"),
        with_pickle(b"collections\nOrderedDict", b"os\nabort"),
        with_pickle(b"M\xbc\x02K\x06", b"J\xff\xff\xff\x7fK\x06"),
        many_entries(),
        safetensors.torch.save({"a": ROWS, "b": ROWS.clone()}),
        safetensors.torch.save({"a": ROWS.long()}),
        (1 << 60).to_bytes(8, "little") + b"{}",
        b"\x02" + bytes(7) + b"[]",
        npy(ROWS.numpy())[:-1],
        npy(ROWS.numpy()).replace(b"(700, 6)", b"(1<<60,)"),
        npy(ROWS.numpy()).replace(b"(700, 6)", b"(900, 9)"),
        npy(ROWS.double().numpy()),
        npy(ROWS.T.numpy()),
        npy(np.array([[None, 1]])),
        b"\x93NUMPY\x03\x00",
    ],
    ids=map(str, count()),  # files of torch differ from process to process
)
def test_other_files_are_refused(file: bytes) -> None:
    with pytest.raises(Exception, match=r"^") as refused:
        read_matrix(file)
    assert not isinstance(refused.value, MemoryError)


def test_no_pickle_runs(tmp_path: Path) -> None:
    made = tmp_path / "made"
    program = pickle.dumps(Runs(made), 2)
    pickle.loads(program)
    made.unlink()
    for file in (
        saved(Runs(made)),
        changed(lambda name, data: program if name.endswith("pkl") else data),
        with_pickle(b"\x80\x02", program[:-1]),
    ):
        with pytest.raises(ValueError, match="pickle"):
            read_matrix(file)
    assert not made.exists()
