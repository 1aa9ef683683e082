"""Tiny random checkpoints of real architectures, and Hugging Face's own classes as the oracle for them.

A checkpoint is a whole one (config, weights, tokenizer, chat template, generation config), always the same
for the same arguments, and made so that a mistake shows: norms are not the identity, biases are not zero,
query heads share key heads, windows are shorter than a prompt, soft-caps bite.
"""

import json
import re
from functools import cache, lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_shapes import BOS_ID, ENCODER_SHAPES, EOS_ID, FAMILIES, PAD_ID, SPECIALS, TURN_END_ID
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn

BOS, EOS, PAD, TURN, TURN_END = SPECIALS
VOCAB_SIZE = 320

_TEXT = """\
The quick brown fox jumps over the lazy dog, and then the dog thinks about the fox.
There is nothing in the room but the chair, the table and the thing on the table.
She said that there were three of them, and that they would be there in the morning.
What is the answer to the question? The answer is that there is no other question.
system user assistant You are a helpful assistant. Hello, hello! How are you?
import this, then return that: for each one in the other, there is another one.
"""

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)

ARCHITECTURES = tuple(FAMILIES)

ENCODERS = tuple(ENCODER_SHAPES)

REPLAYED_ENCODERS = tuple(name for name in ENCODERS if name != "DebertaV2")
"""The encoders whose attention is an operation of ours: DeBERTa's is torch's, text by text."""


def tiny_checkpoint(arch: str, folder: Path, **overrides: object) -> Path:
    """Write a checkpoint of `arch` into `folder` and return it. `overrides` are fields of its config.json."""
    config = tiny_config(arch, **overrides)
    model = getattr(transformers, arch)(config)
    # With larger ones the norms behind each layer of an encoder would leave nothing of what tokens differ in.
    randomise(model, seed=0, scale=0.3 if arch in FAMILIES else 0.15)
    model.to(config.dtype).save_pretrained(folder)
    write_tokenizer(folder)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, TURN_END_ID], "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def tiny_config(arch: str, **overrides: object) -> Any:
    """The config of such a checkpoint, which is all that kernels are compiled by."""
    return getattr(transformers, arch).config_class(
        **{
            **shape_of(arch),
            "vocab_size": VOCAB_SIZE,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "dtype": "float32",
            "architectures": [arch],
            **overrides,
        }
    )


def shape_of(arch: str) -> dict[str, object]:
    """The fields of the tiny config of an architecture."""
    if arch in FAMILIES:
        return FAMILIES[arch]
    return ENCODER_SHAPES[re.sub("(Model|For[A-Z].*)$", "", arch)]


def write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [TURN, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


@cache
def _tokenizer_json() -> str:
    """Byte-level BPE that knows all 256 bytes, so any text comes back as it went in. Starts with BOS."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the text yields {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return tokenizer.to_str()


@torch.no_grad()
def randomise(model: nn.Module, seed: int, scale: float) -> None:
    """Weights large enough to matter. Norms and biases keep their initial 0 or 1 as the mean.

    Embeddings stay small: where the head is tied to them, a token would otherwise mostly predict itself.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("sinks", "e_score_correction_bias")):
            parameter.copy_(noise if name.endswith("sinks") else 0.2 * noise)
        elif name.endswith("conv1d.weight"):
            parameter.copy_(noise)
        elif name.endswith("A_log"):
            parameter.copy_(noise - 1)  # some heads forget soon, others late
        elif parameter.dim() == 1:
            drawn = parameter.min() != parameter.max()  # by transformers, and otherwise in each process
            parameter.copy_(0.1 * noise if drawn else parameter + 0.1 * noise)
        else:
            parameter.copy_((0.1 if parameter in embeddings else scale) * noise)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        elif name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))


_IN_NO_TABLE = ("Mistral4ForCausalLM",)
"""Causal language models that `AutoModelForCausalLM` does not know."""


@lru_cache(8)
def hf_model(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Hugging Face's model with its plainest attention, which knows soft-caps and windows.

    That of Falcon adds slopes twice, to scores and to their mask.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture, attention = config.get("architectures", [""])[0], "sdpa" if config.get("alibi") else "eager"
    made = getattr(transformers, architecture if architecture in _IN_NO_TABLE else "AutoModelForCausalLM")
    model = made.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return model.eval()


@torch.inference_mode()
def hf_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """[T, V] float32, computed in this type: what follows after each of the tokens."""
    return hf_model(folder, dtype)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


@torch.inference_mode()
def hf_greedy(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The `max_tokens` most likely tokens after each prompt, end-of-sequence tokens not minded."""
    rows = [list(prompt) for prompt in prompts]
    for _ in range(max_tokens):
        filled = torch.tensor([*zip_longest(*rows, fillvalue=0)]).T  # no token sees those after it
        for row, found in zip(rows, hf_model(folder)(input_ids=filled, use_cache=False).logits, strict=True):
            row.append(int(found[len(row) - 1].argmax()))
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
