"""What checkpoints' files say about their media, and which of it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from gemma_pictured import FIELDS as GEMMA_CONFIG
from gemma_pictured import SETTINGS as GEMMA_SETTINGS
from media_files import QWEN, QWEN_CONFIG, QWEN_SETTINGS, media_files, tower

from models.media.item import MediaError
from models.media.registry import PROCESSORS, find_media, make_processor
from models.media.resize import check_ratio
from models.plain_files import ConfigError

CLIP = tower("clip", image_size=224)


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_settings_are_found_where_transformers_looks_first(tmp_path: Path) -> None:
    config = {"architectures": ["Unknown", "CLIPModel"], **CLIP}
    write(tmp_path, config=config, preprocessor_config={"resample": 2}, processor_config={"num_crops": 1})
    found = find_media(tmp_path)
    assert found and (found.architecture, found.settings) == ("CLIPModel", {"resample": 2})
    write(tmp_path, processor_config={"image_processor": {"resample": 1}})
    found = find_media(tmp_path)
    assert found and found.settings == {"resample": 1}


def test_a_model_of_text_has_no_media(tmp_path: Path) -> None:
    write(tmp_path, config={"architectures": ["LlamaForCausalLM"]})
    assert find_media(tmp_path) is None


def test_missing_settings_are_named(tmp_path: Path) -> None:
    write(tmp_path, config={"architectures": ["CLIPModel"]})
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json"):
        find_media(tmp_path)


def test_old_files_say_little(tmp_path: Path) -> None:
    """OpenAI's first CLIP names a class that is gone, and its sizes are numbers; null says nothing."""
    settings = {
        "feature_extractor_type": "CLIPFeatureExtractor",
        "size": 224,
        "crop_size": 224,
        "image_std": None,
    }
    processor = make_processor(media_files("CLIPModel", CLIP, settings))
    assert processor.settings.image_std[0] == 0.26862954
    areas = {"image_processor_type": "Qwen2VLImageProcessorFast", "size": {"max_pixels": 9, "min_pixels": 1}}
    make_processor(media_files(QWEN.architecture, QWEN_CONFIG, areas))


NEXT, ONE = "LlavaNextForConditionalGeneration", "LlavaOnevisionForConditionalGeneration"
CUT = {"size": 224, "crop_size": 224, "image_grid_pinpoints": [[224, 448]]}
SIGLIP = tower("siglip", image_size=384, patch_size=16)
GEMMA = "Gemma3ForConditionalGeneration"
OBLONG = tower("intern", image_size=[28, 56])
LLAVA, CROP = "LlavaForConditionalGeneration", {"height": 200, "width": 224}


@pytest.mark.parametrize(
    ("architecture", "config", "settings", "message"),
    [
        ("CLIPModel", CLIP, {"resample": 7}, r"preprocessor_config\.json: Invalid enum value 7"),
        ("CLIPModel", CLIP, {"image_std": [1, 0, 1]}, "Expected `float` > 0"),
        ("CLIPModel", CLIP, {"image_mean": 0.5}, "Expected `array`"),
        ("CLIPModel", CLIP, {"do_pad": True}, "the field 'do_pad' is True, and only False is served"),
        ("CLIPModel", CLIP, {"do_resize": False}, "the field 'do_resize' is False, and only True is served"),
        ("CLIPModel", CLIP, {"crop_size": CROP}, "pictures do not become 224 x 224"),
        ("CLIPModel", CLIP, {"size": {"longest_edge": 224}}, "pictures do not become 224 x 224"),
        ("CLIPModel", CLIP, {"do_center_crop": False}, "pictures do not become 224 x 224"),
        (
            "CLIPModel",
            CLIP,
            {"image_processor_type": "XImageProcessor"},
            "XImageProcessor, but CLIPModel is served",
        ),
        ("CLIPModel", {}, {}, r"config\.json: .*missing required field `vision_config`"),
        (LLAVA, tower("pixtral"), {}, "the tower is 'pixtral_vision_model'"),
        (QWEN.architecture, QWEN_CONFIG, {"patch_size": 16}, "patch_size and merge_size are not those"),
        (
            QWEN.architecture,
            QWEN_CONFIG,
            {"min_pixels": 2_000_000},
            "no picture has 2000000 to 1003520 pixels",
        ),
        (QWEN.architecture, QWEN_CONFIG, {"patch_size": "14"}, "Expected `int`, got `str`"),
        (NEXT, CLIP, {**CUT, "image_grid_pinpoints": [[224, 300]]}, "not whole tiles of 224 pixels"),
        (NEXT, {**CLIP, "vision_feature_select_strategy": "full"}, CUT, "'full' does not fit the tower"),
        (ONE, {**SIGLIP, "vision_aspect_ratio": "pad"}, {}, "'pad' is not of the form anyres_max_9"),
        ("SmolVLMForConditionalGeneration", SIGLIP, {}, "tiles of 364 x 364 are not what the tower takes"),
        ("Mistral3ForConditionalGeneration", CLIP, {"do_pad": False}, "'do_pad' is False, and only True"),
        ("Siglip2Model", CLIP, {"patch_size": 14}, "'patch_size' is not that of the tower"),
        ("InternVLForConditionalGeneration", SIGLIP, {"size": {"height": 3}}, "are not squares"),
        (GEMMA, {**GEMMA_CONFIG, "mm_tokens_per_image": 3}, GEMMA_SETTINGS, "does not cut 4 x 4 patches"),
        (GEMMA, {**GEMMA_CONFIG, "mm_tokens_per_image": 9}, GEMMA_SETTINGS, "does not cut 4 x 4 patches"),
        ("InternVLForConditionalGeneration", OBLONG, {}, r"must be of squares, but one is \[28, 56\]"),
    ],
)
def test_what_is_not_served_is_refused(
    architecture: str, config: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    usual = QWEN_SETTINGS if architecture == QWEN.architecture else {}
    with pytest.raises(ConfigError, match=message):
        make_processor(media_files(architecture, config, {**usual, **settings}))


def test_strips_are_refused_where_their_shape_is_kept() -> None:
    check_ratio(1, 200)
    with pytest.raises(MediaError, match="1 x 201 pixels"):
        check_ratio(1, 201)


@pytest.mark.parametrize("architecture", PROCESSORS)
def test_every_entry_of_the_registry_is_there(architecture: str) -> None:
    with pytest.raises(ConfigError):
        make_processor(media_files(architecture, {}, {"sampling_rate": 8000}))  # of sounds
