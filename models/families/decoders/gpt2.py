"""GPT-2: learned positions, layer norms, one fused q/k/v matrix, and matrices stored as [in, out]."""

from __future__ import annotations

import msgspec
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import Eps, Size, family_fields
from models.families.decoders.decoder import TrunkForCausalLM
from models.layers.attention import Attention
from models.layers.embedding import Embedding, check_learned_positions
from models.layers.linear import Linear, RowLinear
from models.layers.mlp import MLP
from models.layers.norm import LayerNorm
from models.layers.stages import Layers, if_held
from models.model import ModelSetup


class GPT2Fields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that ModelConfig lacks."""

    n_inner: Size | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: Eps = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


class GPT2LMHeadModel(TrunkForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        trunk = GPT2Model(setup)
        super().__init__(setup, trunk, trunk.wte)

    def pull(self, weights: Weights) -> None:
        # The first GPT-2 checkpoints were saved without their head.
        load(self.model, weights.first("transformer", ""))
        load(self.lm_head, weights / "lm_head")


class GPT2Model(nn.Module):
    def __init__(self, setup: ModelSetup) -> None:
        super().__init__()
        config, parallel = setup.config, setup.parallel
        check_learned_positions("GPT-2", config.max_len, setup.max_len)
        fields = family_fields(config, GPT2Fields)
        self.wte = Embedding(config.vocab_size, config.hidden_size, parallel)
        self.wpe = Embedding(config.max_len, config.hidden_size, parallel.undivided)
        self.h = Layers(config.num_layers, parallel, lambda number: GPT2Block(setup, fields, number))
        self.ln_f = if_held(parallel.last, LayerNorm(config.hidden_size, fields.layer_norm_epsilon))

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        hidden = ops.add(self.wte(ids), self.wpe(positions)) if stream is None else stream  # [T, H]
        for block in self.h:
            hidden = block(hidden)
        return self.ln_f(hidden)


class GPT2Block(nn.Module):
    def __init__(self, setup: ModelSetup, fields: GPT2Fields, layer: int) -> None:
        super().__init__()
        size = setup.config.hidden_size
        self.ln_1 = LayerNorm(size, fields.layer_norm_epsilon)
        self.attn = GPT2Attention(setup, fields, layer)
        self.ln_2 = LayerNorm(size, fields.layer_norm_epsilon)
        self.mlp = MLP(
            size,
            fields.n_inner or 4 * size,
            setup.parallel,
            activation=fields.activation_function,
            names=("c_fc", "c_proj"),
            bias=True,
            transposed=True,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = ops.add(hidden, self.attn(self.ln_1(hidden)))
        return ops.add(hidden, self.mlp(self.ln_2(hidden)))


class GPT2Attention(nn.Module):
    ignored = ("bias", "masked_bias")  # the causal mask, which old checkpoints carry

    def __init__(self, setup: ModelSetup, fields: GPT2Fields, layer: int) -> None:
        super().__init__()
        config = setup.config
        heads = setup.parallel.share_heads(config.num_heads)
        share = heads.times(config.head_dim)
        scale = config.head_dim**-0.5 if fields.scale_attn_weights else 1.0
        if fields.scale_attn_by_inverse_layer_idx:
            scale /= layer + 1
        self.c_attn = Linear(config.hidden_size, [share, share, share], bias=True, transposed=True)
        self.c_proj = RowLinear(share, config.hidden_size, setup.parallel, bias=True, transposed=True)
        self.attention = Attention(
            heads=heads.length, kv_heads=heads.length, head_dim=config.head_dim, scale=scale
        )

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.c_attn(hidden).split(self.c_attn.widths, dim=-1)  # [T, heads * D] each
        return self.c_proj(self.attention(q, k, v))
