"""Models that find entities give the logits of GLiNER's formulas, in whatever company."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pooled import Params, load_pooled, pool
from safetensors.torch import save_file
from tiny import VOCAB_SIZE, randomise, tiny_config, write_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.config import ConfigError, read_config
from models.pooling.converted_checkpoints import find_or_make

SIZE, WIDTH = 24, 4


def _deep(inputs: int, size: int, inner: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, inner * size), nn.ReLU(), nn.Identity(), nn.Linear(inner * size, size)
    )


class Formulas(nn.Module):
    """The modules of such a model under the names that they have in its checkpoints."""

    token_rep_layer: Any
    rnn: Any
    scorer: Any
    span_rep_layer: Any
    prompt_rep_layer: Any

    def __init__(self, config: Any, mode: str, layers: int) -> None:
        super().__init__()
        outer: Any = nn.Module()
        encoder: Any = nn.Module()
        encoder.model = transformers.DebertaV2Model(config)
        outer.bert_layer, outer.projection = encoder, nn.Linear(config.hidden_size, SIZE)
        self.token_rep_layer, self.mode = outer, mode
        if layers:
            self.rnn = nn.Module()
            self.rnn.lstm = nn.LSTM(SIZE, SIZE // 2, layers, bidirectional=True, batch_first=True)
        if mode == "token_level":
            self.scorer = nn.Module()
            self.scorer.proj_token, self.scorer.proj_label = (
                nn.Linear(SIZE, 2 * SIZE),
                nn.Linear(SIZE, 2 * SIZE),
            )
            self.scorer.out_mlp = nn.Sequential(
                nn.Linear(3 * SIZE, 4 * SIZE), nn.Identity(), nn.ReLU(), nn.Linear(4 * SIZE, 3)
            )
            return
        inner, self.span_rep_layer = 4 if mode == "markerV0" else 2, nn.Module()
        spans: Any = nn.Module()
        self.span_rep_layer.span_rep_layer = spans
        spans.project_start, spans.project_end = _deep(SIZE, SIZE, inner), _deep(SIZE, SIZE, inner)
        spans.out_project = _deep(2 * SIZE, SIZE) if mode == "markerV0" else nn.Linear(2 * SIZE, SIZE)
        self.prompt_rep_layer = _deep(SIZE, SIZE)

    @torch.inference_mode()
    def forward(
        self, ids: Sequence[int], labels: Sequence[int], words: Sequence[Sequence[int]], merge: str
    ) -> Tensor:
        """The logits; `labels` are positions, and `words` those of all tokens of each word."""
        hidden = self.token_rep_layer.bert_layer.model(torch.tensor([[*ids]])).last_hidden_state[0]
        rows = self.token_rep_layer.projection(hidden)
        merges = {
            "first": lambda x: x[0],
            "last": lambda x: x[-1],
            "mean": lambda x: x.mean(0),
            "max": lambda x: x.amax(0),
        }
        text = torch.stack([merges[merge](rows[[*word]]) for word in words])
        asked = rows[[*labels]]
        if hasattr(self, "rnn"):
            text = self.rnn.lstm(text[None])[0][0]
        if self.mode == "token_level":
            (one, left), (other, right) = (
                self.scorer.proj_token(text).chunk(2, -1),
                self.scorer.proj_label(asked).chunk(2, -1),
            )
            pairs = [
                torch.cat([one, other[at].expand_as(one), left * right[at]], -1) for at in range(len(asked))
            ]
            return torch.stack([self.scorer.out_mlp(pair) for pair in pairs], 1)  # [words, labels, 3]
        spans = self.span_rep_layer.span_rep_layer
        pieces = [(at, at + wider) for wider in range(WIDTH) for at in range(len(text) - wider)]
        starts, ends = spans.project_start(text), spans.project_end(text)
        both = torch.stack([torch.cat([starts[one], ends[other]]).relu() for one, other in pieces])
        return spans.out_project(both) @ self.prompt_rep_layer(asked).T  # [pieces, labels]


def entity_checkpoint(folder: Path, *, mode: str = "markerV0", layers: int = 1, **fields: object) -> Formulas:
    """Write a checkpoint as the library gliner does; `fields` are others of gliner_config.json."""
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<<ENT>>", "<<SEP>>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = tiny_config(
        "DebertaV2Model", vocab_size=VOCAB_SIZE + 2, max_position_embeddings=64, max_relative_positions=-1
    )
    model = Formulas(config, mode, layers).eval()
    randomise(model, seed=0, scale=0.15)
    save_file(model.state_dict(), folder / "model.safetensors")
    settings = {
        "encoder_config": config.to_dict(),
        "hidden_size": SIZE,
        "max_width": WIDTH,
        "max_len": 20,
        "span_mode": mode,
        "num_rnn_layers": layers,
        **fields,
    }
    (folder / "gliner_config.json").write_text(json.dumps(settings))
    return model


IDS = [0, 320, 30, 31, 320, 40, 321, 50, 51, 52, 53, 54, 55, 56, 57]
WORDS = [[7], [8, 9, 10], [11], [12, 13], [14]]
SHORT = [*IDS[:7], 60, 61, 62]


@dataclass(frozen=True)
class Entities(Params):
    labels: int = 0


def asked(labels: list[int], words: list[list[int]]) -> Entities:
    spans = [*((at, at + 1) for at in labels), *((word[0], word[-1] + 1) for word in words)]
    return Entities("ner", spans=tuple(spans), labels=len(labels))


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(
    ("mode", "layers", "merge"),
    [("markerV0", 1, "first"), ("token_level", 1, "max"), ("marker", 0, "last"), ("markerV0", 2, "mean")],
)
def test_logits(mode: str, layers: int, merge: str, tmp_path: Path) -> None:
    formulas = entity_checkpoint(tmp_path / "it", mode=mode, layers=layers, subtoken_pooling=merge)
    model = load_pooled(find_or_make(tmp_path / "it", lambda name, folder: tmp_path))
    assert model[0].pooler.tasks == {"ner"}
    texts: list[Any] = [IDS, SHORT, IDS, IDS]
    spans: list[Any] = [([1, 4], WORDS), ([4], [[7], [8, 9]]), ([2, 5], WORDS[:1]), ([1], WORDS)]
    found = pool(model, texts, [asked(*each) for each in spans])
    for text, (labels, words), own in zip(texts, spans, found, strict=True):
        expected = formulas(text, labels, words, merge)
        torch.testing.assert_close(own.flatten(), expected.flatten(), atol=1e-4, rtol=1e-4)
        assert torch.equal(pool(model, [text], asked(labels, words))[0], own)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("labels_encoder", "bert"),
        ("span_mode", "conv_max"),
        ("words_splitter_type", "spacy"),
        ("encoder_config", None),
    ],
)
def test_what_is_not_served_is_named(field: str, value: Any, tmp_path: Path) -> None:
    fields: Any = {field: value}
    entity_checkpoint(tmp_path / "it", **fields)
    with pytest.raises(ConfigError, match=field if field != "span_mode" else "conv_max"):
        find_or_make(tmp_path / "it", lambda name, folder: tmp_path)


def test_distances_reach_as_far_as_the_encoder_learned(tmp_path: Path) -> None:
    entity_checkpoint(tmp_path / "it")
    made = find_or_make(tmp_path / "it", lambda name, folder: tmp_path)
    raw = json.loads((made / "config.json").read_text())
    assert (raw["max_relative_positions"], read_config(made).max_len) == (64, 80)
