"""No kernel compiles while requests run: all that steps of a model need is listed before they begin.

The interpreter runs kernels in the process of these tests, so steps are taken in one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import gguf_pairs
import pytest
import torch
from interpreted import DEVICE  # before any kernel is imported
from packed import Recipe, change_config, write_pair
from packed_floats import write_floats
from tiny import tiny_checkpoint
from tiny_shapes import SHARED_CACHES
from torch import Tensor
from torch.utils._pytree import tree_leaves
from uninterpreted import run_uninterpreted

from models.gguf.folder import make_folder
from worker.kernels.cuda.capabilities import Card
from worker.kernels.cuda.compiling import model_variants
from worker.kernels.cuda.kernel_self_test import prove
from worker.kernels.cuda.launch import KernelLaunch, taking

LONG = {"max_position_embeddings": 16384, "num_hidden_layers": 1}
TWO_KINDS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
WIDE = {**LONG, "hidden_size": 64, "intermediate_size": 96}
SECONDS = 150

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def of(architecture: str, **shape: object) -> Callable[[Path], Path]:
    return lambda folder: tiny_checkpoint(architecture, folder / "plain", **{**LONG, **shape})


def quantized(recipe: Recipe) -> Callable[[Path], Path]:
    return lambda folder: write_pair(folder, recipe, **WIDE).packed  # pyright: ignore[reportArgumentType]


def in_fp8(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        shape = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 16}
        source = tiny_checkpoint("Qwen3ForCausalLM", folder / "source", **LONG, **shape)
        return write_floats(source, folder, name)[0]

    return write


def in_gguf(architecture: str, **shape: object) -> Callable[[Path], Path]:
    """A file whose embeddings, and so the LM head, are quantized, too."""

    def write(folder: Path) -> Path:
        shape_of_all = {"hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 16384}
        pair = gguf_pairs.write_pair(folder, architecture, gguf_pairs.Recipe("Q8_0"), **shape_of_all, **shape)
        (folder / "cache").mkdir()
        return make_folder(pair.file, folder / "cache")

    return write


def classifier(folder: Path) -> Path:
    """A classifier whose class is derived from the generating one, which it has no head of."""
    made = tiny_checkpoint("Qwen3ForCausalLM", folder / "plain", **LONG)
    change_config(made, architectures=["Qwen3ForSequenceClassification"])
    return made


MODELS: dict[str, Callable[[Path], Path]] = {
    "plain": of("LlamaForCausalLM"),
    "windows, caps": of("Gemma2ForCausalLM"),
    "without rotation": lambda folder: tiny_checkpoint("GPT2LMHeadModel", folder / "p", n_positions=16384),
    "latents": of("YoutuForCausalLM"),
    "experts": of("Qwen3MoeForCausalLM", decoder_sparse_step=1),
    "gptq, head": quantized(Recipe(method="gptq", group=32, head=True)),
    "fp8, rows": in_fp8("FBGEMM's rows"),
    "gguf": in_gguf("Qwen3ForCausalLM"),
    "encoder": of("BertModel"),
    "classifier": classifier,
    "layers of two kinds": of("Gemma3ForCausalLM", num_hidden_layers=4),
    "layers of two widths": of("Gemma4ForCausalLM", **SHARED_CACHES),
    "delta rule": of("Qwen3_5ForCausalLM", **TWO_KINDS),
    "scan, experts": of("GraniteMoeHybridForCausalLM", **TWO_KINDS),
    "short convolutions": of("Lfm2ForCausalLM", num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    "transformers' code": of("Jais2ForCausalLM"),
    "shared experts, latents": of("DeepseekV3ForCausalLM", first_k_dense_replace=0),
    "awq, head": quantized(Recipe(method="awq", group=32, symmetric=False, head=True)),
    "act-order": quantized(Recipe(method="gptq", group=32, symmetric=False, act_order=True)),
    "two forms": quantized(Recipe(method="pack-quantized", group=32, other={"q_proj": 8}, plain=("k_proj",))),
    "fp8, blocks": in_fp8("DeepSeek's blocks"),
    "experts in gguf": in_gguf("Qwen3MoeForCausalLM", moe_intermediate_size=256),
}


def missing_of(folders: dict[str, Path], capability: int, cache: str = "bfloat16") -> dict[str, list[str]]:
    """The variants of each model that its steps need and that are not listed."""
    program = Path(__file__).parents[4] / "support" / "ahead_steps.py"
    run = run_uninterpreted(program, capability, cache, *folders.values(), timeout=SECONDS)
    models: list[list[str]] = []
    for line in run.stdout.splitlines():
        if line.startswith(" "):
            models[-1].append(line.strip())
        else:
            assert int(line) > 3, "steps need kernels"
            models.append([])
    return dict(zip(folders, models, strict=True))


def written(models: dict[str, Callable[[Path], Path]], folder: Path) -> dict[str, Path]:
    for number in range(len(models)):
        (folder / str(number)).mkdir()
    return {name: write(folder / str(number)) for number, (name, write) in enumerate(models.items())}


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("capability", "cache"), [(90, "bfloat16"), (89, "float8_e4m3fn"), (80, "float8_e5m2"), (100, "bfloat16")]
)
def test_what_steps_need_is_listed_before_they_begin(
    capability: int, cache: str, odd: int, tmp_path: Path
) -> None:
    latents = cache == "bfloat16"  # whose caches have none of 8 bits
    some = list(MODELS.items())[odd::2]
    models = {name: write for name, write in some if latents or "latents" not in name}
    missing = missing_of(written(models, tmp_path), capability, cache)
    assert missing == {name: [] for name in models}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of numbers that nobody reads
def test_what_proves_kernels_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_variants, "one_of_each", list)  # names need kernels that are compiled

    def words(call: KernelLaunch) -> tuple[object, ...]:
        leaves = tree_leaves(call.arguments)
        given = (each.dtype if isinstance(each, Tensor) else each for each in leaves)
        return call.kernel.fn.__name__, *given, *call.options.items()

    started: set[tuple[object, ...]] = set()

    def start(call: KernelLaunch) -> None:
        started.add(words(call))
        call.start()

    with torch.inference_mode(), taking(start):
        found = prove(Card(90, 132), DEVICE, 40, torch.bfloat16, None, lambda error: False)
    assert found == []
    assert len(started) > 40
    assert started == {words(call) for call in model_variants.opening_calls(90, 40, torch.bfloat16)}


PROOFS = """
import sys
from pathlib import Path
import torch
from models.config import read_config
from worker.kernels.cuda.compiling.model_variants import model_calls, opening_calls
from worker.kernels.operations_used import Uses

for folder in map(Path, sys.argv[1:]):
    config, uses = read_config(folder), Uses()
    model_calls(config, folder, torch.bfloat16, 90, uses=uses)
    proofs = opening_calls(90, 64, torch.bfloat16, uses)
    print(len(proofs), *sorted({call.kernel.fn.__name__ for call in proofs}))
print(sum(len(opening_calls(90, 64, dtype)) for dtype in (torch.float32, torch.bfloat16)))
"""
PROVED = {
    "plain": {"activate", "attend", "join", "norm", "prepare_and_cache"},
    "latents": {"activate", "attend_latent", "norm", "prepare_latent"},
    "encoder": {"activate", "attend", "norm"},
    "awq, head": {"activate", "attend", "multiply", "norm", "prepare_and_cache"},
    "delta rule": {"attend", "convolve", "learn", "learn_tiles", "norm", "open_gates", "solve_tiles"},
}
"""Some kernels that each model needs proved."""
NEEDLESS = {
    "plain": {"multiply", "learn", "scan", "convolve", "attend_latent", "sort_pairs"},
    "latents": {"multiply", "learn", "scan", "convolve"},
    "encoder": {"multiply", "prepare_and_cache", "attend_latent"},
    "awq, head": {"learn", "scan", "attend_latent", "sort_pairs"},
    "delta rule": {"multiply", "scan", "attend_latent", "sort_pairs"},
}


def test_no_more_is_proved_than_a_model_calls(tmp_path: Path) -> None:
    folders = written({name: MODELS[name] for name in PROVED}, tmp_path)
    *lines, most = run_uninterpreted(PROOFS, *folders.values()).stdout.splitlines()
    for name, line in zip(folders, lines, strict=True):
        count, *kernels = line.split()
        assert set(kernels) >= PROVED[name], name
        assert not NEEDLESS[name] & set(kernels), name
        if name == "plain":
            assert 3 * int(count) <= int(most), "a third of all variants in both number types"


START = """
import sys
from pathlib import Path
import torch
from models.config import read_config
from worker.kernels.cuda.compiling.model_variants import model_calls, opening_calls
from worker.kernels.operations_used import Uses

for folder in map(Path, sys.argv[1:]):
    uses = Uses()
    calls = model_calls(read_config(folder), folder, torch.bfloat16, 90, uses=uses)
    assert calls and opening_calls(90, 64, torch.bfloat16, uses)
    print(*{"sympy", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp"} & sys.modules.keys())
"""


def test_a_start_imports_no_compiler_of_torch(tmp_path: Path) -> None:
    """Torch's own rules for tensors without memory import it: that took a third of a start."""
    names = "plain", "windows, caps", "encoder", "experts"
    folders = written({name: MODELS[name] for name in names}, tmp_path)
    said = run_uninterpreted(START, *folders.values()).stdout.splitlines()
    assert dict(zip(names, said, strict=True)) == dict.fromkeys(names, "")
