"""What is refused of grammars and thinking. How answers are bounded is tested where steps are."""

import pytest
from fake_worker import facts
from scheduler_bench import Bench, add, config, pool

from engine_core.protocol import AddRequest, Failed, Thinking


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pool(1, [1], thinking=Thinking(None, (7,))), "it takes no grammar and no thinking budget"),
        (add(1, [1], thinking=Thinking(None, (50,))), "a marker of thinking has token ids outside of the"),
    ],
)
def test_what_no_answer_can_have_is_refused(request_: AddRequest, reason: str) -> None:
    bench = Bench(config(), facts())
    bench.add(request_)
    [failed] = bench.outputs[0, 1]
    assert isinstance(failed, Failed) and failed.code == 400 and reason in failed.message
