"""The start of an engine: its checkpoint is found, workers get their options, and servers learn the facts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from engine_core.config import TASKS, EngineConfig, check_kept_blocks
from engine_core.options.speculation_options import FROM_TEXT, SpeculationOptions, read_guess_options
from models.checkpoint.hub import HubError, resolve
from models.config import ConfigError, ModelConfig, read_config
from models.conversion.conversion_choice import Conversion, resolve_conversion
from models.ctranslate2.folder import is_ctranslate2
from models.ctranslate2.folder import make_folder as make_ctranslate2_folder
from models.gguf.folder import make_folder
from models.lora.task_folder import has_tasks, task_adapters
from models.lora.task_folder import make_folder as make_folder_of_tasks
from models.lora_config import is_adapter, read_adapter
from models.mistral.folder import is_mistral
from models.mistral.folder import make_folder as make_mistral_folder
from models.plain_files import FileError
from models.plugins import registrations
from models.pooling.config import read_pooling
from models.pooling.converted_checkpoints import find_or_make
from models.quantization.config import check_quantization
from worker.config import DrafterConfig, WorkerConfig
from worker.host.machine import cache_folder
from worker.host.private_folder import make_private


def find_checkpoint(config: EngineConfig, report: Callable[[float], None], *, weights: bool = True) -> Path:
    """Find the folder of the model, downloaded or made of a GGUF file; `report` is told fractions of that."""
    load_format = config.worker.load_format if weights else "dummy"
    found = resolve(config.model, config.revision, config.download_dir, report, load_format, config.quant)
    other = config.hf_config_path
    if found.is_dir():
        if other is not None:
            raise ConfigError("--hf-config-path is for GGUF files: leave it out, or use --hf-overrides")
        if config.quant is not None:
            raise ConfigError(
                f"--quant says which GGUF file is meant, and {config.model} has none: leave it out"
            )
        if is_adapter(found):
            raise _no_model(config.model, read_adapter(found).base)
        if is_ctranslate2(found):
            return make_ctranslate2_folder(found, _private_cache("ctranslate2", found))
        if not is_mistral(found, config.worker.load_format):
            if has_tasks(found):
                return make_folder_of_tasks(found, _private_cache("tasks", found))
            return find_or_make(found, _private_cache)
        return make_mistral_folder(found, _private_cache("mistral", found))
    config_from = None
    if other is not None:
        config_from = resolve(other, None, config.download_dir, report, "dummy")
    return make_folder(found, _private_cache("gguf", found), config_from)


def _no_model(adapter: str, base: str) -> ConfigError:
    """The error of an adapter that is named in place of a model."""
    return ConfigError(
        f"{adapter} is an adapter, not a model: serve its base, {base or 'which it does not name'}, with "
        f"--lora-modules NAME={adapter}, or merge it into that (PEFT's merge_and_unload)"
    )


def _private_cache(name: str, found: Path) -> Path:
    """The folder for what is made of such files, one of which is `found`."""
    cache = cache_folder() / name
    try:
        make_private(cache, for_code=False)
    except OSError as error:
        raise FileError(
            f"what is made of {found.name} cannot be kept ({error}): let XDG_CACHE_HOME name another folder"
        ) from None
    return cache


def with_own_adapters(config: EngineConfig, folder: Path) -> EngineConfig:
    """The configuration with which adapters that lie in a checkpoint, if there are some, can be loaded."""
    if not task_adapters(folder):
        return config
    lora = replace(config.worker.lora, enable_lora=True)
    return replace(config, worker=replace(config.worker, lora=lora))


def make_worker_config(config: EngineConfig, model: ModelConfig, folder: Path) -> WorkerConfig:
    check_kept_blocks(config)
    options = config.worker
    if options.max_num_batched_tokens is None and not config.enable_chunked_prefill:
        whole_prompt = options.max_model_len or model.max_len  # which each step must be able to hold
        options = replace(options, max_num_batched_tokens=whole_prompt)
    return WorkerConfig(
        options=options,
        folder=str(folder),
        model=model,
        conversion=_conversion(config, model, folder),
        pooling=read_pooling(folder, model, config.pooler_config),
        tasks=tuple(config.tasks),
        whole_prompts=not config.enable_chunked_prefill,
        steps_ahead=config.depth - 1,
        registrations=registrations(),
        guesses=read_guess_options(config) is not None,
    )


def find_drafter(
    config: EngineConfig, served: WorkerConfig, expert_replicas: int, report: Callable[[float], None]
) -> DrafterConfig | None:
    """Find the model that guesses for the served one, if one is asked for, and check that it fits."""
    options = read_guess_options(config)
    if options is None or options.method in FROM_TEXT:
        return None
    _check_layout(config, options, expert_replicas)
    if served.conversion.runner != "generate":
        _refuse("a model that only pools generates no text: leave it out")
    ranks, name = config.tensor_parallel_size, options.model or config.model
    if options.drafter_ranks not in (None, 1, ranks):
        _refuse(
            f"draft_tensor_parallel_size is 1 or {ranks}, as --tensor-parallel-size, and not "
            f"{options.drafter_ranks}"
        )
    folder, model, target = Path(served.folder), served.model, served.model
    if options.model is not None:  # else it lies in the checkpoint of the served model
        folder, model = _read_drafter(config, options, report)
    method = _method_of(model, options.method)
    if model.vocab_size != target.vocab_size:
        _refuse(
            f"{name} knows {model.vocab_size} tokens, and {config.model} {target.vocab_size}: both need the "
            "same vocabulary"
        )
    longest = served.options.max_model_len or target.max_len
    if method == "draft_model" and model.max_len < longest and not model.any_length:
        _refuse(
            f"{name} was made for {model.max_len} positions, and texts may have {longest} tokens: choose "
            f"another, or lower --max-model-len to {model.max_len}"
        )
    check_quantization(model, None)
    return DrafterConfig(
        folder=str(folder),
        model=model,
        conversion=resolve_conversion(
            model, folder, runner="generate", trust_remote_code=config.worker.trust_remote_code
        )
        if method == "draft_model"
        else None,
        method=method,
        most=options.most,
        drawn=options.drawn,
        whole=options.drafter_ranks == 1,
    )


def _check_layout(config: EngineConfig, options: SpeculationOptions, expert_replicas: int) -> None:
    """Refuse drafters where the served model is divided in ways in which they are not."""
    if expert_replicas > 1:
        _refuse(
            f"{options.method} works without shared experts for now: leave out --enable-expert-parallel, or "
            "use ngram or suffix"
        )


def _read_drafter(
    config: EngineConfig, options: SpeculationOptions, report: Callable[[float], None]
) -> tuple[Path, ModelConfig]:
    """Find the folder of a drafter, and read its config.json."""
    name = options.model or config.model
    of_drafter = replace(config, model=name, revision=options.revision, hf_config_path=None, quant=None)
    try:
        folder = find_checkpoint(of_drafter, report)
        return folder, read_config(folder)
    except (ConfigError, HubError) as error:
        _refuse(f"the drafter cannot be read: {error}")


def _method_of(model: ModelConfig, named: str) -> str:
    """The method of a drafter: what its config.json says, or else the one that is named."""
    said = f"{model.architecture} {model.raw.get('speculators_model_type')}".lower()
    return next((each for each in ("eagle3", "eagle") if each in said), named)


def _refuse(why: str) -> NoReturn:
    raise ConfigError(f"--speculative-config: {why}")


def _conversion(config: EngineConfig, model: ModelConfig, folder: Path) -> Conversion:
    """The conversion of the checkpoint. Tasks imply a runner: without generation no LM head is loaded."""
    if unknown := [task for task in config.tasks if task not in TASKS]:
        raise ConfigError(f"--tasks: no task {unknown[0]!r}; there are {', '.join(TASKS)}")
    runner = config.runner
    if runner == "auto" and config.tasks:
        runner = "generate" if {"generate", "transcription"} & {*config.tasks} else "pooling"
    return resolve_conversion(
        model,
        folder,
        runner=runner,
        convert=config.convert,
        model_impl=config.worker.model_impl,
        trust_remote_code=config.worker.trust_remote_code,
    )
