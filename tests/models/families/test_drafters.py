"""Drafters that read hidden states compute what their papers say, in whatever steps tokens arrive."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import GUESSABLE, Oracle, write_eagle, write_eagle3
from drive import Driver, ThreadGroup, load_ranks
from tiny import tiny_checkpoint
from torch import Tensor

from models.config import ConfigError, read_config
from models.context import context, use_context
from models.loader import LoadOptions, begin_reading, load_model
from models.model import CausalLM
from models.parallel.parallel import Parallel

HEADS: dict[str, Callable[[Path], Path]] = {
    "eagle3": lambda folder: write_eagle3(folder, draft_vocab_size=GUESSABLE),
    "eagle3, speculators": lambda folder: write_eagle3(
        folder,
        speculators=True,
        draft_vocab_size=GUESSABLE,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[0, 2, 3],
        own_embeddings=True,
    ),
    "eagle3, whole vocabulary": write_eagle3,
    "eagle": write_eagle,
    "eagle, biased": lambda folder: write_eagle(folder, bias=True),
}
TEXTS = [[5, 17, 40, 99, 250, 31, 8, 9, 77, 12, 300, 4], [300, 21], [11, 12, 13, 11, 12, 13, 11]]


class HeadDriver(Driver):
    """A driver of a model, with drafters that read the hidden states of each of its ranks."""

    def __init__(self, targets: Sequence[CausalLM], heads: Sequence[Any]) -> None:
        super().__init__(targets)
        blocks = targets[0].attention_layers()[0].kv
        assert blocks is not None
        for layer in (layer for head in heads for layer in head.attention_layers()):
            layer.kv = torch.full(layer.cache_shape(blocks.shape[1], blocks.shape[3]), torch.nan)
        self._heads = dict(zip(map(id, targets), heads, strict=True))
        self._last: dict[tuple[int, int], Tensor] = {}

    def draft(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Gives sequences their next tokens; -> what the drafter says of what follows each [n, V]."""
        ids = torch.tensor([token for row in tokens.values() for token in row])

        def finish(model: CausalLM, hidden: Tensor) -> Tensor:
            head, step = self._heads[id(model)], context()
            read = head.read(hidden, step.streams or [])
            before = read.roll(1, 0)
            for row, first, stop in zip(tokens, step.query_starts, step.query_starts[1:], strict=False):
                before[first] = self._last.get((id(model), row), torch.tensor(0.0))
                self._last[id(model), row] = read[stop - 1]
            with use_context(replace(step, first=1)):
                return head.logits(head.forward(ids, step.positions - 1, before))

        return self._run(tokens, finish)


def load_heads(folder: Path, method: str, targets: Sequence[CausalLM]) -> list[Any]:
    """The drafter in `folder`, as each rank of the model holds it."""
    group, size = ThreadGroup(len(targets)), len(targets)
    heads: list[Any] = []
    for rank, target in enumerate(targets):
        served: Any = target
        options = LoadOptions(
            read_config(folder),
            folder,
            dtype=torch.float32,
            parallel=Parallel(rank, size, group.at(rank)),
            target=served,
            method=method,
        )
        heads.append(load_model(options))
        begin_reading(options)
    return heads


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("target"), num_hidden_layers=7)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.isinf(), expected.isinf())
    found, expected = (each.masked_fill(each.isinf(), 0) for each in (found, expected))
    torch.testing.assert_close(found, expected, atol=3e-5 * float(expected.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("cpu_kernels")
def test_it_computes_what_is_published(name: str, ranks: int, target: Path, tmp_path: Path) -> None:
    """Also in chunks of several texts, in blocks that lie in no order."""
    folder = HEADS[name](tmp_path)
    oracle = Oracle.open(target, folder)
    targets = load_ranks(target, ranks)
    driver = HeadDriver(targets, load_heads(folder, name.partition(",")[0], targets))
    found: dict[int, list[Tensor]] = {row: [] for row in range(len(TEXTS))}
    for start, size in ((0, 1), (1, 4), (5, 1), (6, 9)):
        step = {row: text[start : start + size] for row, text in enumerate(TEXTS) if text[start:]}
        for row, logits in driver.draft(step).items():
            found[row].append(logits)
    for row, text in enumerate(TEXTS):
        expected = oracle.logits(oracle.hidden(text, oracle.read(text)[:-1]))
        assert_near(torch.cat(found[row])[1:], expected)


def test_what_does_not_fit_is_refused(target: Path, tmp_path: Path) -> None:
    targets = load_ranks(target)
    several = write_eagle3(tmp_path / "several", num_hidden_layers=2)
    with pytest.raises(ConfigError, match="has 2 layers and reads layers"):
        load_heads(several, "eagle3", targets)
    wide = write_eagle3(tmp_path / "wide", target_hidden_size=64)
    with pytest.raises(ConfigError, match="hidden states of 64 numbers, and those of the model"):
        load_heads(wide, "eagle3", targets)
    with pytest.raises(ConfigError, match="has no layers for multi-token prediction"):
        load_heads(target, "mtp", targets)
    whole = load_ranks(tiny_checkpoint("JetMoeForCausalLM", tmp_path / "others"))
    with pytest.raises(ConfigError, match="reads hidden states of decoders"):
        load_heads(write_eagle(tmp_path / "eagle"), "eagle", whole)
