"""Videos at a real server: answers are those of transformers' models, and bad ones harm nobody."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live import serving
from media_files import noise, saved
from pictured_chat import QWEN, write_qwen
from video_files import data_url, jpeg_url, patches, video_file

from models.media.item import Layout, VideoProcessor
from server.errors import BadRequest
from server.media.video_decoding import decode_video
from server.offline.llm import LLM
from server.requests.sampling_params import SamplingParams

SIZES = (
    "--dtype",
    "float32",
    "--num-gpu-blocks-override",
    "200",
    "--max-num-seqs",
    "8",
    "--block-size",
    "16",
)
VIDEO = 311
COUNT = 8


@torch.inference_mode()
def likeliest(model: Any, ids: list[int], beside: dict[str, Any]) -> list[int]:
    made: list[int] = []
    for _ in range(COUNT):
        given = torch.tensor([ids + made])
        types = {"mm_token_type_ids": 2 * (given == VIDEO).int()}
        logits = model(input_ids=given, use_cache=False, **beside, **types).logits[0, -1]
        made.append(int(logits.argmax()))
    return made


def asked(url: str) -> dict[str, Any]:
    content = [
        {"type": "text", "text": "see "},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "text", "text": " ok"},
    ]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": COUNT, "temperature": 0}
    return {**body, "ignore_eos": True, "return_token_ids": True}


def assert_programs(folder: Path, file: bytes, right: list[int]) -> None:
    """Programs get the same answer, in whatever form they give the video."""
    path = folder / "video.mp4"
    path.write_bytes(file)
    said = "user: see <|vision_start|><|video_pad|><|vision_end|> ok "
    greedy = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    limits: Any = {"video": {"count": 1, "num_frames": 6}}
    with LLM(str(folder), dtype="float32", num_gpu_blocks_override=200, limit_mm_per_prompt=limits) as llm:
        prompts: list[Any] = [{"prompt": said, "multi_modal_data": {"video": form}} for form in (path, file)]
        talk = [{"role": "user", "content": asked(data_url(file))["messages"][0]["content"]}]
        [answer] = llm.chat(talk, greedy)
        assert answer.outputs[0].token_ids == right
        one, two = llm.generate(prompts, greedy)  # behind a token that begins texts
        assert one.prompt_token_ids[1:] == two.prompt_token_ids[1:] == answer.prompt_token_ids
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        picture, frames = noise(60, 40), np.stack([np.asarray(noise(60, 40))] * 4)
        both = said.replace("see", "<|vision_start|><|image_pad|><|vision_end|> and")
        [answer] = llm.generate({"prompt": both, "multi_modal_data": {"video": frames, "image": picture}})
        assert answer.outputs[0].token_ids
        with pytest.raises(BadRequest, match="has 1 videos, and 0 places for them"):
            llm.generate({"prompt": "none", "multi_modal_data": {"video": path}})
        with pytest.raises(BadRequest, match=r"of 8 bits; got float64 \[2, 2\]"):
            llm.generate({"prompt": said, "multi_modal_data": {"video": np.zeros((2, 2))}})


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "architecture", ["Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"]
)
def test_answers_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    pictured, tokenizer = write_qwen(architecture, tmp_path)
    file = video_file(18, 128, 64)
    processor = pictured.prompts.processor
    assert isinstance(processor, VideoProcessor)
    prepared = processor.prepare_video(decode_video(file, 1 << 20, is_base64=False), 6, 1 << 20)
    assert prepared.grid[0] == 3
    if architecture.startswith("Qwen2"):  # where time takes more positions than a side, transformers differs
        assert (prepared.interval, prepared.grid[2]) == (1.5, 10)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    layout: Layout = processor.layout(prepared).spelled(encode)
    start, end = ("", "") if layout.before else (QWEN[312], QWEN[313])
    before, behind = encode(f"user: see {start}{layout.before}"), encode(f"{end} ok ")
    beside = patches(prepared, processor.settings, pictured.settings.get("patch_size", 14))
    if architecture.startswith("Qwen2"):
        config: Any = pictured.model.config
        pace = config.vision_config.tokens_per_second
        beside["second_per_grid_ts"] = torch.tensor([prepared.interval / pace])
    right = likeliest(pictured.model, before + layout.tokens + behind, beside)

    assert_programs(tmp_path, file, right)
    limits = ("--limit-mm-per-prompt", '{"video": {"count": 1, "num_frames": 6}}')
    with serving(str(tmp_path), *SIZES, *limits, "--max-num-batched-tokens", "24") as server:
        for _ in range(2):
            response = server.post("/v1/chat/completions", asked(data_url(file)))
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["token_ids"] == right
            assert response.json()["usage"]["prompt_tokens"] == len(before + layout.tokens + behind)
        frames = server.post("/v1/chat/completions", asked(jpeg_url([noise(60, 40), noise(60, 40)])))
        assert frames.status_code == 200, frames.text
        refused = server.post("/v1/chat/completions", asked(data_url(saved(noise(9, 9)))))
        assert (refused.status_code, "must be one of mov" in refused.text) == (400, True)
        twice = asked(data_url(file))
        twice["messages"] *= 2
        many = server.post("/v1/chat/completions", twice)
        assert (many.status_code, "At most 1 video(s)" in many.text) == (400, True)
