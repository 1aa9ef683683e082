"""ColQwen2 at a real server: pages are ranked by a text as transformers does it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import serving
from media_files import noise, saved
from page_search import Searched

PAGES = [noise(80, 60), noise(100, 96), noise(170, 40)]
TEXT = "a b c hello"


def url(picture: Any) -> str:
    return "data:image/png;base64," + base64.b64encode(saved(picture)).decode()


def part(picture: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(picture)}}


@pytest.mark.turns
def test_pages_are_ranked_as_by_transformers(tmp_path: Path) -> None:
    searched = Searched.write(tmp_path)
    query = searched.vectors(searched.query(TEXT))
    pages = [searched.vectors(searched.page(page)) for page in PAGES]
    right = searched.processor.score_retrieval([query], pages)[0].tolist()
    with serving(str(tmp_path), "--dtype", "float32", "--num-gpu-blocks-override", "100") as server:

        def ask(path: str, **body: Any) -> Any:
            response = server.post(path, body)
            assert response.status_code == 200, response.text
            return response.json()

        contents = [{"content": [part(page)]} for page in PAGES]
        ranked = ask("/rerank", query=TEXT, documents=contents)["results"]
        scores = {one["index"]: one["relevance_score"] for one in ranked}
        assert [scores[index] for index in range(3)] == pytest.approx(right, abs=1e-3)
        assert [one["index"] for one in ranked] == np.argsort(right)[::-1].tolist()
        scored = ask("/score", queries={"content": [{"type": "text", "text": TEXT}]}, documents=contents)
        assert [one["score"] for one in scored["data"]] == pytest.approx(right, abs=1e-3)

        def vectors(**body: Any) -> list[Any]:
            return [np.array(one["data"]) for one in ask("/pooling", task="token_embed", **body)["data"]]

        talk = [[{"role": "user", "content": [part(page)]}] for page in PAGES]
        for given in ({"messages": talk}, {"input": [url(page) for page in PAGES], "modality": "image"}):
            for got, wanted in zip(vectors(**given), pages, strict=True):
                np.testing.assert_allclose(got, wanted.numpy(), atol=1e-4)
        asked = [{"input": TEXT}, {"messages": [{"role": "user", "content": TEXT}]}]
        for given in asked:
            np.testing.assert_allclose(vectors(**given)[0], query.numpy(), atol=1e-4)
        both = [{"role": "user", "content": [part(PAGES[0]), {"type": "text", "text": TEXT}]}]
        refused = server.post("/pooling", {"messages": both})
        assert refused.status_code == 400 and "each in an input of its own" in refused.text
