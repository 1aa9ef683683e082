"""OPT: learned positions that begin at 2, norms before or after, embeddings narrower than the layers."""

from __future__ import annotations

import msgspec
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import Size, family_fields
from models.families.decoders.decoder import TrunkForCausalLM
from models.layers.attention import Attention
from models.layers.embedding import Embedding, check_learned_positions
from models.layers.linear import Linear, RowLinear
from models.layers.mlp import activation_kind
from models.layers.norm import LayerNorm
from models.layers.stages import Layers, if_held
from models.model import ModelSetup

_FIRST_POSITION = 2  # rows 0 and 1 of the position table were meant for padding
_EPS = 1e-5


class OPTFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that ModelConfig lacks."""

    ffn_dim: Size
    activation_function: str = "relu"
    word_embed_proj_dim: int | None = None
    do_layer_norm_before: bool = True
    enable_bias: bool = True
    remove_final_layer_norm: bool = msgspec.field(name="_remove_final_layer_norm", default=False)


class OPTForCausalLM(TrunkForCausalLM):
    def __init__(self, setup: ModelSetup) -> None:
        trunk = OPTDecoder(setup, family_fields(setup.config, OPTFields))
        super().__init__(setup, trunk, trunk.embed_tokens)

    def pull(self, weights: Weights) -> None:
        load(self.model, weights.first("model", "") / "decoder")
        load(self.lm_head, weights / "lm_head")


class OPTDecoder(nn.Module):
    def __init__(self, setup: ModelSetup, fields: OPTFields) -> None:
        super().__init__()
        config, parallel, size = setup.config, setup.parallel, setup.config.hidden_size
        check_learned_positions("OPT", config.max_len, setup.max_len)
        width = fields.word_embed_proj_dim or size
        project_in = Linear(width, size) if width != size else nn.Identity()
        project_out = Linear(size, width) if width != size else nn.Identity()
        has_norm = fields.do_layer_norm_before and not fields.remove_final_layer_norm
        norm = LayerNorm(size, _EPS) if has_norm else nn.Identity()
        self.embed_tokens = Embedding(config.vocab_size, width, parallel)
        self.embed_positions = Embedding(config.max_len + _FIRST_POSITION, size, parallel.undivided)
        self.project_in = if_held(parallel.first, project_in)
        self.layers = Layers(config.num_layers, parallel, lambda _: OPTLayer(setup, fields))
        self.final_layer_norm = if_held(parallel.last, norm)
        self.project_out = if_held(parallel.last, project_out)

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        hidden = self._embed(ids, positions) if stream is None else stream  # [T, H]
        for layer in self.layers:
            hidden = layer(hidden)
        return self.project_out(self.final_layer_norm(hidden))  # at the end [T, the width of the embeddings]

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        places = ops.embed(positions, self.embed_positions.weight[_FIRST_POSITION:])
        return ops.add(self.project_in(self.embed_tokens(ids)), places)


class OPTLayer(nn.Module):
    def __init__(self, setup: ModelSetup, fields: OPTFields) -> None:
        super().__init__()
        size, bias = setup.config.hidden_size, fields.enable_bias
        share = setup.parallel.share(fields.ffn_dim, "features of the MLP")
        self.norm_first = fields.do_layer_norm_before
        self.self_attn = OPTAttention(setup, bias=bias)
        self.self_attn_layer_norm = LayerNorm(size, _EPS)
        self.fc1 = Linear(size, share, bias=bias, activation=activation_kind(fields.activation_function))
        self.fc2 = RowLinear(share, size, setup.parallel, bias=bias)
        self.final_layer_norm = LayerNorm(size, _EPS)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.norm_first:
            hidden = ops.add(hidden, self.self_attn(self.self_attn_layer_norm(hidden)))
            return ops.add(hidden, self._mlp(self.final_layer_norm(hidden)))
        hidden = self.self_attn_layer_norm(ops.add(hidden, self.self_attn(hidden)))
        return self.final_layer_norm(ops.add(hidden, self._mlp(hidden)))

    def _mlp(self, hidden: Tensor) -> Tensor:
        return self.fc2(self.fc1(hidden))


class OPTAttention(nn.Module):
    def __init__(self, setup: ModelSetup, *, bias: bool) -> None:
        super().__init__()
        config = setup.config
        heads = setup.parallel.share_heads(config.num_heads)
        share = heads.times(config.head_dim)
        self.qkv_proj = Linear(
            config.hidden_size, [share, share, share], bias=bias, sources=("q_proj", "k_proj", "v_proj")
        )
        self.out_proj = RowLinear(share, config.hidden_size, setup.parallel, bias=bias)
        self.attention = Attention(
            heads=heads.length,
            kv_heads=heads.length,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(hidden).split(self.qkv_proj.widths, dim=-1)  # [T, heads * D] each
        return self.out_proj(self.attention(q, k, v))
