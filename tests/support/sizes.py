"""Configurations from flat options, as a command line has them; those of a worker need no checkpoint."""

from typing import Any

from msgspec import structs

from engine_core.config import EngineConfig
from models.config import ModelConfig
from models.conversion.conversion_choice import Conversion
from server.options.option_parsing import assemble
from worker.config import WorkerConfig
from worker.options import LoraOptions, WorkerOptions

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    architectures=("LlamaForCausalLM",),
    dtype="float32",
    vocab_size=320,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_len=512,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_ids=(1,),
    raw={},
)


def worker_config(**given: Any) -> WorkerConfig:
    """A worker that generates unless told otherwise, and offers every task that it can do."""
    fields = {"folder": "", "model": MODEL, "device": "cpu", **given}
    names = set(WorkerOptions.__struct_fields__)
    options = {name: fields.pop(name) for name in names & set(fields)}
    architecture = fields["model"].architecture
    generates = Conversion(runner="generate", convert="none", architecture=architecture)
    return WorkerConfig(**{"conversion": generates, "options": WorkerOptions(**options), **fields})


def change_options(config: WorkerConfig, **options: Any) -> WorkerConfig:
    return structs.replace(config, options=structs.replace(config.options, **options))


def engine_config(model: object, **options: Any) -> EngineConfig:
    """An engine of the model in this folder, with the worker's options among its own."""
    known = {
        *EngineConfig.__struct_fields__,
        *WorkerOptions.__struct_fields__,
        *LoraOptions.__struct_fields__,
    }
    assert not set(options) - known, set(options) - known
    return assemble(EngineConfig, {"model": str(model), **options})
