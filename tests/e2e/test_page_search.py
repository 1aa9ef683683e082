"""Models for search at a real server: pages are ranked by a text as transformers does it."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live import serving
from media_files import noise, saved
from page_search import Searched, SearchedByColPali
from pictured import Prompts
from pictured_chat import write_chat_files, write_qwen
from tiny import tiny_checkpoint

PAGES = [noise(80, 60), noise(100, 96), noise(170, 40)]
TEXT = "a b c hello"


def url(picture: Any) -> str:
    return "data:image/png;base64," + base64.b64encode(saved(picture)).decode()


def part(picture: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(picture)}}


@pytest.mark.turns(6)
@pytest.mark.parametrize("kind", [Searched, SearchedByColPali])
def test_pages_are_ranked_as_by_transformers(kind: type[Searched], tmp_path: Path) -> None:
    searched = kind.write(tmp_path)
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


def save_as_sentence_transformers(folder: Path, seen: Sequence[str] = ("image", "image+text")) -> None:
    """Write what sentence-transformers keeps beside a model whose vectors are those of conversations."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds.items())
    ]
    forward = {"method": "forward", "method_output_name": "last_hidden_state"}
    modalities = dict.fromkeys(("text", *seen), forward)
    config = json.loads((folder / "config.json").read_text())
    hidden_size = config.get("text_config", config)["hidden_size"]
    files: dict[str, object] = {
        "modules.json": modules,
        "1_Pooling/config.json": {"embedding_dimension": hidden_size, "pooling_mode": "lasttoken"},
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {**modalities, "message": {**forward, "format": "structured"}},
            "module_output_name": "token_embeddings",
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        },
        "config_sentence_transformers.json": {"prompts": {"query": "find it", "document": ""}},
    }
    (folder / "1_Pooling").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{% if add_generation_prompt %}assistant: {% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    "architecture", ["Qwen3VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"]
)
def test_pictures_and_texts_are_embedded_as_conversations(architecture: str, tmp_path: Path) -> None:
    pictured, tokenizer = write_qwen(architecture, tmp_path)
    save_as_sentence_transformers(tmp_path)
    prompts = Prompts(tmp_path)

    def right(*pieces: Any) -> Any:
        """The vector of the last token, normalised. The tokenizer's own tokens are in front."""
        first, *others = [
            piece
            if not isinstance(piece, str)
            else tokenizer.encode(piece, add_special_tokens=index == 0).ids
            for index, piece in enumerate(pieces)
        ]
        hidden = pictured.hidden(prompts.make(first, *others))[-1]
        return (hidden / hidden.norm()).numpy()

    text = right(f"user: {TEXT} assistant: ")
    query = right(f"system: find it user: {TEXT} assistant: ")
    page = right("user: <|vision_start|>", PAGES[1], "<|vision_end|> assistant: ")
    with serving(str(tmp_path), "--dtype", "float32", "--num-gpu-blocks-override", "100") as server:

        def vector(**body: Any) -> Any:
            response = server.post("/v1/embeddings", body)
            assert response.status_code == 200, response.text
            return np.array(response.json()["data"][0]["embedding"])

        said, talk = {"role": "user", "content": TEXT}, [{"role": "user", "content": [part(PAGES[1])]}]
        for wanted, given in [
            (text, {"input": TEXT}),
            (text, {"messages": [said]}),
            (query, {"input": TEXT, "prompt_name": "query"}),
            (query, {"messages": [{"role": "system", "content": "find it"}, said]}),
            (page, {"messages": talk}),
            (page, {"input": [url(PAGES[1])], "modality": "image"}),
            (page, {"input": url(PAGES[1]), "modality": "image"}),  # so long a text is read by the helper
        ]:
            np.testing.assert_allclose(vector(**given), wanted, atol=1e-4)
        ranked = server.post("/rerank", {"query": TEXT, "documents": [{"content": [part(PAGES[1])]}]}).json()
        assert ranked["results"][0]["relevance_score"] == pytest.approx(float(query @ page), abs=1e-4)


@pytest.mark.turns(3)
def test_texts_are_written_as_by_sentence_transformers(tmp_path: Path) -> None:
    """A model of text alone has no processor, so that the tokenizer adds nothing to a conversation."""
    from sentence_transformers import SentenceTransformer

    tiny_checkpoint("Qwen3ForCausalLM", tmp_path)
    write_chat_files(tmp_path, {310: "<image>"}, "<image>")
    save_as_sentence_transformers(tmp_path, seen=())
    theirs = SentenceTransformer(str(tmp_path), device="cpu")
    with serving(str(tmp_path), "--dtype", "float32", "--num-gpu-blocks-override", "100") as server:
        for name in (None, "query"):
            response = server.post("/v1/embeddings", {"input": TEXT, "prompt_name": name})
            got = response.json()["data"][0]["embedding"]
            np.testing.assert_allclose(got, theirs.encode(TEXT, prompt_name=name), atol=1e-4)
