"""POST /v1/moderations over a scripted classifier, with the usual labels and with an operator's table."""

import json
from pathlib import Path

import httpx2
import openai
import pytest
from fake_api import make_app, make_client, post
from fake_frontend import FakeFrontend, vectors
from starlette.types import ASGIApp

from models.pooling.config import PoolingConfig
from server.requests.labels.moderation import read_table

PATH = "/v1/moderations"
TOXIC = ("toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate")


@pytest.fixture
def classifier(frontend: FakeFrontend) -> FakeFrontend:
    """A model with the labels of toxic-bert, for which a text of b is a threat."""
    frontend.serve("classify", pooling=PoolingConfig(num_labels=6, labels=TOXIC))
    frontend.answer_of = lambda item: vectors([0.1, 0.0, 0.2, 0.9 if 98 in item.tokens else 0.3, 0.4, 0.0])
    return frontend


@pytest.mark.usefixtures("classifier")
async def test_openais_client_reads_the_answer(app: ASGIApp) -> None:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    url = "http://localhost/v1"
    async with openai.AsyncOpenAI(api_key="-", base_url=url, http_client=http, max_retries=0) as client:
        (found,) = (await client.moderations.create(input="bbb")).results
        assert found.categories.harassment_threatening and not found.categories.sexual_minors
        parts = [{"type": "text", "text": "aaa"}, {"type": "text", "text": "bbb"}]
        joined = await client.moderations.create(input=parts)  # pyright: ignore[reportArgumentType]
        assert len(joined.results) == 1


async def test_a_table_says_what_labels_mean(classifier: FakeFrontend, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text(
        json.dumps({"obscene": {"category": ["sexual", "rude"], "threshold": 0.2}, "zz": "hate"})
    )
    async with make_client(make_app(classifier, moderation_categories=str(table))) as client:
        (found,) = (await post(client, PATH, input="bbb"))["results"]
    assert {name for name, flagged in found["categories"].items() if flagged} == {"sexual", "rude"}
    assert found["category_scores"]["violence"] == 0


@pytest.mark.parametrize(
    "text", ["[]", '{"a": 1}', '{"a": {"category": "b", "threshold": 2}}', '{"a": {"x": "b"}}']
)
def test_a_wrong_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"table\.json"):
        read_table(path)
