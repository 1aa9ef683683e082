"""GLiNER: an encoder reads labels and a text in one go; each piece of the text has a score for each label.

The last layer of pieces is linear, so it is applied to the labels, of which there are few, and not to the
pieces; and what it reads of a piece's first and last word is computed once for each word.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor, nn

from models import ops
from models.checkpoint.weights import Weights, load
from models.config import ConfigError
from models.conversion.pooling_models import PoolingModel
from models.layers.linear import frozen
from models.model import ModelSetup
from models.pooling.entity_files import EntityFacts, read_entities
from models.pooling.sentence_files import Mode
from models.pooling.task_heads import ACTIVATIONS, Every, Merged, PoolBatch, Pooler, PoolingLike, TaskHead
from models.registry import resolve

_ENCODERS = {
    "bert": "BertModel",
    "deberta-v2": "DebertaV2Model",
    "modernbert": "ModernBertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
}
_MODES: dict[str, Mode] = {"first": "CLS", "last": "LAST", "mean": "MEAN", "max": "MAX"}
_sigmoid = ACTIVATIONS["sigmoid"]


class GLiNERModel(PoolingModel):
    def __init__(self, setup: ModelSetup) -> None:
        facts, kind = read_entities(setup.config), setup.config.raw.get("model_type")
        assert facts is not None
        if not isinstance(kind, str) or kind not in _ENCODERS:
            raise ConfigError(
                f"gliner_config.json: the encoder's 'model_type' is {kind!r}, and served are "
                f"{', '.join(_ENCODERS)}"
            )
        trunk = msgspec.structs.replace(setup.config, architecture=_ENCODERS[kind])
        self.base_class = resolve(trunk)  # type: ignore[misc]  # each checkpoint says which
        super().__init__(setup)
        self.pooler = EntityPooler(facts, setup.config.hidden_size, held=self.last)

    def pull(self, weights: Weights) -> None:
        load(self.base, weights / "token_rep_layer.bert_layer.model")
        if self.last:
            load(self.pooler, weights)
        else:
            weights.ignore("token_rep_layer.projection", *EntityPooler.parts)


class EntityPooler(Pooler):
    """Answers a text with the logits of all that may be an entity, for each label.

    The spans of a request are the tokens of its labels, and behind them those of the text's words. Of pieces
    the rows are first those of one word, then those of two, and so on [pieces, labels]; else they are the
    words' [words, labels * 3], with logits for the beginning, the end and the inside of an entity.
    """

    parts = ("rnn", "span_rep_layer", "prompt_rep_layer", "scorer")

    def __init__(self, facts: EntityFacts, size: int, *, held: bool) -> None:
        identity = ACTIVATIONS["identity"]
        head = TaskHead(rows=Every(), project=None, width=1, activation=identity, activates=False)
        super().__init__({"ner": head})
        self._merged, own = Merged([_MODES[facts.subtoken_pooling]]), facts.hidden_size
        narrows = held and size != own
        self.projection = _Layer(size, own, "token_rep_layer.projection") if narrows else None
        self.rnn = _Lstm(own, facts.num_rnn_layers) if held and facts.num_rnn_layers else None
        by_word = facts.span_mode == "token_level"
        self.scores = (_TokenScores(own) if by_word else _SpanScores(facts)) if held else None

    def pull(self, weights: Weights) -> None:
        weights.ignore("precomputed_prompts")
        for part in (self.projection, self.rnn, self.scores):
            if part is not None:
                load(part, weights)

    def counted_rows(self, params: PoolingLike, tokens: Sequence[int]) -> None:
        return None

    def forward(self, batch: PoolBatch) -> list[Tensor]:
        assert batch.pieces is not None and self.scores is not None
        rows = batch.hidden.float()
        if self.projection is not None:
            rows = self.projection(rows)
        states = self._merged(rows, batch.pieces.segments)  # [labels and words of all texts, own]
        texts = states.split(list(batch.pieces.counts))
        counts = [params.labels for params in batch.params]
        labels = [text[:count] for text, count in zip(texts, counts, strict=True)]
        words = [text[count:] for text, count in zip(texts, counts, strict=True)]
        if self.rnn is not None:
            lengths = [len(own) for own in words]
            words = self.rnn(torch.cat(words), lengths).split(lengths)
        return self.scores(words, labels)


class _Layer(nn.Module):
    """A linear layer in float32, whose rows have the same bits in any company. `name` is the checkpoint's."""

    weight: Tensor
    bias: Tensor

    def __init__(self, inputs: int, outputs: int, name: str) -> None:
        super().__init__()
        self.shape, self.name = (outputs, inputs), name

    def read(self, weights: Weights) -> tuple[Tensor, Tensor]:
        scope = weights / self.name
        weight = scope.take("weight", self.shape, dtype=torch.float32)
        return weight, scope.take("bias", self.shape[:1], dtype=torch.float32)

    def pull(self, weights: Weights) -> None:
        weight, self.bias = self.read(weights)
        self.weight = _packed(weight)

    def forward(self, rows: Tensor) -> Tensor:
        return ops.linear(rows, self.weight, self.bias)


def _packed(matrix: Tensor) -> Tensor:
    return frozen(ops.pack(matrix.contiguous(), plain=True))


class _Deep(nn.Module):
    """Two linear layers with a ReLU between them."""

    def __init__(self, inputs: int, inner: int, outputs: int, name: str) -> None:
        super().__init__()
        self.first = _Layer(inputs, inner, f"{name}.0")
        self.second = _Layer(inner, outputs, f"{name}.3")

    def pull(self, weights: Weights) -> None:
        load(self.first, weights)
        load(self.second, weights)

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(rows).relu())


class _Lstm(nn.Module):
    """An LSTM that reads the words of each text from both sides: [W, size] -> [W, size]."""

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        self.width, self.size, self.count = size // 2, size, layers
        self.layers: list[list[tuple[Tensor, Tensor, Tensor]]] = []
        """The matrices of inputs and of states, and the bias, of both directions of each layer."""

    def pull(self, weights: Weights) -> None:
        scope, gates = weights / "rnn.lstm", 4 * self.width
        self.layers = []
        for layer in range(self.count):
            both: list[tuple[Tensor, Tensor, Tensor]] = []
            for end in (f"l{layer}", f"l{layer}_reverse"):
                read, kept = (
                    scope.take(f"weight_{kind}_{end}", (gates, width), dtype=torch.float32)
                    for kind, width in (("ih", self.size), ("hh", self.width))
                )
                one, other = (
                    scope.take(f"bias_{kind}_{end}", (gates,), dtype=torch.float32) for kind in ("ih", "hh")
                )
                both.append((_packed(read), _packed(kept), one + other))
            self.layers.append(both)

    def forward(self, words: Tensor, lengths: Sequence[int]) -> Tensor:
        ahead, counts = _steps(lengths)
        ends = torch.tensor(lengths).cumsum(0).repeat_interleave(torch.tensor(lengths)) - 1  # [W]
        starts = ends + 1 - torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))
        back = (starts + ends)[ahead] - ahead
        orders = [order.to(words.device) for order in (ahead, back)]
        for both in self.layers:
            halves = [self._read(words, order, counts, *one) for order, one in zip(orders, both, strict=True)]
            words = torch.cat(halves, dim=1)
        return words

    def _read(
        self, words: Tensor, order: Tensor, counts: Sequence[int], read: Tensor, kept: Tensor, bias: Tensor
    ) -> Tensor:
        """Read words in this order: those of all texts at the first step, then at the second, ..."""
        inputs = ops.linear(words, read, bias)[order].split(list(counts))
        state = cell = words.new_zeros(counts[0] if counts else 0, self.width)
        states: list[Tensor] = []
        for step in inputs:
            gates = step + ops.linear(state[: len(step)].contiguous(), kept, None)
            let_in, keep, fresh, out = gates.chunk(4, dim=1)
            cell = _sigmoid(keep) * cell[: len(step)] + _sigmoid(let_in) * _tanh(fresh)
            state = _sigmoid(out) * _tanh(cell)
            states.append(state)
        found = torch.empty(len(words), self.width, device=words.device)
        found[order] = torch.cat(states) if states else found
        return found


def _tanh(x: Tensor) -> Tensor:
    """The tanh whose digits do not depend on a number's place, as those of `_sigmoid` do not."""
    return 2 * _sigmoid(2 * x) - 1


def _steps(lengths: Sequence[int]) -> tuple[Tensor, list[int]]:
    """The index of each word, step by step, and how many texts each step has: the longest ones come first."""
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    found: list[int] = []
    counts: list[int] = []
    for step in range(max(lengths, default=0)):
        own = [starts[index] + step for index in order if lengths[index] > step]
        found += own
        counts.append(len(own))
    return torch.tensor(found, dtype=torch.long), counts


class _SpanScores(nn.Module):
    """The logits of all pieces of up to `max_width` words."""

    def __init__(self, facts: EntityFacts) -> None:
        super().__init__()
        size, self.width, inside = facts.hidden_size, facts.max_width, "span_rep_layer.span_rep_layer"
        self.is_deep = facts.span_mode == "markerV0"
        inner = size * (4 if self.is_deep else 2)
        self.ends = nn.ModuleList(
            _Deep(size, inner, size, f"{inside}.{name}") for name in ("project_start", "project_end")
        )
        self.prompts = _Deep(size, 4 * size, size, "prompt_rep_layer")
        out = f"{inside}.out_project"
        self.inner = _Layer(2 * size, 4 * size, f"{out}.0") if self.is_deep else None
        self.last = _Layer(4 * size if self.is_deep else 2 * size, size, f"{out}.3" if self.is_deep else out)

    def pull(self, weights: Weights) -> None:
        for part in (*self.ends, self.prompts):
            load(part, weights)
        if self.inner is not None:
            matrix, self.bias = self.inner.read(weights)
            self.halves = [_packed(half) for half in matrix.chunk(2, dim=1)]
        matrix, bias = self.last.read(weights)
        self.backwards = _packed(torch.cat([matrix.T, bias[None]]))  # [inner + 1, size]

    def forward(self, words: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Tensor]:
        counts = [len(own) for own in words]
        every = torch.cat(list(words))
        starts, stops = (end(every).relu() for end in self.ends)
        if self.inner is not None:
            starts, stops = (
                ops.linear(rows, half, None) for rows, half in zip((starts, stops), self.halves, strict=True)
            )
            stops = stops + self.bias
        asked = ops.linear(self.prompts(torch.cat(list(labels))), self.backwards, None)
        parts = zip(starts.split(counts), stops.split(counts), asked.split([*map(len, labels)]), strict=True)
        return [self._of_text(*(part.clone() for part in own)) for own in parts]

    def _of_text(self, starts: Tensor, stops: Tensor, asked: Tensor) -> Tensor:
        weights, bias = asked[:, :-1].contiguous(), asked[:, -1].contiguous()
        count = len(starts)
        found: list[Tensor] = []
        for width in range(min(self.width, count)):
            first, last = starts[: count - width], stops[width:]
            rows = (first + last).relu() if self.is_deep else torch.cat([first, last], dim=1)
            found.append(torch.nn.functional.linear(rows, weights, bias))
        return torch.cat(found)


class _TokenScores(nn.Module):
    """The logits of words: that an entity of a label begins there, that it ends there, that it is there."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.words = _Layer(size, 2 * size, "scorer.proj_token")
        self.labels = _Layer(size, 2 * size, "scorer.proj_label")
        self.inner = _Layer(3 * size, 4 * size, "scorer.out_mlp.0")
        self.last = _Layer(4 * size, 3, "scorer.out_mlp.3")

    def pull(self, weights: Weights) -> None:
        for layer in (self.words, self.labels, self.last):
            load(layer, weights)
        matrix, self.bias = self.inner.read(weights)
        self.thirds = [_packed(third) for third in matrix.chunk(3, dim=1)]

    def forward(self, words: Sequence[Tensor], labels: Sequence[Tensor]) -> list[Tensor]:
        (word, word_factor), (label, label_factor) = (
            layer(torch.cat(list(rows))).chunk(2, dim=1)
            for layer, rows in ((self.words, words), (self.labels, labels))
        )
        counts = [len(own) for own in words], [len(own) for own in labels]
        of_words = ops.linear(word.contiguous(), self.thirds[0], None).split(counts[0])
        of_labels = (ops.linear(label.contiguous(), self.thirds[1], None) + self.bias).split(counts[1])
        factors = zip(word_factor.split(counts[0]), label_factor.split(counts[1]), strict=True)
        found: list[Tensor] = []
        for one, other, (left, right) in zip(of_words, of_labels, factors, strict=True):
            both = (left[:, None] * right).flatten(0, 1)  # [words * labels, size]
            inner = ops.linear(both, self.thirds[2], None).view(len(one), len(other), -1)
            rows = (inner + one[:, None] + other).relu().flatten(0, 1)
            found.append(self.last(rows).view(len(one), -1))
        return found
