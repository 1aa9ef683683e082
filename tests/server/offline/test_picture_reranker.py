"""A tiny jina-reranker-m0 scores texts and pictures as its authors' code computes it, written out here."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from media_files import noise
from pictured_chat import write_qwen
from PIL.Image import Image
from qwen_pictured import Pictured
from safetensors.torch import load_file, save_file

from server.offline.llm import LLM
from server.requests.pooling import PoolingParams

ONE, TWO = noise(100, 96), noise(40, 28)
Said = str | Image
MARKS = ("<|vision_start|>", "<|vision_end|>")


@dataclass
class Reranker:
    llm: LLM
    pictured: Pictured
    tokenizer: Any
    layers: torch.nn.Sequential

    @torch.inference_mode()
    def logit(self, query: Said, document: Said) -> float:
        """The document comes first, then the query, then token 100, whose state two layers read."""
        pieces: list[Said] = ["**Document**:\n"]
        for said, behind in ((document, "\n**Query**:\n"), (query, "")):
            if isinstance(said, str):
                pieces[-1] = f"{pieces[-1]}{said}{behind}"
            else:
                pieces[-1] = f"{pieces[-1]}{MARKS[0]}"
                pieces += [said, MARKS[1] + behind]
        ids = [
            self.tokenizer.encode(each, add_special_tokens=False).ids if isinstance(each, str) else each
            for each in pieces
        ]
        hidden = self.pictured.hidden(self.pictured.prompts.make(*ids, [100]))
        return float(self.layers(hidden[-1]))


def write(folder: Path) -> tuple[Pictured, Any, torch.nn.Sequential]:
    """Saves it with the fields and the names of tensors that the published files have."""
    pictured, tokenizer = write_qwen("Qwen2VLForConditionalGeneration", folder)
    pictured.publish()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["JinaVLForRanking"]}))
    torch.manual_seed(7)
    layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight")
    head = {f"score.{name}": value.detach() for name, value in layers.state_dict().items()}
    save_file(tensors | head, folder / "model.safetensors")
    return pictured, tokenizer, layers


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reranker]:
    folder = tmp_path_factory.mktemp("jina-reranker")
    pictured, tokenizer, layers = write(folder)
    with LLM(str(folder), dtype="float32", num_gpu_blocks_override=100, max_num_seqs=4) as llm:
        yield Reranker(llm, pictured, tokenizer, layers)


def as_content(said: Said) -> Any:
    return said if isinstance(said, str) else {"content": [{"type": "image_pil", "image_pil": said}]}


@pytest.mark.parametrize(
    ("query", "documents"),
    [
        ("a b c", ["d e", "a", "f g h i"]),
        ("a b c", [ONE, "d e", TWO]),
        (ONE, ["a b", TWO, ONE]),
    ],
    ids=["texts", "pictures", "both"],
)
def test_scores_are_those_of_its_authors(reranker: Reranker, query: Said, documents: list[Said]) -> None:
    given = [as_content(query), [as_content(each) for each in documents]]
    logits = torch.tensor([reranker.logit(query, each) for each in documents])
    scores = [each.outputs.score for each in reranker.llm.score(*given, use_tqdm=False)]
    torch.testing.assert_close(torch.tensor(scores), torch.sigmoid(logits - 2.65), atol=1e-5, rtol=0)
    plain = reranker.llm.score(*given, use_tqdm=False, pooling_params=PoolingParams(use_activation=False))
    torch.testing.assert_close(
        torch.tensor([each.outputs.score for each in plain]), logits - 2.65, atol=1e-4, rtol=0
    )
    assert len({round(float(logit), 4) for logit in logits}) == 3


def test_a_pair_that_is_cut_has_room_for_the_token_by_which_it_is_scored(reranker: Reranker) -> None:
    long, longest = "a b c d " * 400, reranker.llm.facts.max_text_len
    seen: Any = {"content": [{"type": "image_pil", "image_pil": TWO}, {"type": "text", "text": long}]}
    documents: list[Any] = [long, seen]
    for document in documents:
        [answer] = reranker.llm.score("a", document, truncate_prompt_tokens=-1, use_tqdm=False)
        assert len(answer.prompt_token_ids) == longest
