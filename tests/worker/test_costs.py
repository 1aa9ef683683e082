"""The cost of a step in the worker beside the arithmetic, in counts of calls and of torch's operations.

On a small model it is the number of calls that costs, and one that grows with layers or rows costs most.
"""

from pathlib import Path

import pytest
from counted import Calls, counted
from kernel_levels import NAMES
from opened import open_embedder, open_runner
from tiny import tiny_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput

BLOCK = 4
PROMPT = [5, 6, 7, 8]
ROWS = 8

OPERATIONS_OF_A_STEP = 150
"""Operations of torch outside of the layers: batch, embedding, head, greedy sampling."""
OPERATIONS_OF_A_LAYER = 100
"""The operations of torch in a layer without C kernels, which leave fewer."""
CALLS_OF_A_STEP, CALLS_OF_A_LAYER = 1000, 270
"""Calls of Python and of C functions together."""
OPERATIONS_REPLAYED, CALLS_REPLAYED, CALLS_OF_A_ROW = 16, 108, 2
"""The counts of a whole step with C kernels, however many layers there are."""
CALLS_OF_TEXTS, CALLS_OF_A_TEXT = 200, 34
"""The calls of a step of texts with C kernels."""


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Decoding:
    """Some rows that take one token a step, on a tiny Llama of so many layers."""

    def __init__(self, folder: Path, layers: int, rows: int) -> None:
        tiny_checkpoint("LlamaForCausalLM", folder, num_hidden_layers=layers)
        sizes = {"max_num_seqs": 16, "block_size": BLOCK, "num_gpu_blocks_override": 64, "max_model_len": 64}
        self.runner = open_runner(folder, **sizes)
        self.rows = rows
        self.steps = 0
        params = Sampling(max_tokens=30, temperature=0)
        new = [NewSeq(slot, PROMPT, len(PROMPT), params) for slot in range(rows)]
        seqs = [SeqStep(row, 0, len(PROMPT), [4 * row + i for i in range(4)], True) for row in range(rows)]
        self.runner.launch(StepInput(number=0, new=new, seqs=seqs)).result()
        self.step()  # what is done for the first time

    def step(self) -> None:
        self.steps += 1
        at = len(PROMPT) + self.steps - 1
        seqs = [SeqStep(row, at, 1, [], True, self.steps) for row in range(self.rows)]
        self.runner.launch(StepInput(number=self.steps, new=[], seqs=seqs)).result()

    def cost(self) -> tuple[int, Calls]:
        with Operations() as operations:
            self.step()
        with counted() as calls:
            self.step()
        return operations.count, calls


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], tuple[int, int]]:
    """(layers, rows) -> operations and calls of a step."""
    found = {}
    for layers in (2, 3):
        for rows in (1, ROWS):
            operations, calls = Decoding(tmp_path_factory.mktemp("llama"), layers, rows).cost()
            found[layers, rows] = operations, calls.python + calls.c
    return found


def test_a_layer_costs_so_much(costs: dict[tuple[int, int], tuple[int, int]]) -> None:
    operations, calls = (more - less for more, less in zip(costs[3, 1], costs[2, 1], strict=True))
    assert operations <= OPERATIONS_OF_A_LAYER
    assert calls <= CALLS_OF_A_LAYER


def test_the_rest_of_a_step_costs_so_much(costs: dict[tuple[int, int], tuple[int, int]]) -> None:
    operations, calls = (3 * two - 2 * three for two, three in zip(costs[2, 1], costs[3, 1], strict=True))
    assert operations <= OPERATIONS_OF_A_STEP
    assert calls <= CALLS_OF_A_STEP


@pytest.mark.skipif(not NAMES, reason="there are no C kernels for this processor")
def test_with_kernels_a_step_costs_little_whatever_its_layers(
    costs: dict[tuple[int, int], tuple[int, int]],
) -> None:
    assert costs[2, 1] == costs[3, 1]
    operations, calls = costs[3, 1]
    assert operations <= OPERATIONS_REPLAYED
    assert calls <= CALLS_REPLAYED
    assert costs[3, ROWS][1] - calls <= CALLS_OF_A_ROW * (ROWS - 1)


def texts_cost(folder: Path, layers: int, texts: int) -> int:
    """Calls of a step that embeds so many texts with a tiny BERT."""
    tiny_checkpoint("BertModel", folder, num_hidden_layers=layers)
    runner = open_embedder(folder)
    new = [NewSeq(slot, PROMPT, len(PROMPT), Pooling(task="embed")) for slot in range(texts)]
    seqs = [SeqStep(slot, 0, len(PROMPT), [], False, pools=True) for slot in range(texts)]
    step = StepInput(number=1, new=new, seqs=seqs)
    runner.launch(step).result()
    with counted() as calls:
        runner.launch(step).result()
    runner.close()
    return calls.python + calls.c


@pytest.mark.skipif(not NAMES, reason="there are no C kernels for this processor")
def test_with_kernels_texts_cost_little_whatever_the_layers(tmp_path: Path) -> None:
    one = texts_cost(tmp_path, 3, texts=1)
    assert texts_cost(tmp_path, 2, texts=1) == one <= CALLS_OF_TEXTS
    assert texts_cost(tmp_path, 3, texts=ROWS) - one <= CALLS_OF_A_TEXT * (ROWS - 1)


def test_rows_cost_no_operations_outside_of_the_layers(costs: dict[tuple[int, int], tuple[int, int]]) -> None:
    one, several = (3 * costs[2, rows][0] - 2 * costs[3, rows][0] for rows in (1, ROWS))
    assert several - one <= ROWS / 2
