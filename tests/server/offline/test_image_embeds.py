"""Embeddings of pictures are answered as the pictures that they are of, in the form of each family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from media_files import noise
from pictured import Prompts, tower_input
from pictured_chat import write_llava, write_qwen
from PIL.Image import Image

from facet import BadRequest
from models.config import read_config
from models.loader import LoadOptions, load_model
from server.offline.llm import LLM
from server.requests.sampling_params import SamplingParams

ONE, TWO = noise(60, 44), noise(90, 31)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "num_gpu_blocks_override": 100,
    "max_num_seqs": 4,
    "block_size": 4,
}


def towers_rows(folder: Path, *pictures: Image) -> tuple[list[torch.Tensor], list[tuple[int, int, int]]]:
    """What the tower makes of pictures, and their grids."""
    prompts = Prompts(folder)
    prompts.make(*pictures)
    items = [tower_input(item) for item in prompts.items.values()]
    model: Any = load_model(LoadOptions(read_config(folder), folder, dtype=torch.float32))
    return model.encode(items), [item.grid for item in items]


def answers(llm: LLM, text: str, *images: Any) -> list[list[int]]:
    prompts: list[Any] = [{"prompt": text, "multi_modal_data": {"image": each}} for each in images]
    return [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    "architecture", ["Qwen2VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"]
)
def test_embeddings_with_grids_are_answered_as_their_pictures(tmp_path: Path, architecture: str) -> None:
    write_qwen(architecture, tmp_path)
    (one, two), grids = towers_rows(tmp_path, ONE, TWO)
    together = {"image_embeds": torch.cat([one, two]), "image_grid_thw": torch.tensor(grids)}
    apart = [
        {"image_embeds": rows, "image_grid_thw": grid} for rows, grid in zip((one, two), grids, strict=True)
    ]
    seen = "<|vision_start|><|image_pad|><|vision_end|>"
    with LLM(str(tmp_path), enable_mm_embeds=True, **SIZES) as llm:
        right, *found = answers(llm, f"see {seen} and {seen} ", [ONE, TWO], together, apart, [apart[0], TWO])
        assert found == [right] * 3
        assert answers(llm, f"see {seen} and {seen} ", apart[::-1]) != [right]
        for given, message in (
            (one, "A picture with no image_grid_thw has 0 embeddings"),
            ({"image_embeds": one, "image_grid_thw": [1, 2, 2]}, "has 1 embeddings"),
            ({"image_embeds": one[:, 1:], "image_grid_thw": grids[0]}, "finite numbers in rows of"),
            ({"image_grid_thw": grids[0]}, "a tensor or an array of finite numbers"),
        ):
            with pytest.raises(BadRequest, match=message):
                answers(llm, f"see {seen} ", given)


def test_embeddings_are_answered_as_their_pictures(tmp_path: Path) -> None:
    write_llava(tmp_path)
    rows, _ = towers_rows(tmp_path, ONE, TWO)
    forms = [rows, torch.stack(rows), [rows[0][None], rows[1].numpy()], [ONE, rows[1]]]
    with LLM(str(tmp_path), enable_mm_embeds=True, **SIZES) as llm:
        right, *found = answers(llm, "see <image> and <image> ", [ONE, TWO], *forms)
        assert found == [right] * len(forms)
        part = {"type": "image_embeds", "image_embeds": rows[0]}
        talks: Any = [
            [{"role": "user", "content": [each]}]
            for each in (
                part,
                {**part, "image_embeds": {"image_embeds": rows[0]}},
                {"type": "image", "image": ONE},
            )
        ]
        said = [one.outputs[0].token_ids for one in llm.chat(talks, GREEDY, use_tqdm=False)]
        assert said[0] == said[1] == said[2]
        with pytest.raises(BadRequest, match="has 4 embeddings of this model, and image_embeds has 3"):
            answers(llm, "see <image> ", rows[0][:3])
    with LLM(str(tmp_path), **SIZES) as llm, pytest.raises(BadRequest, match="--enable-mm-embeds"):
        answers(llm, "see <image> ", rows[0])
