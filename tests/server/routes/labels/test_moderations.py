"""POST /v1/moderations over a scripted classifier, with the usual labels and with an operator's table."""

import json
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from fake_api import make_app, make_client, post, refusal
from fake_frontend import FakeFrontend, vectors
from starlette.types import ASGIApp

from models.pooling.config import PoolingConfig
from server.requests.labels.moderation import CATEGORIES, read_table

PATH = "/v1/moderations"
TOXIC = ("toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate")


@pytest.fixture
def classifier(frontend: FakeFrontend) -> FakeFrontend:
    """A model with the labels of toxic-bert, for which a text of b is a threat."""
    frontend.serve("classify", pooling=PoolingConfig(num_labels=6, labels=TOXIC))
    frontend.answer_of = lambda item: vectors([0.1, 0.0, 0.2, 0.9 if 98 in item.tokens else 0.3, 0.4, 0.0])
    return frontend


@pytest.mark.usefixtures("classifier")
async def test_usual_labels_speak_for_openais_categories(client: httpx.AsyncClient) -> None:
    answer = await post(client, PATH, input=["aaa", "bbb"], model="omni-moderation-latest")
    harmless, threat = answer["results"]
    assert answer["model"] == "org/tiny" and not harmless["flagged"] and threat["flagged"]
    assert {name for name, flagged in threat["categories"].items() if flagged} == {
        "harassment/threatening",
        "violence",
    }
    assert threat["category_scores"]["harassment"] == pytest.approx(0.4)  # the highest of four labels
    assert threat["category_scores"].keys() == threat["categories"].keys() == set(CATEGORIES)
    types = threat["category_applied_input_types"]
    assert types["hate"] == ["text"] and types["self-harm"] == []


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
    ("tasks", "labels", "reason"),
    [(("generate",), (), "does not classify"), (("classify",), ("good", "bad"), "the model's labels mean")],
)
async def test_a_model_that_cannot_moderate_says_what_to_serve(
    client: httpx.AsyncClient,
    frontend: FakeFrontend,
    tasks: tuple[str, ...],
    labels: tuple[str, ...],
    reason: str,
) -> None:
    frontend.serve(*tasks, pooling=PoolingConfig(num_labels=2, labels=labels))
    message = (await refusal(client, PATH, input="a"))["message"]
    assert reason in message and "toxic-bert" in message


@pytest.mark.usefixtures("classifier")
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": []},
        {"input": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]},
        {"input": "a", "x": 1},
    ],
)
async def test_what_is_no_text_is_refused(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    await refusal(client, PATH, **body)


@pytest.mark.parametrize(
    "text", ["[]", '{"a": 1}', '{"a": {"category": "b", "threshold": 2}}', '{"a": {"x": "b"}}']
)
def test_a_wrong_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"table\.json"):
        read_table(path)
