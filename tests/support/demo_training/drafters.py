"""Drafters of the demo model in plain torch, and a count of how many of their guesses hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM

from demo_training.evaluate import answer_ids, cases
from demo_training.tokenizer import Codec
from models.checkpoint.hub import DEMO

GUESSES = 4
AUX_LAYERS = (1, 3, 5)
"""The layers of the demo model whose input an EAGLE-3 head reads."""

Drafter = Callable[[Tensor, Tensor], Tensor]
"""A drafter takes tokens [n] and numbers of known tokens [starts], and gives guesses [starts, GUESSES]."""


def rotated(heads: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate heads [n, heads, size] by their positions [n], as Llama does."""
    half = heads.shape[-1] // 2
    turns = theta ** (-torch.arange(half) / half)  # [half]
    angles = positions[:, None, None] * turns  # [n, 1, half]
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Attention(nn.Module):
    """The attention of an EAGLE-3 layer, whose input is twice as wide as its output."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, size = config.hidden_size, config.head_dim
        self.size, self.theta = size, float(config.rope_parameters["rope_theta"])
        self.q_proj = nn.Linear(2 * width, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(2 * width, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * width, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, width, bias=False)

    def entries(self, read: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Make keys and values [n, kv heads, size] of inputs [n, 2 * width]."""
        keys = self.k_proj(read).unflatten(-1, (-1, self.size))
        return rotated(keys, positions, self.theta), self.v_proj(read).unflatten(-1, (-1, self.size))

    def forward(
        self,
        read: Tensor,  # [chains, 2 * width]
        positions: Tensor,  # [chains]
        shared: tuple[Tensor, Tensor],  # keys and values of all entries, each [entries, kv heads, size]
        seen: Tensor,  # [chains, entries]
        own: list[
            tuple[Tensor, Tensor]
        ],  # keys and values of a chain's own guesses, [chains, kv heads, size]
    ) -> Tensor:
        queries = rotated(self.q_proj(read).unflatten(-1, (-1, self.size)), positions, self.theta)
        queries = (
            queries.unflatten(1, (shared[0].shape[1], -1)) * self.size**-0.5
        )  # [chains, kv, group, size]
        scores = torch.einsum("ckgd,ekd->kgce", queries, shared[0]).masked_fill(~seen, float("-inf"))
        scores = [scores, *(torch.einsum("ckgd,ckd->kgc", queries, keys)[..., None] for keys, _ in own)]
        weights = torch.cat(scores, -1).softmax(-1)  # [kv, group, chains, entries + own]
        found = torch.einsum("kgce,ekd->ckgd", weights[..., : seen.shape[1]], shared[1])
        for place, (_, values) in enumerate(own, seen.shape[1]):
            found = found + torch.einsum("kgc,ckd->ckgd", weights[..., place], values)
        return self.o_proj(found.flatten(1))


class MLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(rows)) * self.up_proj(rows))


class Midlayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)

    def read(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)


class Eagle3(nn.Module):
    """An EAGLE-3 head with the tensor names of published ones.

    Its entry i reads the target's streams at token i and the embedding of token i + 1, and guesses token
    i + 2. For guesses beyond that, its own stream stands for the target's.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LlamaConfig, known: Tensor) -> None:
        """`known`: the target's tokens that it can guess, in order."""
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(len(AUX_LAYERS) * width, width, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(known), bias=False)
        self.register_buffer("d2t", known - torch.arange(len(known)))
        self.register_buffer(
            "t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, known, True)
        )

    @property
    def known(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t))

    def chains(
        self,
        table: Tensor,  # [vocab, width]: the target's embeddings
        ids: Tensor,  # [n]
        aux: Tensor,  # [n, 3 * width]: the target's streams
        positions: Tensor,  # [n]
        starts: Tensor,  # [chains]: the entries from which to guess
        seen: Tensor,  # [chains, n - 1]: the entries that each chain sees
        follow: Tensor | None = None,  # [chains, GUESSES]: tokens to go on with; None: its own guesses
    ) -> Iterator[Tensor]:
        """Give logits [chains, known tokens] for each guess in turn."""
        layer, embedded, hidden = self.midlayer, table[ids[1:]], self.fc(aux[:-1])
        shared = layer.self_attn.entries(layer.read(embedded, hidden), positions[:-1])
        own: list[tuple[Tensor, Tensor]] = []
        embedded, hidden, places = embedded[starts], hidden[starts], positions[starts]
        for guess in range(GUESSES):
            read = layer.read(embedded, hidden)
            if guess:
                own.append(layer.self_attn.entries(read, places + guess))
            hidden = hidden + layer.self_attn(read, places + guess, shared, seen, own)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits = self.lm_head(self.norm(hidden))
            yield logits
            embedded = table[self.known[logits.argmax(-1)] if follow is None else follow[:, guess]]


def load_target() -> tuple[LlamaForCausalLM, Codec]:
    """Load the demo model for float32 arithmetic, and its tokenizer."""
    target = LlamaForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval().requires_grad_(False)
    return target, Codec(Tokenizer.from_file(str(DEMO / "tokenizer.json")))


def load_draft_model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_eagle3(folder: Path) -> Eagle3:
    tensors = load_file(folder / "model.safetensors")
    known = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    head = Eagle3(LlamaConfig.from_pretrained(folder), known)
    head.load_state_dict(tensors)
    return head.float().eval()


def streams(hidden_states: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([hidden_states[layer] for layer in AUX_LAYERS], -1)


def eagle3_drafter(head: Eagle3, target: LlamaForCausalLM) -> Drafter:
    def guess(ids: Tensor, known: Tensor) -> Tensor:
        aux = streams(target.model(ids[None], output_hidden_states=True).hidden_states)[0]
        entries = torch.arange(len(ids) - 1)
        starts = known - 2
        table = target.model.embed_tokens.weight
        chains = head.chains(table, ids, aux, torch.arange(len(ids)), starts, entries <= starts[:, None])
        return torch.stack([head.known[logits.argmax(-1)] for logits in chains], 1)

    return guess


def model_drafter(model: LlamaForCausalLM) -> Drafter:
    def guess(ids: Tensor, known: Tensor) -> Tensor:
        rows = ids.new_zeros(len(known), len(ids) + GUESSES)
        rows[:, : len(ids)] = ids
        chains = torch.arange(len(known))
        for number in range(GUESSES):
            # What stands behind a chain is not seen from within it.
            hidden = model.model(rows[:, : int(known.max()) + number]).last_hidden_state
            rows[chains, known + number] = model.lm_head(hidden[chains, known + number - 1]).argmax(-1)
        return rows[chains[:, None], known[:, None] + torch.arange(GUESSES)]

    return guess


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What became of a drafter's guesses for greedy answers, none of them beyond an answer's end."""

    answers: int
    tokens: int
    steps: int
    held: tuple[float, ...]
    """The share of guesses at each position that held, of those where all before them did."""

    @property
    def tokens_a_step(self) -> float:
        """The tokens of answers for each step, without the first token, which comes from the prompt."""
        return self.tokens / self.steps


def answered(target: LlamaForCausalLM, codec: Codec, every: int) -> list[tuple[Tensor, int]]:
    """Let the target answer each so many-th question: tokens [n], and the prompt's length."""
    found = answer_ids(target, codec, cases()[::every])
    return [(torch.tensor(prompt + answer), len(prompt)) for prompt, answer in found]


@torch.inference_mode()
def acceptance(drafter: Drafter, answers: list[tuple[Tensor, int]]) -> Acceptance:
    """Count guesses in steps that follow each other as a server's do."""
    tokens = steps = 0
    reached, held = [0] * (GUESSES + 1), [0] * GUESSES
    for ids, prompt in answers:
        starts = torch.arange(prompt + 1, len(ids))
        guesses = drafter(ids, starts).tolist() if len(starts) else []
        tokens += len(starts)
        at = 0
        while at < len(starts):
            steps += 1
            truth = ids[prompt + 1 + at :].tolist()
            hold = 0
            for place, (guess, token) in enumerate(zip(guesses[at], truth, strict=False)):
                reached[place] += 1
                if guess != token:
                    break
                held[place] += 1
                hold += 1
            at += hold + 1
    shares = tuple(count / max(of, 1) for count, of in zip(held, reached, strict=False))
    return Acceptance(len(answers), tokens, steps, shares)
