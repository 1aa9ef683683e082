"""Encodings of pictures on a scripted disk: what is there is not made again, in any prompt."""

import pytest
from fake_media import picture, seen_tokens
from fake_worker import facts, reference
from scheduler_bench import add, config
from scripted_disk import DiskBench, ScriptedDisk

from engine_core.protocol import Add
from worker.protocol import StepInput

CAT, DOG = b"cat", b"dog"
LENGTH = 5
"""The embeddings of a picture, which are three records."""


def asks(id: int, *hashes: bytes, text: int) -> Add:
    """A request whose first token, in front of its pictures, is `text`."""
    items = tuple(picture(hash, 1 + LENGTH * at, LENGTH) for at, hash in enumerate(hashes))
    return add(id, [text] + [7] * (LENGTH * len(hashes)) + [9, 9], media=items)


def bench(disk: ScriptedDisk | None = None, kept: int = 20) -> DiskBench:
    limits = facts(most_embeddings=2 * LENGTH, kept_embeddings=kept, record_embeddings=2)
    return DiskBench(config(), limits, scripted=disk or ScriptedDisk())


@pytest.fixture
def disk() -> ScriptedDisk:
    """A disk that has the encodings of both pictures."""
    before = bench()
    before.serve(asks(1, CAT, DOG, text=1))
    before.settle()
    assert before.scheduler.media.encoded == 2 and len(encodings(before.scripted).kept) == 6
    return before.scripted


def encodings(disk: ScriptedDisk) -> ScriptedDisk:
    assert disk.encodings is not None
    return disk.encodings


def is_right(served: DiskBench, *requests: Add) -> bool:
    return all(served.text(each.id) == reference(seen_tokens(each), 4) for each in requests)


def test_pictures_are_found_behind_another_text(disk: ScriptedDisk) -> None:
    served, asked = bench(disk), asks(1, DOG, CAT, text=2)
    served.serve(asked)
    assert is_right(served, asked) and served.cached(1) == 0
    media = served.scheduler.media
    assert (media.encoded, media.reused, media.embeddings) == (0, 2, 2 * LENGTH)


def test_a_prefix_that_is_on_disk_needs_no_encoding(disk: ScriptedDisk) -> None:
    served, asked = bench(disk), asks(1, CAT, DOG, text=1)
    served.serve(asked)
    assert is_right(served, asked) and served.cached(1) == 12
    assert served.scheduler.media.encoded == 0 and served.scheduler.media.embeddings == 0


@pytest.mark.parametrize("lost", [0, 2, 4])
def test_a_picture_of_which_a_record_is_lost_is_encoded(disk: ScriptedDisk, lost: int) -> None:
    encodings(disk).damaged = {[*encodings(disk).kept][lost]}
    served, asked = bench(disk), asks(1, CAT, DOG, text=2)
    served.serve(asked)
    assert is_right(served, asked) and served.scheduler.media.encoded == 1


def test_several_sequences_wait_for_one_read_and_others_run(disk: ScriptedDisk) -> None:
    served = bench(disk)
    asked = [asks(1, CAT, text=2), asks(2, CAT, text=3), asks(3, text=4)]
    served.add_all(asked)
    served.steps(8)
    assert [seq.id for seq in served.scheduler.running] in ([3], []) and is_right(served, asked[2])
    served.run()
    assert is_right(served, *asked) and served.scheduler.media.encoded == 0
    assert encodings(disk).read_blocks == 3


def test_without_room_beside_a_step_pictures_are_encoded(disk: ScriptedDisk) -> None:
    served, asked = bench(disk, kept=LENGTH), asks(1, CAT, DOG, text=2)
    served.serve(asked)
    assert is_right(served, asked) and served.scheduler.media.encoded == 1


def test_a_read_that_nobody_waits_for_any_more_takes_no_room(disk: ScriptedDisk) -> None:
    served = bench(disk)
    served.add(asks(1, CAT, text=2))
    served.steps(2)
    encodings(disk).read_one()
    served.abort((0, 1))
    due = served.prefixes.next_deadline
    assert due is not None and served.scheduler.media.embeddings == LENGTH
    served.now = due
    served.steps(2)
    assert served.scheduler.media.embeddings == 0
    asked = asks(2, CAT, text=2)
    served.serve(asked)
    assert is_right(served, asked) and served.scheduler.media.encoded == 0


def test_a_reset_forgets_encodings_and_what_comes_of_them(disk: ScriptedDisk) -> None:
    served, asked = bench(disk), asks(1, CAT, text=2)
    served.add(asked)
    served.steps(2)
    encodings(disk).read_one()
    served.prefixes.forget()
    assert not encodings(disk).kept
    served.run()
    assert is_right(served, asked) and served.scheduler.media.encoded == 1


def test_what_was_dropped_before_its_turn_is_not_written() -> None:
    served = bench(kept=0)
    served.serve(asks(1, CAT, DOG, text=1))
    served.serve(asks(2, b"owl", b"eel", text=1))
    served.settle()
    assert len(encodings(served.scripted).kept) == 6


def test_a_step_is_told_once_what_has_come(disk: ScriptedDisk) -> None:
    served, seen = bench(disk), list[StepInput]()
    launch = served.worker.launch
    served.worker.launch = lambda step, following=None: (seen.append(step), launch(step, following))[1]
    served.serve(asks(1, CAT, text=2))
    assert [step.arrived for step in seen if step.arrived] == [{1: LENGTH}]
    assert not any(step.encode or step.forget for step in seen)
