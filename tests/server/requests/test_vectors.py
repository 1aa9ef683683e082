"""Vectors in every encoding, compared with torch's own conversions."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fake_frontend import vectors
from later import Later

from server.errors import BadRequest
from server.requests.similarity import compare
from server.requests.vectors import VectorForm, as_array, as_bytes, as_json, read_ranges

RANDOM = np.random.default_rng(0)
NUMBERS = np.concatenate(
    [
        RANDOM.standard_normal(4000),
        RANDOM.standard_normal(4000) * 1e-3,
        np.linspace(-8, 8, 4097),  # many of these lie in the middle of two 8-bit numbers
        [0.0, -0.0, 1e-12, 2.0**-10, 2.0**-17, 447.9, -448.0],
    ]
).astype(np.float32)
PAIR = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float32", torch.float32),
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_numbers_are_rounded_as_torch_does(dtype, kind) -> None:
    expected = torch.from_numpy(NUMBERS).to(kind)
    assert as_bytes(vectors(NUMBERS), dtype) == expected.view(torch.uint8).numpy().tobytes()


def test_what_is_too_large_for_eight_bits_becomes_the_largest() -> None:
    assert as_bytes(vectors([1e9, -1e9]), "fp8_e4m3") == bytes([0x7E, 0xFE])
    assert as_bytes(vectors([1e9, -1e9]), "fp8_e5m2") == bytes([0x7B, 0xFB])


def test_byte_orders() -> None:
    assert np.frombuffer(as_bytes(vectors([1.5, -2]), "float32", "big"), ">f4").tolist() == [1.5, -2]
    assert as_bytes(vectors([1.5]), "float16", "big") == np.array([1.5], ">f2").tobytes()
    assert as_bytes(vectors([1.0]), "bfloat16", "big") == b"\x3f\x80"
    assert as_bytes(vectors([1.0]), "bfloat16", "little") == b"\x80\x3f"


def test_all_forms_hold_the_same_bits() -> None:
    one = vectors(NUMBERS)
    from_json = np.array(json.loads(as_json(one)), dtype=np.float32)
    from_base64 = np.frombuffer(
        base64.b64decode(msgspec.json.decode(VectorForm(base64=True).write(one))), "<f4"
    )
    assert from_json.tobytes() == from_base64.tobytes() == NUMBERS.tobytes()
    assert json.loads(as_json(vectors([[1, 2], [3, 4]]))) == [[1, 2], [3, 4]]
    assert np.shares_memory(as_array(one), np.frombuffer(one.data, np.uint8))


def test_bits() -> None:
    one = vectors([1, -1, 0, 2, -3, -4, 5, 6, 1, 1, 1, 1, 1, 1, 1, 1])
    assert msgspec.json.decode(VectorForm("ubinary").write(one)) == [0b10010011, 255]
    assert msgspec.json.decode(VectorForm("binary").write(one)) == [0b10010011 - 128, 127]


@pytest.mark.parametrize(
    ("similarity", "expected"),
    [
        ("cosine", F.cosine_similarity(*PAIR, dim=0)),
        ("maxsim", F.cosine_similarity(*PAIR, dim=0)),
        ("dot", PAIR[0] @ PAIR[1]),
        # sentence-transformers negates these, so that the nearest text has the highest score.
        ("euclidean", -torch.cdist(PAIR[0][None], PAIR[1][None], p=2)),
        ("manhattan", -torch.cdist(PAIR[0][None], PAIR[1][None], p=1)),
    ],
)
def test_measures_are_those_of_sentence_transformers(similarity: Any, expected: Any) -> None:
    assert compare(vectors(PAIR[0]), vectors(PAIR[1]), similarity) == pytest.approx(float(expected))


def test_a_vector_of_zeros_is_like_no_other() -> None:
    assert compare(vectors([0, 0]), vectors([1, 0]), "cosine") == 0.0


# Small vectors, as sentence-transformers makes them


@pytest.mark.parametrize("dtype", ["int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("shape", [(6, 20), (3, 4, 20)])
def test_quantized_as_sentence_transformers_does(dtype: Any, shape: tuple[int, ...]) -> None:
    rows = RANDOM.standard_normal(shape).astype(np.float32)
    rows[..., 3] = 0.5  # of no range
    quantize = Later("sentence_transformers.util.quantization").quantize_embeddings
    asked = [vectors(one) for one in rows]
    flat = rows.reshape(-1, 20)
    known = (0.5 * np.stack([flat.min(0), flat.max(0)])).astype(np.float32)
    for ranges in (None, known):
        expected = quantize(list(rows) if rows.ndim > 2 else rows, dtype, ranges=ranges)
        for form in (
            VectorForm.of(asked, dtype, ranges=ranges),
            VectorForm.of(asked, dtype, base64=True, ranges=ranges),
        ):
            for one, other in zip(asked, expected, strict=True):
                written = msgspec.json.decode(form.write(one))
                if form.base64:
                    written = (
                        np.frombuffer(base64.b64decode(written), other.dtype).reshape(other.shape).tolist()
                    )
                assert written == other.tolist()


def test_plain_numbers_of_16_bits() -> None:
    one = vectors([1 / 3, -2.5])
    assert (
        msgspec.json.decode(VectorForm("float16").write(one)) == np.array([1 / 3, -2.5], np.float16).tolist()
    )
    expected = torch.tensor([1 / 3, -2.5]).bfloat16().float().tolist()
    assert msgspec.json.decode(VectorForm("bfloat16").write(one)) == expected


def test_ranges_of_a_file(tmp_path: Path) -> None:
    ranges = np.array([[0, -1], [1, 2]], np.float32)
    np.save(tmp_path / "ranges.npy", ranges)
    (tmp_path / "ranges.json").write_text("[[0, -1], [1, 2]]")
    for name in ("ranges.npy", "ranges.json"):
        assert np.array_equal(read_ranges(tmp_path / name), ranges)
    np.save(tmp_path / "objects.npy", np.array([None, {}]))
    for name, content in (
        ("missing.npy", None),
        ("objects.npy", None),
        ("three.json", "[[0], [1], [2]]"),
        ("ragged.json", "[[0], [1, 2]]"),
        ("turned.json", "[[1], [0]]"),
        ("infinite.json", "[[0], [1e999]]"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match="--int8-ranges"):
            read_ranges(tmp_path / name)
    with pytest.raises(BadRequest, match="has ranges for 2 numbers, and these vectors have 3"):
        VectorForm.of([vectors([1, 2, 3])], "int8", ranges=ranges)
