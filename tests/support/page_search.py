"""Tiny models for search among pages, and what transformers computes of queries and of pages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paligemma_pictured
import torch
import transformers
from pictured import write_pictured
from pictured_chat import QWEN, write_chat_files
from PIL.Image import Image
from qwen_pictured import FIELDS, OLDER, PICTURE, TOKENS
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

END = "<|endoftext|>"
WIDTH = 24


@dataclass
class Searched:
    folder: Path
    model: nn.Module
    processor: Any

    @classmethod
    def write(cls, folder: Path) -> Searched:
        """Save it with a chat template, which neither queries nor pages are written by."""
        text, vision = FIELDS["Qwen2VLForConditionalGeneration"]
        nested = {"model_type": "qwen2_vl", "text_config": text, "vision_config": vision, **TOKENS}
        fields = {"vlm_config": nested, "embedding_dim": WIDTH}
        model = write_pictured("ColQwen2ForRetrieval", folder, fields, OLDER)
        write_chat_files(folder, {307: "<|im_start|>", 308: "<|im_end|>", 309: END, **QWEN}, "<|image_pad|>")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.pad_token = END
        images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        return cls(folder, model, transformers.ColQwen2Processor(images, tokenizer))

    def query(self, text: str) -> dict[str, Tensor]:
        return self.processor.process_queries(text=[text])

    def page(self, picture: Image) -> dict[str, Tensor]:
        return self.processor.process_images(images=[picture])

    @torch.inference_mode()
    def vectors(self, batch: dict[str, Tensor]) -> Tensor:
        """The vectors of a query's or a page's tokens.

        transformers 5 calls its own model without ids, so that the tokens of pages are numbered one by one.
        colpali-engine, by which checkpoints are trained, numbers them as Qwen2-VL does, on three axes: such
        are given here.
        """
        ids, given = batch["input_ids"], {}
        if "image_grid_thw" in batch:
            trunk: Any = self.model.vlm
            types = (ids == PICTURE).int()
            grid = batch["image_grid_thw"]
            given["position_ids"], _ = trunk.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grid)
        names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
        return self.model(**{name: batch[name] for name in names if name in batch}, **given).embeddings[0]


class SearchedByColPali(Searched):
    """A tiny ColPali, all of whose tokens see each other."""

    @classmethod
    def write(cls, folder: Path, version: int = 2) -> SearchedByColPali:
        fields = {"vlm_config": paligemma_pictured.fields(version), "embedding_dim": WIDTH}
        model = write_pictured("ColPaliForRetrieval", folder, fields, paligemma_pictured.SETTINGS)
        write_chat_files(folder, {307: "<bos>", 308: "<pad>", PICTURE: "<image>"}, "<image>")
        named = {"bos_token": "<bos>", "pad_token": "<pad>"}
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **named}))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        images = SiglipImageProcessorPil(**paligemma_pictured.SETTINGS)
        images.image_seq_length = 4
        processor = transformers.ColPaliProcessor(images, tokenizer)
        return cls(folder, model, processor)

    @torch.inference_mode()
    def vectors(self, batch: dict[str, Tensor]) -> Tensor:
        names = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
        return self.model(**{name: batch[name] for name in names if name in batch}).embeddings[0]
