"""Reading of checkpoints: formats, what is left over, and how it is read.

Files that do not fit are in test_bad_files.py and test_bad_checkpoints.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import Driver, load_ranks
from safetensors.torch import load_file, save_file
from tiny import hf_logits, tiny_checkpoint
from torch import Tensor, nn

from models.checkpoint.files import Dummy, open_source
from models.checkpoint.weights import Reading, Weights, load, open_weights
from models.config import read_config
from models.families.decoders.llama import LlamaForCausalLM
from models.loader import LoadOptions, load_model
from models.model import ModelSetup
from models.weight_slices import Cut, WeightsError

CPU = torch.device("cpu")
HOST_GENERATOR = torch.Generator()
PROMPT = [7, 30, 299, 4, 18, 18, 120]


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint without its weights, to which a test adds others."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((llama / name).read_bytes())
    return tmp_path


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def read(folder: Path, load_format: str = "auto") -> None:
    load_model(LoadOptions(read_config(folder, {}), folder, dtype=torch.float32, load_format=load_format))


def assert_runs_as(folder: Path, original: Path, load_format: str = "auto") -> None:
    model = load_model(
        LoadOptions(read_config(folder, {}), folder, dtype=torch.float32, load_format=load_format)
    )
    logits = Driver([model]).step({0: PROMPT})[0]
    torch.testing.assert_close(logits, hf_logits(original, PROMPT), atol=1e-4, rtol=0)


class TestFormats:
    def test_sharded(self, llama: Path, copy: Path) -> None:
        everything = tensors(llama)
        files = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(everything)}
        for file in set(files.values()):
            save_file({name: everything[name] for name in files if files[name] == file}, copy / file)
        (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        # A file that the index does not name must not be read.
        save_file({"tok_embeddings.weight": torch.zeros(1)}, copy / "consolidated.safetensors")
        assert_runs_as(copy, llama)

    def test_an_index_of_files_that_are_gone(self, llama: Path, copy: Path) -> None:
        save_file(tensors(llama), copy / "model.safetensors")
        left = {"weight_map": {"lm_head.weight": "model-1.safetensors"}}
        (copy / "model.safetensors.index.json").write_text(json.dumps(left))
        assert_runs_as(copy, llama)

    def test_torch_files_of_old_and_in_shards(self, llama: Path, copy: Path) -> None:
        everything = tensors(llama)
        files = {name: f"pytorch_model-{index % 2}.bin" for index, name in enumerate(everything)}
        for file in set(files.values()):
            shard = {name: everything[name] for name in files if files[name] == file}
            torch.save(shard, copy / file, _use_new_zipfile_serialization=False)
        (copy / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
        assert_runs_as(copy, llama, load_format="pt")

    def test_torch_files_of_the_other_name(self, llama: Path, copy: Path) -> None:
        torch.save(tensors(llama), copy / "model.pt")
        torch.save({"state": {}}, copy / "optimizer.pt")
        assert_runs_as(copy, llama, load_format="pt")
        with pytest.raises(WeightsError, match="add --load-format pt"):
            read(copy)

    def test_bare_trunk(self, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
        """LlamaModel.save_pretrained writes names without "model." before them."""
        llama = tiny_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)
        bare = {name.removeprefix("model."): tensor for name, tensor in tensors(llama).items()}
        save_file(bare, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
        assert_runs_as(tmp_path, llama)

    def test_dummy_reads_no_weights_and_is_always_the_same(self, copy: Path) -> None:
        first, second = (
            load_model(LoadOptions(read_config(copy, {}), copy, dtype=torch.bfloat16, load_format="dummy"))
            for _ in range(2)
        )
        pairs = list(zip(first.parameters(), second.parameters(), strict=True))
        assert all(torch.equal(a, b) and a.dtype == torch.bfloat16 for a, b in pairs)
        values = torch.cat([a.flatten() for a, _ in pairs]).float()
        assert 0 < values.abs().max() < 0.1
        assert len({a.flatten()[0].item() for a, _ in pairs}) > 10

    def test_dummy_tensors_of_any_size(self, copy: Path) -> None:
        weights = open_weights(copy, "dummy", device=CPU, dtype=torch.float32)
        large = weights.take("large", [1000, 500])
        assert large.shape == (1000, 500)
        assert large.unique(dim=0).shape == large.shape  # no two rows are the same
        assert weights.take("large", [1000, 500], Cut(0, 7, 7)).shape == (0, 500)

    def test_dummy_tensors_are_drawn_where_they_are_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The "meta" device stands for a card: what the host drew would not be there."""
        seeds: list[torch.device] = []

        def generator(device: torch.device) -> torch.Generator:
            seeds.append(device)
            return HOST_GENERATOR  # "meta" has none

        monkeypatch.setattr(torch, "Generator", generator)
        card = torch.device("meta")
        for kind in ("float32", "int32", "uint8"):
            drawn = Dummy(0, card).find("large", (1000, 500), (kind,)).read(Cut(0, 0, 999))
            assert (drawn.device, drawn.shape) == (card, (999, 500))
        assert seeds == [card] * 3

    def test_unknown_format(self, copy: Path) -> None:
        with pytest.raises(WeightsError, match="load_format is 'gguf', but must be one of auto"):
            read(copy, "gguf")


class TestLeftovers:
    def test_frequencies_of_2023_and_tied_heads_are_passed_over(self, tmp_path: Path) -> None:
        llama = tiny_checkpoint("LlamaForCausalLM", tmp_path, tie_word_embeddings=True)
        extra = {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
            "lm_head.weight": torch.zeros(320, 32),
        }
        save_file(tensors(llama) | extra, llama / "model.safetensors")
        read(llama)

    def test_tied_matrices_may_be_saved_as_the_head_alone(self, tmp_path: Path) -> None:
        """The function `save_model` of safetensors keeps the first of the names that share a tensor."""
        llama = tiny_checkpoint("LlamaForCausalLM", tmp_path, tie_word_embeddings=True)
        found = tensors(llama)
        found["lm_head.weight"] = found.pop("model.embed_tokens.weight")
        save_file(found, llama / "model.safetensors")
        (model,) = load_ranks(llama)
        assert torch.equal(model.model.embed_tokens.weight, found["lm_head.weight"])


def test_the_head_is_read_while_there_are_no_layers(llama: Path) -> None:
    """To pack it takes the most memory, so this must not come on top of all other weights."""
    taken: list[str] = []

    class Noted(Reading):
        def take(self, name: str, *args: Any, **options: Any) -> Tensor:
            taken.append(name)
            return super().take(name, *args, **options)

    setup = ModelSetup(config=read_config(llama, {}), folder=llama, max_len=64)
    reading = Noted(open_source(llama, "auto"), device=CPU, dtype=torch.float32)
    load(LlamaForCausalLM(setup), Weights(reading))
    reading.finish()
    assert taken[:2] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert taken[-1] == "model.norm.weight"


class TestReading:
    def test_whole_tensors_are_views_of_the_file(self, llama: Path) -> None:
        weights = open_weights(llama, device=CPU, dtype=torch.float32) / "model" / "norm"
        assert weights.take("weight", [32]).data_ptr() == weights.take("weight", [32]).data_ptr()

    def test_progress_rises_to_one(self, llama: Path) -> None:
        reported: list[float] = []
        load_model(LoadOptions(read_config(llama, {}), llama, dtype=torch.float32, report=reported.append))
        assert reported == sorted(reported)
        assert len(reported) > 20
        assert 0 < reported[0] < 0.5
        assert reported[-1] == 1.0

    def test_tied_weights_are_one_parameter(self, tmp_path: Path) -> None:
        folder = tiny_checkpoint("LlamaForCausalLM", tmp_path, tie_word_embeddings=True)
        (model,) = load_ranks(folder)
        assert sum(parameter.numel() for parameter in model.parameters()) == sum(
            tensor.numel() for tensor in tensors(folder).values()
        )

    def test_modules_without_pull_pass_scopes_on(self, llama: Path) -> None:
        """The children of a module that has `pull` are left to it."""
        seen: list[str] = []

        class Leaf(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Identity()

            def pull(self, weights: object) -> None:
                seen.append(weights.path)  # pyright: ignore[reportAttributeAccessIssue]

        tree = nn.ModuleDict({"a": nn.ModuleList([Leaf(), Leaf()]), "b": Leaf()})
        load(tree, open_weights(llama, device=CPU, dtype=torch.float32) / "root")
        assert seen == ["root.a.0", "root.a.1", "root.b"]
