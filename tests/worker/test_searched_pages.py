"""ColQwen2 and ColPali give the tokens of queries and of pages the vectors of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from media_files import noise
from opened import open_runner
from page_search import WIDTH, Searched, SearchedByColPali
from pictured import Handle, Prompt, Prompts
from qwen_pictured import PICTURE
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.config import read_config
from models.conversion.conversion_choice import resolve_conversion
from worker.protocol import NewSeq, Pooling, SeqStep, StepInput

SIZES = {"max_num_seqs": 6, "block_size": 4, "num_gpu_blocks_override": 256, "max_model_len": 96}
PAGE, WIDE = noise(100, 96), noise(170, 40)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Searched:
    return Searched.write(tmp_path_factory.mktemp("colqwen2"))


def check_vectors(launch: Callable[[StepInput], Handle], searched: Searched, chunk: int) -> None:
    """Compare what the worker gives for a query and two pages with what transformers gives."""
    prompts = Prompts(searched.folder)
    query = searched.query("a b c")
    texts = [(prompts.make(query["input_ids"][0].tolist()), query)]
    for picture in (PAGE, WIDE):
        page = searched.page(picture)
        ids = page["input_ids"][0].tolist()
        first, behind = ids.index(PICTURE), ids.index(PICTURE) + ids.count(PICTURE)
        texts.append((prompts.make(ids[:first], picture, ids[behind:]), page))
        assert texts[-1][0].tokens == ids
    for prompt, batch in texts:
        got = vectors(launch, prompts, prompt, chunk)
        assert got.shape == (len(prompt.tokens), WIDTH)
        torch.testing.assert_close(got, searched.vectors(batch), atol=1e-4, rtol=0)


def vectors(launch: Callable[[StepInput], Handle], prompts: Prompts, prompt: Prompt, chunk: int) -> Tensor:
    length = len(prompt.tokens)
    new = NewSeq(0, prompt.tokens, length, Pooling("token_embed"), prompt.media)
    encode = [prompts.encode(place.number) for place in prompt.media]
    free = list(range(-(-length // 4)))
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        count = -(-end // 4) - -(-start // 4)
        blocks, free = free[:count], free[count:]
        row = SeqStep(0, start, end - start, blocks, samples=False, pools=end == length)
        step = StepInput(1, [] if start else [new], [row], encode=[] if start else encode)
        output = launch(step).result()
    found = output.pooled[0]
    return torch.frombuffer(bytearray(found.data), dtype=torch.float32).view(found.shape)


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_vectors_are_those_of_transformers(searched: Searched, chunk: int) -> None:
    config = read_config(searched.folder)
    runner = open_runner(searched.folder, conversion=resolve_conversion(config, searched.folder), **SIZES)
    assert (runner.facts.tasks, runner.facts.causal) == (("token_embed",), True)
    check_vectors(runner.launch, searched, chunk)


def test_names_as_they_were_published(tmp_path: Path) -> None:
    searched = Searched.write(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("vlm.", "vlm.model."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    served_as = resolve_conversion(read_config(tmp_path), tmp_path)
    check_vectors(open_runner(tmp_path, conversion=served_as, **SIZES).launch, searched, chunk=512)


@pytest.mark.parametrize("version", [1, 2])
def test_vectors_of_colpali_are_those_of_transformers(version: int, tmp_path: Path) -> None:
    searched = SearchedByColPali.write(tmp_path, version)
    served_as = resolve_conversion(read_config(tmp_path), tmp_path)
    runner = open_runner(tmp_path, conversion=served_as, **SIZES)
    facts = runner.facts
    assert facts.tasks == ("token_embed",) and facts.causal and facts.whole_prompts
    check_vectors(runner.launch, searched, chunk=96)
