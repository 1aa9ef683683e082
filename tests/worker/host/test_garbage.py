"""When Python looks for garbage."""

import gc
from collections.abc import Iterator

import pytest

from worker.host.garbage import without_looking_for_garbage

pytestmark = pytest.mark.slow(7)  # each looks through all that other tests have imported


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()  # as the tests' own start leaves it
    yield
    gc.freeze()


def test_what_is_made_meanwhile_counts_as_old() -> None:
    with without_looking_for_garbage():
        assert not gc.isenabled()
        made = [object()]
    assert gc.isenabled()
    assert any(one is made for one in gc.get_objects(generation=2))


def test_garbage_of_that_time_is_found_later() -> None:
    class Knot:
        gone = 0

        def __del__(self) -> None:
            Knot.gone += 1

    with without_looking_for_garbage():
        knot = Knot()
        knot.itself = knot  # type: ignore[attr-defined]
        del knot
    assert Knot.gone == 0
    gc.collect()
    assert Knot.gone == 1


@pytest.mark.parametrize("of_the_programs_own", ["disabled", "frozen"])
def test_what_a_program_has_set_stays(of_the_programs_own: str) -> None:
    try:
        if of_the_programs_own == "disabled":
            gc.disable()
        else:
            gc.freeze()
        frozen = gc.get_freeze_count()
        with without_looking_for_garbage():
            pass
        assert gc.isenabled() == (of_the_programs_own != "disabled")
        assert gc.get_freeze_count() >= frozen * 0.9
    finally:
        gc.enable()
