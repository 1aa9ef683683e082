"""The training of the demo model on the corpus that `corpus.py` makes, within a given time on a CPU.

    python -m demo_training.train --out models/demo --minutes 30

It may be stopped: Ctrl-C saves what was learned so far, and --resume goes on from there.
"""

import argparse
import copy
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from demo_training import evaluate, tokenizer
from demo_training.corpus import documents
from demo_training.packing import NO_LOSS, Batch, Encoder, batches
from demo_training.tokenizer import Codec

_WARMUP = 0.02
_SAVE_EVERY_S, _REPORT_EVERY_S = 240.0, 20.0


def new_model(codec: Codec) -> LlamaForCausalLM:
    turn_end, text_end = codec.id_of(tokenizer.TURN_END), codec.id_of(tokenizer.END_OF_TEXT)
    config = LlamaConfig(
        vocab_size=tokenizer.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=tokenizer.MAX_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=turn_end,
        pad_token_id=text_end,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[turn_end, text_end], pad_token_id=text_end, do_sample=True, temperature=0.3, top_p=0.9
    )
    return model


def loss_of(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        output = model.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            attention_mask=batch.attention_mask(),
            use_cache=False,
        )
        target = batch.labels[:, 1:]
        learned = target != NO_LOSS
        # A document's first token follows another document, from which it cannot be predicted.
        learned &= batch.positions[:, 1:] > 0
        hidden = output.last_hidden_state[:, :-1][learned]  # [learned tokens, hidden]
        logits = model.lm_head(hidden)  # [learned tokens, vocab]
    return cross_entropy(logits.float(), target[learned])


def warmth(progress: float) -> float:
    """The share of the peak rate at a progress of 0 to 1: up linearly, then a cosine down to a hundredth."""
    if progress < _WARMUP:
        return (progress + 1e-3) / _WARMUP
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


class Optimizer:
    """Muon for the matrices of the layers, which it learns in fewer steps, and AdamW for the rest."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        inner = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
        kept = {id(weight) for weight in inner}
        others = [weight for weight in model.parameters() if id(weight) not in kept]
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            # With this adjustment both take the same learning rate.
            torch.optim.Muon(inner, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        )

    def step(self, rate: float) -> None:
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad()


def fit(
    model: LlamaForCausalLM, stream: Iterator[Batch], out: Path, minutes: float, peak_rate: float
) -> None:
    optimizer = Optimizer(model)
    started = reported = saved = time.monotonic()
    tokens, losses = 0, []
    for step, batch in enumerate(stream, 1):
        progress = (time.monotonic() - started) / (60 * minutes)
        if progress >= 1:
            return
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(peak_rate * warmth(progress))

        tokens += batch.ids.numel()
        losses.append(loss.item())
        now = time.monotonic()
        if now - reported > _REPORT_EVERY_S:
            speed = tokens / (now - started)
            state = f"{progress:6.1%}  step {step}  loss {fmean(losses):.4f}  {speed:,.0f} tokens/s"
            print(state, flush=True)
            reported, losses = now, []
        if now - saved > _SAVE_EVERY_S:
            save(model, out)
            saved = now


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Save a copy in bfloat16, since the float32 weights may go on learning."""
    copy.deepcopy(model).bfloat16().save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=30, help="how long to train")
    parser.add_argument("--resume", action="store_true", help="go on with the checkpoint in --out")
    parser.add_argument("--peak-rate", type=float, default=2e-3, help="lower it to finish a run cut short")
    parser.add_argument("--seed", type=int, default=20, help="of the corpus and the first weights")
    parser.add_argument("--threads", type=int, default=1, help="more only help on idle cores")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)

    if options.resume:
        codec = Codec(Tokenizer.from_file(str(out / "tokenizer.json")))
        model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    else:
        trained = tokenizer.train(islice(documents(options.seed), 20_000))
        tokenizer.save(trained, out)
        codec = Codec(trained)
        model = new_model(codec)
    print(f"{model.num_parameters():,} parameters, {options.minutes:g} minutes")
    try:
        fit(model, batches(Encoder(codec), options.seed), out, options.minutes, options.peak_rate)
    except KeyboardInterrupt:
        print("stopped early")
    save(model, out)
    print(evaluate.measure(model.bfloat16().eval(), codec))


if __name__ == "__main__":
    main()
