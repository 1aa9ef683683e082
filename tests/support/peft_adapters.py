"""Random adapters that PEFT makes and saves, and what it computes with them."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny import hf_model
from torch import Tensor


@dataclass(frozen=True)
class Made:
    """An adapter, and the model that has it."""

    folder: Path
    model: Any = field(repr=False)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """[T, V] float32: what follows after each of the tokens; of a classifier [1, labels]."""
        return self.model(input_ids=torch.tensor([tokens])).logits[0].float()


def make_adapter(base: Path, folder: Path, seed: int = 0, model: Any = None, **fields: Any) -> Made:
    """Have PEFT make an adapter of a base, or of `model`, with random numbers; `fields` are LoraConfig's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft

        hf_model.cache_clear()  # the model is changed in place
        plain = hf_model(base) if model is None else model
        hf_model.cache_clear()
        fields = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, **fields}
        made = peft.get_peft_model(plain, peft.LoraConfig(**fields)).eval()
        drawn = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, each in made.named_parameters():
                if "magnitude" in name:
                    each.mul_(1 + 0.3 * torch.rand(each.shape, generator=drawn))
                elif each.requires_grad:
                    each.copy_(0.3 * torch.randn(each.shape, generator=drawn))
        made.peft_config["default"].base_model_name_or_path = str(base)
        made.save_pretrained(str(folder))
    return Made(folder, made)
