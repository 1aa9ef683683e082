"""The training of drafters for the demo model on its own corpus, within a given processor time on one core.

    python -m demo_training.train_drafts --method draft_model --out models/demo/drafts/draft_model
    python -m demo_training.train_drafts --method eagle3 --out models/demo/drafts/eagle3

A drafter learns the demo model's distributions, not the corpus. What is measured after training, on
questions of the evaluation, is written into its config as `acceptance`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from demo_training.corpus import documents
from demo_training.drafters import (
    AUX_LAYERS,
    GUESSES,
    Acceptance,
    Eagle3,
    acceptance,
    answered,
    eagle3_drafter,
    load_draft_model,
    load_eagle3,
    load_target,
    model_drafter,
    streams,
)
from demo_training.packing import NO_LOSS, Batch, Encoder, batches
from demo_training.tokenizer import Codec
from demo_training.train import warmth
from models.checkpoint.hub import DEMO

_REPORT_EVERY_S = 20.0
_KNOWN_TOKENS = 1024
_PART_TOKENS = 512
_LATER_WEIGHT = 0.8
"""The weight of a guess in the loss of EAGLE-3, for each guess before it."""

Losses = Callable[[Batch], Iterable[Tensor]]
"""Losses of parts of a batch, each of which is propagated back by itself."""


class Optimizer:
    """Muon in float32 for the matrices between embeddings and head, AdamW for the rest.

    torch's own Muon computes in bfloat16, which is slow on processors without instructions for it.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        inner = [w for name, w in named if w.ndim == 2 and "embed" not in name and "lm_head" not in name]
        kept = {id(weight) for weight in inner}
        self._inner = [(weight, torch.zeros_like(weight)) for weight in inner]
        self._rest = torch.optim.AdamW(
            [weight for _, weight in named if id(weight) not in kept], betas=(0.9, 0.98), weight_decay=0.0
        )

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for weight, momentum in self._inner:
            assert weight.grad is not None
            momentum.lerp_(weight.grad, 0.05)
            update = orthogonal(weight.grad.lerp(momentum, 0.95))
            # Scaled so, an update is as large as one of AdamW.
            weight.mul_(1 - 0.05 * rate).sub_(update, alpha=rate * 0.2 * max(weight.shape) ** 0.5)
            weight.grad = None
        for group in self._rest.param_groups:
            group["lr"] = rate
        self._rest.step()
        self._rest.zero_grad()


def orthogonal(matrix: Tensor) -> Tensor:
    """Bring all singular values near 1, by five Newton-Schulz steps."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (2.0315 * square @ square - 4.775 * square) @ wide
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


def distilled(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute the cross entropy of each row of logits: [rows]."""
    return -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to train, of which the sooner ends it, and how fast."""

    minutes: float
    """The processor time."""
    wall_minutes: float
    peak_rate: float


def fit(model: nn.Module, losses: Losses, stream: Iterator[Batch], pace: Pace) -> None:
    optimizer = Optimizer(model)
    started = reported = time.monotonic()
    began = time.process_time()
    recent: list[float] = []
    for step, batch in enumerate(stream, 1):
        used, passed = time.process_time() - began, time.monotonic() - started
        progress = max(used / pace.minutes, passed / pace.wall_minutes) / 60
        if progress >= 1:
            return
        total = 0.0
        for loss in losses(batch):
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(pace.peak_rate * warmth(progress))
        recent.append(total)
        if time.monotonic() - reported > _REPORT_EVERY_S:
            print(f"{progress:6.1%}  {used:.0f} s  step {step}  loss {fmean(recent):.4f}", flush=True)
            reported, recent = time.monotonic(), []


def parts(stream: Iterable[Batch]) -> Iterator[Batch]:
    """Cut batches into parts of so many tokens that a short training has many steps."""
    for batch in stream:
        rows = _PART_TOKENS // batch.ids.shape[1]
        pieces = (batch.ids, batch.labels, batch.positions, batch.documents)
        for ids, labels, positions, numbers in zip(*(piece.split(rows) for piece in pieces), strict=True):
            yield Batch(ids, labels, positions, numbers)


# A draft model.


def new_draft_model(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """Make a model of two layers, half as wide as the target, with the main part of its embeddings."""
    fields = target.config.to_dict()
    sizes = {"hidden_size": 128, "intermediate_size": 416, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**fields | sizes | heads))
    table = target.model.embed_tokens.weight
    _, _, directions = torch.linalg.svd(table, full_matrices=False)  # [width, width]
    model.model.embed_tokens.weight.data.copy_(table @ directions[:128].T)
    # Embeddings of the target are large for a head: with this, first guesses are not too sure.
    model.model.norm.weight.data.fill_(0.3)
    model.generation_config = target.generation_config
    return model


def draft_model_losses(model: LlamaForCausalLM) -> Losses:
    """Learn the corpus itself: half of the time of a step would go to the target's distributions."""

    def losses(batch: Batch) -> Iterator[Tensor]:
        output = model.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            attention_mask=batch.attention_mask(),
            use_cache=False,
        )
        target = batch.labels[:, 1:]
        learned = (target != NO_LOSS) & (batch.positions[:, 1:] > 0)
        yield cross_entropy(model.lm_head(output.last_hidden_state[:, :-1][learned]), target[learned])

    return losses


# An EAGLE-3 head.


def known_tokens(codec: Codec, seed: int, texts: int = 4000) -> Tensor:
    """Find the most frequent tokens of answers, in order."""
    encoder, counts = Encoder(codec), Counter[int]()
    for document in islice(documents(seed), texts):
        counts.update(label for label in encoder.encode(document)[1] if label != NO_LOSS)
    found = [token for token, _ in counts.most_common(_KNOWN_TOKENS)]
    share = sum(counts[token] for token in found) / counts.total()
    print(f"{len(found)} of {len(counts)} tokens make {share:.2%} of answers")
    # Fewer than wanted are filled up, so that the size is the same for any corpus.
    found += [token for token in range(_KNOWN_TOKENS * 2) if token not in found][: _KNOWN_TOKENS - len(found)]
    return torch.tensor(sorted(found))


def new_eagle3(target: LlamaForCausalLM, known: Tensor) -> Eagle3:
    fields = target.config.to_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "intermediate_size": 384,
        "tie_word_embeddings": False,
        "draft_vocab_size": len(known),
        "target_hidden_size": target.config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "norm_before_residual": False,
    }
    head = Eagle3(LlamaConfig(**fields), known)
    width = target.config.hidden_size
    for weight in head.parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=0.02)
    # It begins as the target's last stream and head, which are near what is wanted.
    head.fc.weight.data[:, -width:] += torch.eye(width)
    head.lm_head.weight.data.copy_(target.lm_head.weight[known])
    head.norm.weight.data.copy_(0.3 * target.model.norm.weight)  # but not yet as sure
    return head


def eagle3_losses(head: Eagle3, target: LlamaForCausalLM) -> Losses:
    table = target.model.embed_tokens.weight

    def losses(batch: Batch) -> Iterator[Tensor]:
        with torch.no_grad():
            output = target.model(
                input_ids=batch.ids,
                position_ids=batch.positions,
                attention_mask=batch.attention_mask(),
                use_cache=False,
                output_hidden_states=True,
            )
            aux, last = streams(output.hidden_states), output.last_hidden_state
        sees, count = batch.attention_mask()[:, 0], (batch.labels != NO_LOSS).sum()
        for row, ids in enumerate(batch.ids):
            starts, ahead, learned = chains_of(batch.labels[row], batch.documents[row])
            seen, follow = sees[row, starts, :-1], ids[ahead]
            chains = head.chains(table, ids, aux[row], batch.positions[row], starts, seen, follow)
            teacher = last[row] @ table[head.known].T  # [row_len, known tokens]: embeddings are the head
            loss = torch.zeros(())
            for guess, logits in enumerate(chains):
                told = learned[:, guess]
                lost = distilled(teacher[ahead[told, guess] - 1], logits[told])
                loss = loss + _LATER_WEIGHT**guess * lost.sum()
            if len(starts):
                yield loss / count

    return losses


def chains_of(labels: Tensor, documents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the chains of a row: the entries [chains] they start at, the places they guess, and which count.

    Both have the shape [chains, GUESSES]. A guess counts if it and all before it are of one answer.
    """
    last = len(labels) - 1
    starts = torch.arange(last - 1)
    ahead = starts[:, None] + 2 + torch.arange(GUESSES)
    inside, ahead = ahead <= last, ahead.clamp(max=last)
    learned = inside & (labels[ahead] != NO_LOSS) & (documents[ahead] == documents[starts, None])
    learned = learned.cummin(1).values
    begun = learned[:, 0]
    return starts[begun], ahead[begun], learned[begun]


# Files.


def save_draft_model(model: LlamaForCausalLM, out: Path) -> None:
    model.bfloat16().save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, out / name)


def save_eagle3(head: Eagle3, out: Path) -> None:
    head.bfloat16().config.save_pretrained(out)
    save_file(head.state_dict(), out / "model.safetensors", {"format": "pt"})


def note(found: Acceptance, out: Path) -> None:
    """Write what was measured into the config."""
    path = out / "config.json"
    facts: dict[str, object] = {"guesses": GUESSES, "answers": found.answers, "steps": found.steps}
    facts |= {
        "tokens_a_step": round(found.tokens_a_step, 3),
        "held": [round(share, 3) for share in found.held],
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"acceptance": facts}, indent=2) + "\n")
    print(facts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a drafter for the demo model.")
    parser.add_argument("--method", choices=("draft_model", "eagle3"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=8, help="of processor time; 0 only measures")
    parser.add_argument("--wall-minutes", type=float, default=60, help="how long that may take")
    parser.add_argument("--resume", action="store_true", help="go on with the checkpoint in --out")
    parser.add_argument("--peak-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=21, help="of the corpus and the first weights")
    parser.add_argument("--every", type=int, default=10, help="measure with each so many-th question")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    target, codec = load_target()
    pace = Pace(options.minutes, options.wall_minutes, options.peak_rate)
    stream = batches(Encoder(codec), options.seed)
    if options.method == "draft_model":
        if pace.minutes:
            model = load_draft_model(out).train() if options.resume else new_draft_model(target)
            print(f"{model.num_parameters():,} parameters")
            fit(model, draft_model_losses(model), stream, pace)
            save_draft_model(model, out)
        drafter = model_drafter(load_draft_model(out))
    else:
        if pace.minutes:
            known = known_tokens(codec, options.seed)
            head = load_eagle3(out).train() if options.resume else new_eagle3(target, known)
            print(f"{sum(weight.numel() for weight in head.parameters()):,} parameters")
            fit(head, eagle3_losses(head, target), parts(stream), pace)
            save_eagle3(head, out)
        drafter = eagle3_drafter(load_eagle3(out), target)
    note(acceptance(drafter, answered(target, codec, options.every)), out)


if __name__ == "__main__":
    main()
