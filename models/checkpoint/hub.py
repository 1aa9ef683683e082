"""The folder of a model that the operator names: a folder, a hub id to download, or the built-in demo.

Only what serving needs is downloaded. Cache, credentials, offline mode and retries are huggingface_hub's own
matter, and it is imported only for a model that is not a folder.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[1] / "demo"

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_ALWAYS = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = {
    "auto": ("*.safetensors",),
    "safetensors": ("*.safetensors",),
    "pt": ("pytorch_model*.bin", "*/pytorch_model.bin"),
    "dummy": (),
}
# Sub-folders hold other formats (original/, onnx/, gguf/), but for those that begin with a number: the
# modules of sentence-transformers (1_Pooling/, 2_Dense/). consolidated* is the same weights a second time.
_NEVER = ("[!0-9]*/*", "consolidated*")


class HubError(ValueError):
    """The model cannot be found or downloaded; the message says why, and what to do."""


def resolve(
    model: str,
    revision: str | None,
    download_dir: str | None,
    report: Callable[[float], None],
    load_format: str = "auto",
) -> Path:
    """The folder of `model`, downloaded first if need be; `report` is called with the fraction of bytes."""
    if model == "demo":
        return DEMO
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder.resolve()
    if folder.is_file():
        raise HubError(f"'{model}' is a file; give the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(model):
        raise HubError(
            f"'{model}' is not a folder here, and cannot be a hub id, which has the form owner/name"
        )
    return _download(model, revision, download_dir, report, load_format)


def _download(
    model: str,
    revision: str | None,
    download_dir: str | None,
    report: Callable[[float], None],
    load_format: str,
) -> Path:
    from huggingface_hub import errors, snapshot_download

    wanted = {
        "repo_id": model,
        "revision": revision,
        "cache_dir": download_dir,
        "allow_patterns": [*_ALWAYS, *_WEIGHTS[load_format]],
        "ignore_patterns": list(_NEVER),
    }
    at = f"'{model}'" + (f" at revision '{revision}'" if revision else "")
    try:
        try:
            plan = snapshot_download(**wanted, dry_run=True)
        except errors.DryRunError:
            plan = []  # the hub does not answer: the download below uses the cache, or says what is wrong
        missing = sum(file.file_size or 0 for file in plan if file.will_download)
        return Path(snapshot_download(**wanted, tqdm_class=_progress_bar(missing, report)))
    except errors.GatedRepoError:
        raise HubError(
            f"{at} is gated: ask for access on its page on the hub, then set HF_TOKEN to your token"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"{at} is neither a folder here nor a model on the hub that can be seen; check the spelling, "
            "and if it is private, set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"the hub has no revision '{revision}' of '{model}'") from None
    except errors.LocalEntryNotFoundError as error:
        raise HubError(
            f"{at} is not a folder here, is not in the cache, and the hub cannot be reached "
            f"({error.__cause__ or 'offline'}); give a folder, or go online and leave HF_HUB_OFFLINE unset"
        ) from None
    except OSError as error:
        raise HubError(f"downloading {at} failed: {error}") from error


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
