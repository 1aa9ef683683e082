"""Models cut into stages: each holds, reads and reports its own tensors, and refuses other cuts."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from internlm2 import make_internlm2
from safetensors.torch import load_file, save_file
from tiny import ARCHITECTURES, ENCODERS, tiny_checkpoint

from models.config import read_config
from models.conversion.conversion_choice import resolve_conversion
from models.families.transformers_fallback import UnsupportedModel
from models.layers.stages import Layers
from models.loader import LoadOptions, load_model
from models.model import ServedModel
from models.parallel.parallel import Parallel
from models.pooling.config import read_pooling
from models.registry import ARCHITECTURES as OWN
from models.weight_slices import WeightsError

STAGES = 3


def load_stage(
    folder: Path, stage: int, *, stages: int = STAGES, reported: list[float] | None = None
) -> ServedModel:
    config = read_config(folder, {})
    options = LoadOptions(
        config,
        folder,
        dtype=torch.float32,
        parallel=Parallel(stage=stage, stages=stages),
        conversion=resolve_conversion(config, folder, runner="auto", convert="auto"),
        pooling=read_pooling(folder, config, {}),
        report=(reported if reported is not None else []).append,
    )
    return load_model(options)


WHOLE = ("GlmMoeDsaForCausalLM",)
"""Models whose tiny layers read what the one before has chosen, so that they have no three stages."""
DECODERS = [name for name in ARCHITECTURES if name in OWN and name not in WHOLE]
CONSTANTS = ("act_fn.beta", "act_fn.eps")
"""The ends of names of tensors that are the same in all checkpoints, and are not read."""
EACH_STAGES = ("per_layer_projection_norm.weight",)
"""The ends of names of tensors that every stage reads."""
DISTANCES = ("encoder.rel_embeddings", "encoder.LayerNorm")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")


@pytest.mark.parametrize("architecture", [*DECODERS, "InternLM2ForCausalLM"])
def test_stages_of_a_decoder_read_everything_once(architecture: str, read: list[int], tmp_path: Path) -> None:
    """Only embeddings that are the last stage's head as well are read twice."""
    if architecture == "InternLM2ForCausalLM":
        folder = make_internlm2(tiny_checkpoint("LlamaForCausalLM", tmp_path))
    else:
        folder = tiny_checkpoint(architecture, tmp_path)
    models = [load_stage(folder, stage) for stage in range(STAGES)]
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(CONSTANTS)]:
        del tensors[name]
    twice = [tensors[name] for name in tensors if name.endswith(EMBEDDINGS)]
    twice = twice if "lm_head.weight" not in tensors and "output.weight" not in tensors else []
    twice += [tensor for name, tensor in tensors.items() if name.endswith(EACH_STAGES)] * (STAGES - 1)
    assert sum(read) == sum(tensor.nbytes for tensor in [*tensors.values(), *twice])
    count = read_config(folder, {}).num_layers
    layers = [len(held) for model in models for held in model.modules() if isinstance(held, Layers)]
    assert layers == [-(-(count - stage) // STAGES) for stage in range(STAGES)]


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
@pytest.mark.parametrize("family", ENCODERS)
def test_stages_of_an_encoder_read_what_one_alone_does(
    family: str, head: str, read: list[int], tmp_path: Path
) -> None:
    folder = tiny_checkpoint(f"{family}{head}", tmp_path)
    for stage in range(STAGES):
        load_stage(folder, stage)
    load_stage(folder, 0, stages=1)
    *parts, whole = read
    assert min(parts) > 0
    if family == "Albert":  # its layers run in several stages
        assert max(parts) < whole < sum(parts)
    else:
        assert sum(parts) == whole + (2 * bias if (bias := shared_bytes(folder)) else 0)


def shared_bytes(folder: Path) -> int:
    """The bytes that every stage reads: MPNet's bias by distance, DeBERTa's embeddings of distances."""
    tensors, parts = load_file(folder / "model.safetensors"), ("relative_attention_bias", *DISTANCES)
    return sum(tensor.nbytes for name, tensor in tensors.items() if any(part in name for part in parts))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_checkpoint("LlamaForCausalLM", tmp_path)


def test_a_stage_hears_that_its_own_tensors_are_missing(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    load_stage(llama, 0)
    load_stage(llama, 2)
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_stage(llama, 1)


def test_every_stage_hears_of_what_has_no_place(llama: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    save_file(tensors | {"model.extra": torch.zeros(1)}, llama / "model.safetensors", {"format": "pt"})
    for stage in range(STAGES):
        with pytest.raises(WeightsError, match=r"model\.extra in .* has no place in the model"):
            load_stage(llama, stage)


@pytest.mark.parametrize("stage", range(STAGES))
def test_progress_is_of_what_a_stage_reads(llama: Path, stage: int) -> None:
    reported: list[float] = []
    load_stage(llama, stage, reported=reported)
    assert reported == sorted(reported)
    assert reported[-1] == 1.0
    assert max(after - before for before, after in pairwise(reported)) < 0.7


@pytest.mark.parametrize("parallel", [Parallel(0, 2), Parallel(stage=0, stages=2)], ids=["ranks", "stages"])
def test_the_code_of_transformers_cannot_be_cut(parallel: Parallel, tmp_path: Path) -> None:
    folder = tiny_checkpoint("Jais2ForCausalLM", tmp_path)
    with pytest.raises(UnsupportedModel, match="leave --tensor-parallel-size and --pipeline-parallel-size"):
        load_model(LoadOptions(read_config(folder, {}), folder, dtype=torch.float32, parallel=parallel))
