"""GPT-2: learned positions, layer norms, one fused q/k/v matrix, and matrices stored as [in, out]."""

from __future__ import annotations

import msgspec
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import Eps, Size, family_fields
from models.layers.attention import Attention
from models.layers.embedding import Embedding, LMHead
from models.layers.linear import Linear, RowLinear
from models.layers.mlp import activation_kind
from models.layers.norm import LayerNorm
from models.layers.stages import Layers, if_held
from models.model import ModelSetup
from models.parallel.parallel import Parallel


class GPT2Fields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that ModelConfig lacks."""

    n_inner: Size | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: Eps = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False


class GPT2LMHeadModel(nn.Module):
    def __init__(self, setup: ModelSetup) -> None:
        super().__init__()
        config = setup.config
        self.transformer = GPT2Model(setup)
        self.lm_head = LMHead(
            config.vocab_size,
            config.hidden_size,
            setup.parallel,
            embedding=self.transformer.wte,
            tied=config.tie_word_embeddings,
            tokens=setup.head_tokens,
        )

    def pull(self, weights: Weights) -> None:
        # The first GPT-2 checkpoints were saved without their head.
        load(self.transformer, weights.first("transformer", ""))
        load(self.lm_head, weights / "lm_head")

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        return self.transformer(ids, positions, stream)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def attention_layers(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]


class GPT2Model(nn.Module):
    def __init__(self, setup: ModelSetup) -> None:
        super().__init__()
        config = setup.config
        if setup.max_len > config.max_len:
            raise ValueError(
                f"GPT-2 has learned {config.max_len} positions, and cannot serve {setup.max_len}: "
                f"lower --max-model-len to {config.max_len}"
            )
        fields = family_fields(config, GPT2Fields)
        self.wte = Embedding(config.vocab_size, config.hidden_size, setup.parallel)
        self.wpe = Embedding(config.max_len, config.hidden_size, setup.parallel.undivided)
        self.h = Layers(config.num_layers, setup.parallel, lambda number: GPT2Block(setup, fields, number))
        self.ln_f = if_held(setup.parallel.last, LayerNorm(config.hidden_size, fields.layer_norm_epsilon))

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
        self.mlp = GPT2MLP(size, fields, setup.parallel)

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


class GPT2MLP(nn.Module):
    def __init__(self, size: int, fields: GPT2Fields, parallel: Parallel) -> None:
        super().__init__()
        share = parallel.share(fields.n_inner or 4 * size, "features of the MLP")
        kind = activation_kind(fields.activation_function)
        self.c_fc = Linear(size, share, bias=True, transposed=True, activation=kind)
        self.c_proj = RowLinear(share, size, parallel, bias=True, transposed=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.c_proj(self.c_fc(hidden))
