"""CLIP and SigLIP: a tower for pictures and one for texts, whose vectors are compared.

Texts are computed whole, as encoders do it. A picture is a prompt of one token, in whose place the row stands
that `encode` gives, which is its vector already. SigLIP 2 in fixed resolutions has the classes of SigLIP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError, Size, family_fields
from models.context import context, use_context
from models.layers.attention import Attention, EncoderAttention
from models.layers.embedding import Embedding, check_learned_positions
from models.layers.linear import Linear, frozen
from models.layers.norm import enter
from models.media.files import read_files
from models.media.registry import make_processor
from models.model import ModelSetup
from models.plain_files import read_object
from models.pooling.sentence_files import Mode
from models.towers.blocks import WHOLE, Learned, segments
from models.towers.tower import InLayers, TowerInput, finish
from models.towers.vit import LayerFields, ShapedTransformer, VisionTransformer, VitFields, read_vit


class TextFields(LayerFields, frozen=True, kw_only=True):
    """The fields of a text_config that ModelConfig lacks."""

    vocab_size: Size
    max_position_embeddings: Size
    eos_token_id: int = 49407
    pad_token_id: int = 1


class TextTransformer(nn.Module):
    """Texts, by their tokens -> the normalised state of one token of each [B, hidden_size]."""

    ignored = VisionTransformer.ignored

    def __init__(self, fields: TextFields, *, causal: bool) -> None:
        super().__init__()
        self.tokens = Embedding(fields.vocab_size, fields.hidden_size, WHOLE)
        self.positions = Learned(fields.max_position_embeddings, fields.hidden_size, name="weight")
        self.layers = fields.layers(causal=causal)
        self.norm = fields.norm()

    def pull(self, weights: Weights) -> None:
        load(self.tokens, weights / "embeddings.token_embedding")
        load(self.positions, weights / "embeddings.position_embedding")
        load(self.layers, weights / "encoder.layers")
        load(self.norm, weights / "final_layer_norm")

    def forward(self, texts: Sequence[Tensor], answering: Tensor) -> Tensor:
        """`answering` [B]: for each text the position of the token whose state is returned."""
        ids = torch.cat(list(texts))
        step = segments([len(text) for text in texts], ids.device)
        stream = ops.add(self.tokens(ids), ops.embed(step.positions, self.positions.weight))
        delta, stream = finish(self.layers(step, stream))
        places = step.query_starts[:-1] + answering
        return enter(self.norm, None if delta is None else delta[places], stream[places])[0]


class AttentionPooling(nn.Module):
    """SigLIP's head: a learned query that reads all rows of a picture -> [N, size]."""

    query: Tensor  # [1, size]: the query, projected
    weight: nn.Parameter  # of keys and values
    bias: Tensor

    def __init__(self, fields: VitFields) -> None:
        super().__init__()
        self.size, dim = fields.hidden_size, fields.head_dim
        self.attention = EncoderAttention(head_dim=dim, scale=dim**-0.5)
        self.out = Linear(self.size, self.size, bias=True)
        self.norm, self.mlp = fields.norm(), fields.mlp()

    def pull(self, weights: Weights) -> None:
        of_query, size = weights / "attention", self.size
        matrix = of_query.take("in_proj_weight", [3 * size, size])
        bias = of_query.take("in_proj_bias", [3 * size])
        probe = weights.take("probe", [1, 1, size])[0]
        self.query = F.linear(probe.float(), matrix[:size].float(), bias[:size].float()).to(matrix.dtype)
        self.weight, self.bias = frozen(ops.pack(matrix[size:])), bias[size:].contiguous()
        for part, name in ((self.out, "attention.out_proj"), (self.norm, "layernorm"), (self.mlp, "mlp")):
            load(part, weights / name)

    def forward(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """`lengths`: the number of rows of each picture, of all of which there are hidden [T, size]."""
        keys, values = ops.linear(hidden, self.weight, self.bias).chunk(2, dim=-1)
        with use_context(step := segments(lengths, hidden.device)):
            heads = self.attention(self.query.expand(len(hidden), -1), keys, values)
        pooled = self.out(heads[step.query_starts[:-1]])
        return ops.add(pooled, self.mlp(self.norm(pooled)))


class CLIPModel(nn.Module):
    """Both towers and their heads, which the first stage has; later ones hand vectors on."""

    causal: ClassVar[bool] = False
    default_pooling: ClassVar[Mode] = "LAST"
    has_token_rows: ClassVar[bool] = False
    """The row of every token is the vector of its text."""
    reads_on: ClassVar[bool] = True
    """Whether the tokens of a text see those before them only."""
    heads: ClassVar[tuple[str, str]] = ("text_projection", "visual_projection")
    """The names of the text's head and of the picture's in the checkpoint."""
    has_bias: ClassVar[bool] = False
    """Whether a learned bias is added to scores, each of which is then a probability of its own."""
    vision_class: ClassVar[type[VisionTransformer]] = VisionTransformer
    usual: ClassVar[Mapping[str, object] | None] = None
    """The fields of the tower that config.json leaves out, if its model_type does not say them."""
    levels = 0

    def __init__(self, setup: ModelSetup) -> None:
        super().__init__()
        config = setup.config
        self.stream_size = config.output_size
        self.fields = family_fields(config, TextFields)
        self.folder = setup.folder
        check_learned_positions(config.architecture, self.fields.max_position_embeddings, setup.max_len)
        self.held = setup.parallel.first
        if not self.held:
            return
        vit = read_vit(config.whole, self.usual)
        pictures = make_processor(read_files(setup.folder, config.architecture, config.whole)).settings
        self.text = TextTransformer(self.fields, causal=self.reads_on)
        self.vision = self.vision_class(vit, pictures)
        self.norm = vit.norm()
        self.text_head, self.vision_head = self.make_heads(vit, config.output_size)

    def pull(self, weights: Weights) -> None:
        self.cosine_scores = self._read_cosine_scores(weights)
        if not self.held:
            weights.ignore("text_model", "vision_model", *self.heads)
            return
        vision = weights / "vision_model"
        load(self.text, weights / "text_model")
        load(self.vision, vision)
        load(self.norm, vision / "post_layernorm")
        for head, name in zip((self.text_head, self.vision_head), self.heads, strict=True):
            load(head, weights / name)

    def _read_cosine_scores(self, weights: Weights) -> tuple[float, float, str] | None:
        """Read what cosines are multiplied with, what is added, and the activation that follows."""
        names = ("logit_scale", "logit_bias") if self.has_bias else ("logit_scale",)
        shape = [1] if self.has_bias else []
        scale, *bias = (weights.take(name, shape, dtype=torch.float32) for name in names)
        if scale.is_meta:
            return None
        return scale.exp().item(), bias[0].item() if bias else 0.0, "sigmoid" if bias else "softmax"

    def forward(self, ids: Tensor, positions: Tensor, stream: Tensor | None = None) -> Tensor:
        """The vector of its text or picture for each token [T, stream_size]."""
        if stream is not None:
            return stream
        step = context()
        starts = accumulate(step.query_lens_host, initial=0)
        parts = dict(zip(starts, ids.split(step.query_lens_host), strict=False))
        vectors: dict[int, Tensor] = {}
        if step.media is not None:
            vectors |= zip(step.media.places.tolist(), step.media.rows.split(1), strict=True)
        if texts := {start: part for start, part in parts.items() if start not in vectors}:
            rows = self.text_rows(list(texts.values()))
            vectors |= zip(texts, self.text_head(rows).split(1), strict=True)
        return torch.cat([vectors[start].expand(len(part), -1) for start, part in parts.items()])

    def encode(self, items: Sequence[TowerInput]) -> InLayers[list[Tensor]]:
        """The vectors [1, stream_size] of pictures."""
        return list((yield from self.picture_vectors(items)).split(1))

    def attention_layers(self) -> list[Attention]:
        """Return no layers, since none reads the cache."""
        return []

    def make_heads(self, vit: VitFields, size: int) -> tuple[nn.Module, nn.Module]:
        """Make the heads of texts and of pictures, which give vectors of this size."""
        return Linear(self.fields.hidden_size, size), Linear(vit.hidden_size, size)

    def text_rows(self, texts: Sequence[Tensor]) -> Tensor:
        """The rows of end tokens, the first of a text, or of the last token of one without an end. Old files
        name the end 2, which means the highest token."""
        end = self.fields.eos_token_id
        ends = [
            text.argmax() if end == 2 else F.pad(text == end, (0, 1), value=True).int().argmax()
            for text in texts
        ]
        last = torch.tensor([len(text) - 1 for text in texts], device=ends[0].device)
        return self.text(texts, torch.stack(ends).minimum(last))

    def picture_vectors(self, items: Sequence[TowerInput]) -> InLayers[Tensor]:
        """The vectors [N, stream_size] of pictures."""
        delta, stream = yield from self.vision(items)
        first = slice(None, None, self.vision.rows)
        rows, _ = enter(self.norm, None if delta is None else delta[first], stream[first])
        return self.vision_head(rows)


class SiglipModel(CLIPModel):
    reads_on, has_bias = False, True
    heads = ("text_model.head", "vision_model.head")

    def make_heads(self, vit: VitFields, size: int) -> tuple[nn.Module, nn.Module]:
        if vit.hidden_size != size:
            raise ConfigError(
                f"config.json: vectors of texts would have {size} numbers, and those of pictures "
                f"{vit.hidden_size}, so they could not be compared"
            )
        self.padding = _padding_token(self.folder, self.fields.pad_token_id)
        return Linear(self.fields.hidden_size, size, bias=True), AttentionPooling(vit)

    def text_rows(self, texts: Sequence[Tensor]) -> Tensor:
        """The last rows of texts that are filled up with padding, whose tokens are seen as others are."""
        length = self.fields.max_position_embeddings
        padded = [F.pad(text, (0, length - len(text)), value=self.padding) for text in texts]
        last = torch.full([len(texts)], length - 1, device=texts[0].device)
        return self.text(padded, last)

    def picture_vectors(self, items: Sequence[TowerInput]) -> InLayers[Tensor]:
        rows, _ = enter(self.norm, *(yield from self.vision(items)))
        return self.vision_head(rows, [prod(item.grid) for item in items])


class Siglip2Model(SiglipModel):
    vision_class = ShapedTransformer
    usual: ClassVar[Mapping[str, object] | None] = {"num_patches": 256}


def _padding_token(folder: Path, usual: int) -> int:
    """The token with which a checkpoint's tokenizer fills texts up, or `usual` where it does not say. The
    config of SigLIP 2 leaves out that it is another one than SigLIP's."""
    path = folder / "tokenizer_config.json"
    given = read_object(path) if path.exists() else {}
    token, added = _content(given.get("pad_token")), given.get("added_tokens_decoder")
    known = cast("dict[str, object]", added) if isinstance(added, dict) else {}
    found = [number for number, entry in known.items() if token and _content(entry) == token]
    return int(found[0]) if found and found[0].isdecimal() else usual


def _content(token: object) -> object:
    """The text of a token in a tokenizer's settings, where it may be a field of an object."""
    return cast("dict[str, object]", token).get("content") if isinstance(token, dict) else token
