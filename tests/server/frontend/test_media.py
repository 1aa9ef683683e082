"""A frontend gets ready for media if its engine takes any."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fake_client import FakeClient

from server.frontend.frontend import Frontend

CONFIG = {
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 310,
    "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14},
}
SETTINGS = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": 28}


@pytest.fixture
def seeing(
    client: FakeClient, folder: Path, make: Callable[..., Frontend]
) -> Callable[..., Awaitable[Frontend]]:
    """Makes a frontend whose engine is ready, and takes items of so many embeddings."""
    config = json.loads((folder / "config.json").read_text())
    text = {name: config[name] for name in config if name != "architectures"}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "text_config": text, "model_type": "llava"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))

    async def build(most: int, *flags: str) -> Frontend:
        frontend = make(*flags)
        client.locate(folder)
        client.become_ready(most_embeddings=most)
        await frontend.start()
        return frontend

    return build


async def test_what_media_need_is_opened_once(
    seeing: Callable[..., Awaitable[Frontend]], client: FakeClient
) -> None:
    frontend = await seeing(4, "--limit-mm-per-prompt.image", "3")
    reader, media = frontend.media, frontend.facts.media
    assert reader is not None and media is not None
    assert (media.placeholder, media.most) == ("<image>", {"image": 3})
    client.become_ready(most_embeddings=4)
    assert frontend.media is reader and frontend.facts.media == media


async def test_a_model_without_a_tower_takes_texts(seeing: Callable[..., Awaitable[Frontend]]) -> None:
    frontend = await seeing(0)
    assert frontend.media is frontend.facts.media is None


async def test_settings_that_the_processor_does_not_have(seeing: Callable[..., Awaitable[Frontend]]) -> None:
    with pytest.raises(ValueError, match="the processor has no setting 'max_pixels', but crop_size"):
        await seeing(4, "--mm-processor-kwargs.max_pixels", "3")
