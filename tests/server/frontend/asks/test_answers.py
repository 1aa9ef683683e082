"""What an ask yields, without HTTP: parts, their counts, and the end."""

from fake_frontend import FakeFrontend

from server.access.request_state import RequestState
from server.frontend.asks.answers import Complete
from server.frontend.asks.parts import Counts, Terms
from server.reading.prompts import Prompt
from server.requests.sampling_params import SamplingParams


async def test_parts_count_their_choice_and_the_last_one_tells_the_end() -> None:
    frontend, state = FakeFrontend(reply="abc", per_step=1), RequestState()
    asked = Complete(
        terms=Terms(state, "cmpl-1", 0),
        prompts=[Prompt([1, 2]), Prompt([3])],
        sampling=SamplingParams(max_tokens=3, n=2),
    )
    parts = await (await frontend.ask(asked)).whole()
    assert [part.end is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].end is not None and parts[-1].end.counts == Counts(3, 0, 12)
    for choice, prompt in enumerate((2, 2, 1, 1)):
        own = [part for part in parts if part.choice == choice]
        assert "".join(part.delta.text for part in own) == "abc"
        assert [part.counts for part in own] == [Counts(prompt, 0, 1 + number) for number in range(3)]
    assert state.admission is not None and state.work is not None
