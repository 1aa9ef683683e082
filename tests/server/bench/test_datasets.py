"""Texts out of nothing and out of files."""

import json
from itertools import islice
from pathlib import Path

import pytest

from server.bench.endpoints import LoadRequest, endless_requests
from server.bench.serve_options import BenchError, LoadOptions


def some(count: int, salt: int = 0, **options: object) -> list[LoadRequest]:
    return list(islice(endless_requests(LoadOptions(**options), salt), count))  # pyright: ignore[reportArgumentType]


def test_random_texts_have_exactly_the_tokens_asked_for() -> None:
    for work in some(5, random_input_len=33, random_output_len=4, random_vocab_size=300):
        [ids] = work.texts
        assert len(ids) == 33
        assert all(100 <= int(id) < 300 for id in ids)
        assert work.max_tokens == 4


def test_lengths_vary_within_their_share() -> None:
    works = some(200, random_input_len=100, random_output_len=10, random_range_ratio=0.5)
    lengths = [len(work.texts[0]) for work in works]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(set(lengths)) > 50
    assert {work.max_tokens for work in works} == set(range(5, 16))


def test_a_seed_gives_the_same_and_another_something_else() -> None:
    assert some(3) == some(3)
    texts = [some(1, salt, seed=seed)[0].texts for salt, seed in ((0, 0), (1, 0), (0, 1))]
    assert texts[0] != texts[1] != texts[2] != texts[0]


def test_a_prefix_is_common_to_all() -> None:
    first, second = (w.texts[0] for w in some(2, random_prefix_len=20, random_input_len=10))
    assert first[:20] == second[:20]
    assert first[20:] != second[20:]
    assert len(first) == 30


def test_embeddings_have_several_texts_in_a_request() -> None:
    [work] = some(1, endpoint="embeddings", random_batch_size=3, random_input_len=8)
    assert [len(text) for text in work.texts] == [8, 8, 8]


def write(folder: Path, *lines: object) -> str:
    path = folder / "texts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return str(path)


def test_a_file_is_read_line_by_line_and_begins_again(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "Hello", "max_tokens": 3}, {"prompt": [1, 2]})
    works = some(3, dataset_name="custom", dataset_path=path)
    assert works == [LoadRequest(["Hello"], 3), LoadRequest([[1, 2]], 128), LoadRequest(["Hello"], 3)]
    assert some(1, dataset_name="custom", dataset_path=path, custom_output_len=9)[0].max_tokens == 9


def test_a_file_of_inputs_and_of_messages(tmp_path: Path) -> None:
    path = write(tmp_path, {"input": ["a", "b"]}, {"input": [[1], [2, 3]]})
    works = some(2, dataset_name="custom", dataset_path=path, endpoint="embeddings")
    assert [work.texts for work in works] == [["a", "b"], [[1], [2, 3]]]
    messages = [{"role": "user", "content": "Hi"}]
    path = write(tmp_path, {"messages": messages})
    assert some(1, dataset_name="custom", dataset_path=path, endpoint="chat")[0].messages == messages


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": 3}', "line 1: Expected"),
        ("nonsense", "line 1: JSON is malformed"),
        ('{"messages": []}', "line 1: completions needs prompt or input"),
        ("", "holds no requests"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(BenchError, match=told):
        some(1, dataset_name="custom", dataset_path=str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be read: No such file"):
        some(1, dataset_name="custom", dataset_path=str(tmp_path / "none"))
