"""Trains the demo model from nothing, on the corpus that `corpus.py` makes, within a given time on a CPU.

    python -m models.demo.train --out models/demo --minutes 30

Ctrl-C ends early: what was learned so far is saved.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from models.demo import evaluate, tokenizer
from models.demo.corpus import Document, documents
from models.demo.tokenizer import Codec

_STEP_TOKENS, _ROW_LENS = 2048, (256, 512)
_PEAK_RATE, _WARMUP = 2e-3, 0.02
_SAVE_EVERY_S, _REPORT_EVERY_S = 240.0, 20.0
_NO_LOSS = -100

Encoded = tuple[list[int], list[int]]  # ids and labels of a document


@dataclass(slots=True)
class Batch:
    """Rows of whole documents, packed one after the other."""

    ids: Tensor  # [rows, row_len]
    labels: Tensor  # [rows, row_len]: the id itself where it is to be learned, else _NO_LOSS
    positions: Tensor  # [rows, row_len]: starts at 0 in every document
    documents: Tensor  # [rows, row_len]: the number of the document in its row, -1 for padding

    def attention_mask(self) -> Tensor:
        """True where a token may look: back, and in its own document only."""
        row_len = self.ids.shape[1]
        causal = torch.ones(row_len, row_len, dtype=torch.bool).tril()
        same = self.documents[:, :, None] == self.documents[:, None, :]  # [rows, row_len, row_len]
        return (same & causal)[:, None]  # [rows, 1, row_len, row_len]


class Encoder:
    """Documents to ids and labels: of a conversation only the assistant's turns are learned."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.header = codec.encode(f"{tokenizer.TURN_START}assistant\n")
        self.turn_end = codec.id_of(tokenizer.TURN_END)

    def encode(self, document: Document) -> Encoded:
        if not document.messages:
            return self._encode_pieces([*document.pieces, ("", tokenizer.END_OF_TEXT)])
        ids = self.codec.encode_chat(document.messages, document.tools, answer_next=False)
        labels = [_NO_LOSS] * len(ids)
        for start in range(len(ids)):
            if ids[start : start + len(self.header)] == self.header:
                begin = start + len(self.header)
                end = ids.index(self.turn_end, begin) + 1
                labels[begin:end] = ids[begin:end]
        return ids, labels

    def _encode_pieces(self, pieces: list[tuple[str, str]]) -> Encoded:
        ids: list[int] = []
        labels: list[int] = []
        for given, learned in pieces:
            before, after = self.codec.encode(given), self.codec.encode(learned)
            ids += before + after
            labels += [_NO_LOSS] * len(before) + after
        return ids, labels


class Packer:
    """Gathers documents until one finds no room."""

    def __init__(self, row_len: int) -> None:
        self.row_len = row_len
        self._rows: list[list[Encoded]] = [[] for _ in range(_STEP_TOKENS // row_len)]

    def add(self, document: Encoded) -> Batch | None:
        """The batch that is full, if there is no room for this document beside the others."""
        size, full = len(document[0]), None
        room = [row for row in self._rows if sum(len(ids) for ids, _ in row) + size <= self.row_len]
        if not room:
            full = self._pack()
            self._rows = room = [[] for _ in self._rows]
        room[0].append(document)
        return full

    def _pack(self) -> Batch:
        shape = (len(self._rows), self.row_len)
        batch = Batch(
            ids=torch.zeros(shape, dtype=torch.long),
            labels=torch.full(shape, _NO_LOSS),
            positions=torch.zeros(shape, dtype=torch.long),
            documents=torch.full(shape, -1),
        )
        for row, documents_of_row in enumerate(self._rows):
            start = 0
            for number, (ids, labels) in enumerate(documents_of_row):
                place = slice(start, start + len(ids))
                batch.ids[row, place] = torch.tensor(ids)
                batch.labels[row, place] = torch.tensor(labels)
                batch.positions[row, place] = torch.arange(len(ids))
                batch.documents[row, place] = number
                start += len(ids)
        return batch


def batches(encoder: Encoder, seed: int) -> Iterator[Batch]:
    """Short documents apart from long ones: attention over long rows is what costs most."""
    packers = [Packer(row_len) for row_len in _ROW_LENS]
    for document in documents(seed):
        encoded = encoder.encode(document)
        fitting = [packer for packer in packers if len(encoded[0]) <= packer.row_len]
        if fitting and (batch := fitting[0].add(encoded)) is not None:
            yield batch


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
        learned = target != _NO_LOSS
        # A document's first token follows another document: there is nothing to predict it from.
        learned &= batch.positions[:, 1:] > 0
        hidden = output.last_hidden_state[:, :-1][learned]  # [learned tokens, hidden]
        logits = model.lm_head(hidden)  # [learned tokens, vocab]
    return cross_entropy(logits.float(), target[learned])


def learning_rate(progress: float) -> float:
    """Linear warm-up, then a cosine down to a hundredth; progress runs from 0 to 1."""
    if progress < _WARMUP:
        return _PEAK_RATE * (progress + 1e-3) / _WARMUP
    return _PEAK_RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


class Optimizer:
    """Muon for the matrices of the layers, which learns them in fewer steps; AdamW for the rest."""

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


def fit(model: LlamaForCausalLM, stream: Iterator[Batch], out: Path, minutes: float) -> None:
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
        optimizer.step(learning_rate(progress))

        tokens += batch.ids.numel()
        losses.append(loss.item())
        now = time.monotonic()
        if now - reported > _REPORT_EVERY_S:
            speed = tokens / (now - started)
            print(
                f"{progress:6.1%}  step {step}  loss {fmean(losses):.4f}  {speed:,.0f} tokens/s", flush=True
            )
            reported, losses = now, []
        if now - saved > _SAVE_EVERY_S:
            save(model, out)
            saved = now


def save(model: LlamaForCausalLM, out: Path) -> None:
    """In bfloat16: a copy, since the float32 weights may go on learning."""
    copy.deepcopy(model).bfloat16().save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=30, help="how long to train")
    parser.add_argument("--resume", action="store_true", help="go on with the checkpoint in --out")
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
        fit(model, batches(Encoder(codec), options.seed), out, options.minutes)
    except KeyboardInterrupt:
        print("stopped early")
    save(model, out)
    print(evaluate.measure(model.bfloat16().eval(), codec))


if __name__ == "__main__":
    main()
