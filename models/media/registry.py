"""The registry of media processors: which class prepares the pictures, videos or sounds of an architecture.

Values are "module:Class" strings, as in `models.registry`; "module:function" chooses by the files. An
architecture that is not listed has text only.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

from models.composites import unnested
from models.media.files import MediaFiles, read_files
from models.media.item import Processor
from models.plain_files import read_json

PROCESSORS = {
    "CLIPModel": "fixed_size:ClipProcessor",
    "ColPaliForRetrieval": "fixed_size:ColPaliProcessor",
    "ColQwen2ForRetrieval": "qwen_vl:ColQwen2Processor",
    "DeepseekOcr2ForConditionalGeneration": "tiling.deepseek_ocr:DeepseekOcr2Processor",
    "DeepseekOCR2ForCausalLM": "tiling.deepseek_ocr:PublishedOcr2Processor",
    "DeepseekOCRForCausalLM": "tiling.deepseek_ocr:DeepseekOcrProcessor",
    "Gemma3ForConditionalGeneration": "fixed_size:Gemma3Processor",
    "Gemma4ForConditionalGeneration": "kept_shape:Gemma4Processor",
    "Gemma4UnifiedForConditionalGeneration": "kept_shape:Gemma4Processor",
    "GotOcr2ForConditionalGeneration": "tiling.internvl:GotOcr2Processor",
    "Idefics3ForConditionalGeneration": "tiling.idefics3:Idefics3Processor",
    "InternVLChatModel": "tiling.internvl:InternVLChatProcessor",
    "InternVLForConditionalGeneration": "tiling.internvl:InternVLVideoProcessor",
    "JinaVLForRanking": "qwen_vl:QwenVLProcessor",
    "LlavaForConditionalGeneration": "fixed_size:llava_processor",
    "LlavaNextForConditionalGeneration": "tiling.llava_next:LlavaNextProcessor",
    "LlavaOnevisionForConditionalGeneration": "tiling.llava_next:LlavaOnevisionProcessor",
    "MiniCPMV": "tiling.minicpmv:MiniCPMVProcessor",
    "Mistral3ForConditionalGeneration": "kept_shape:PixtralProcessor",
    "PaliGemmaForConditionalGeneration": "fixed_size:PaliGemmaProcessor",
    "Qwen2AudioForConditionalGeneration": "audio:Qwen2AudioProcessor",
    "Qwen2_5_VLForConditionalGeneration": "qwen_vl:Qwen25VLProcessor",
    "Qwen2VLForConditionalGeneration": "qwen_vl:QwenVLProcessor",
    "Qwen3ASRForConditionalGeneration": "audio:Qwen3ASRProcessor",
    "Qwen3_5ForConditionalGeneration": "qwen_vl:Qwen3VLProcessor",
    "Qwen3_5MoeForConditionalGeneration": "qwen_vl:Qwen3VLProcessor",
    "Qwen3VLForConditionalGeneration": "qwen_vl:Qwen3VLProcessor",
    "Qwen3VLMoeForConditionalGeneration": "qwen_vl:Qwen3VLProcessor",
    "Siglip2Model": "kept_shape:Siglip2Processor",
    "SiglipModel": "fixed_size:SiglipProcessor",
    "SmolVLMForConditionalGeneration": "tiling.idefics3:SmolVLMProcessor",
    "VoxtralForConditionalGeneration": "audio:VoxtralProcessor",
}


def find_media(folder: Path) -> MediaFiles | None:
    """What a checkpoint's folder says about its media; None if its architecture has text only. Raises
    ConfigError if a file cannot be used."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        return None
    whole = unnested(cast("dict[str, object]", config))
    architectures = whole.get("architectures")
    names = cast("list[object]", architectures) if isinstance(architectures, list) else []
    known = next((name for name in names if isinstance(name, str) and name in PROCESSORS), None)
    return None if known is None else read_files(folder, known, whole)


def make_processor(files: MediaFiles) -> Processor:
    """The processor of a checkpoint: of a model that hears, an `AudioProcessor` that prepares no pictures.

    Raises ConfigError for settings that are not served.
    """
    module, _, name = PROCESSORS[files.architecture].partition(":")
    return getattr(import_module(f"models.media.{module}"), name)(files)
