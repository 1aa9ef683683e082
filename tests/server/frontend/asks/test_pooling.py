"""What asks for vectors and scores give, without HTTP: results, counts of all rounds, and progress."""

import pytest
from fake_frontend import FakeFrontend, vectors

from server.access.client_identity import ANYONE
from server.access.request_state import RequestState
from server.errors import Overloaded
from server.frontend.asks.parts import Counts, Terms
from server.frontend.asks.pooling import Compare, Pool
from server.requests.pooling import PooledText, ReadTexts
from server.requests.scoring import Compared
from server.requests.vectors import as_array
from worker.protocol import Pooling

EMBED = Pooling(task="embed")


def terms() -> Terms:
    return Terms(RequestState(), "embd-1", 7)


async def test_windows_of_a_text_are_joined_and_all_of_them_are_counted_and_told() -> None:
    frontend, told = FakeFrontend(cached=1, answer_of=lambda item: vectors([len(item.tokens), 0])), [0]
    frontend.serve("embed", widths={"embed": 2})
    long = PooledText([1, 2], Pooling(task="embed", use_activation=False), windows=[PooledText([3], EMBED)])

    def tell() -> None:
        told[0] += 1

    texts = ReadTexts([long, PooledText([4], EMBED)])
    answer = await frontend.ask(Pool(terms=terms(), texts=texts, tell=tell))
    assert [as_array(one)[0] for one in answer.vectors] == pytest.approx([5 / 3, 1])
    assert (len(answer.pooled), told) == (3, [3])
    assert answer.end.counts == Counts(4, 3, 0)
    assert (answer.head.id, answer.head.created, answer.usage.prompt_tokens) == ("embd-1", 7, 4)


async def test_a_comparison_adds_its_rounds_up_in_one_group_with_the_places_of_its_documents() -> None:
    frontend = FakeFrontend(cached=1, answer_of=lambda item: vectors([len(item.tokens), 1]))
    frontend.serve("token_embed", score_type="late-interaction")
    late = Pooling(task="token_embed")
    compared = Compared([PooledText([1, 2], late)], [PooledText([3], late), PooledText([4], late)])
    asked = Compare(terms=terms(), texts=compared)
    answer = await frontend.ask(asked)
    assert answer.scores == [1, 1] and len(answer.pooled) == 2
    assert answer.end.counts == Counts(4, 3, 0)
    (query, options), (documents, later) = frontend.pooled
    assert (len(query), len(documents), options["group"]) == (1, 2, later["group"])
    admission = asked.terms.state.admission
    assert admission is not None and admission.count == 2


async def test_a_refused_ask_has_no_places() -> None:
    frontend = FakeFrontend().with_places(1, queue=0)
    frontend.serve("embed")
    other = frontend.admissions.admit(ANYONE, 1)
    asked = Pool(terms=terms(), texts=ReadTexts([PooledText([1], EMBED)]))
    with pytest.raises(Overloaded):
        await frontend.ask(asked)
    assert not frontend.pooled and frontend.live == other.count and asked.terms.state.admission is None
