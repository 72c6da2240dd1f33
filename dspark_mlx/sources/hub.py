"""Hub repositories, in huggingface_hub's own cache, which mlx-lm shares.

What that library has is used as it is: authentication, offline mode, the cache
layout, ``HF_ENDPOINT``. Added here: a snapshot counts only when it is whole;
large files resume where an earlier process stopped; every large file is
checked against the Hub's sha256; each failure is one line that says what to do.
Files are fetched one after the other on the calling thread, so that Ctrl+C and
``cancel`` act at once.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DownloadError
from ..events import Loading
from . import folder as folders
from .folder import Role
from .spec import HubSource
from .store import Cancelled, Report, check_cancel, check_space, disk_error, locked

# What a model needs; never code (*.py), pickles or other frameworks' weights.
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
# Files from this size on are downloaded resumably and checked against their sha256.
LARGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    blob: str  # the name of its content in the cache; for a large file its sha256


def _cache(cache_dir: Path | None) -> Path:
    from huggingface_hub import constants

    return cache_dir / "hub" if cache_dir else Path(constants.HF_HUB_CACHE).expanduser()


def _repo_folder(source: HubSource, cache_dir: Path | None) -> Path:
    return _cache(cache_dir) / f"models--{source.repo.replace('/', '--')}"


def snapshot(source: HubSource, cache_dir: Path | None = None) -> Path | None:
    """The newest local snapshot of the source, whole or not; no network."""
    repo = _repo_folder(source, cache_dir)
    commit = source.revision
    if not source.pinned:
        try:
            commit = (repo / "refs" / source.revision).read_text(encoding="utf-8").strip()
        except OSError:
            return None
    found = repo / "snapshots" / commit
    return found if found.is_dir() else None


def fetch(
    source: HubSource,
    *,
    role: Role,
    cache_dir: Path | None = None,
    report: Report,
    cancel: threading.Event | None = None,
) -> Path:
    """The whole snapshot of ``source`` as the Hub has it now.

    Raises DownloadError (offline, network, access, disk, damaged), Cancelled.
    """
    with _one_line_errors(source, role, cache_dir):
        from huggingface_hub import HfApi, constants
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # its warnings of each try beside our one line

        if constants.HF_HUB_OFFLINE:
            raise _offline(source, role, cache_dir)
        info = HfApi().model_info(source.repo, revision=source.revision, files_metadata=True)
        files = [
            _File(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else s.blob_id or "")
            for s in info.siblings or []
            if any(fnmatch.fnmatch(s.rfilename, p) for p in PATTERNS) and "/" not in s.rfilename
        ]
        if not any(file.name.endswith(".safetensors") for file in files):
            raise DownloadError(
                f"{source.repo} has no safetensors weights",
                "choose an MLX or safetensors repository of the model",
            )
        _fetch_files(source, info.sha, files, cache_dir, report, cancel)
        return _repo_folder(source, cache_dir) / "snapshots" / str(info.sha)


def _fetch_files(
    source: HubSource,
    commit: str,
    files: list[_File],
    cache_dir: Path | None,
    report: Report,
    cancel: threading.Event | None,
) -> None:
    from huggingface_hub import hf_hub_download

    repo = _repo_folder(source, cache_dir)
    here = repo / "snapshots" / commit
    absent = [file for file in files if not _sound(here / file.name, file)]
    check_space(repo, sum(file.size for file in absent))
    progress = _Progress(sum(f.size for f in files), report, cancel)
    progress.done = progress.total - sum(file.size for file in absent)
    where = {"repo_id": source.repo, "cache_dir": str(_cache(cache_dir))}
    for file in absent:
        progress.start(file)
        if file.size >= LARGE_BYTES and len(file.blob) == 64:
            _fetch_blob(source, commit, file, repo / "blobs", progress)
        hf_hub_download(
            filename=file.name, revision=commit, tqdm_class=progress.bar_class(), **where
        )
    if not source.pinned and (here / "config.json").exists():
        # Last, so that the branch never points at a snapshot that is not whole.
        hf_hub_download(filename="config.json", revision=source.revision, **where)


def _sound(path: Path, file: _File) -> bool:
    """Whether the file is here and whole; what is here and is not is removed, its content too."""
    if not path.exists():
        return False
    if file.size in (0, path.stat().st_size) and (
        path.suffix != ".safetensors" or folders.whole(path)
    ):
        return True
    path.resolve().unlink(missing_ok=True)  # a link to the blob, which would be taken again
    path.unlink(missing_ok=True)
    return False


def _fetch_blob(
    source: HubSource, commit: str, file: _File, blobs: Path, progress: _Progress
) -> None:
    """Download ``file`` to its place in the cache's blob folder, from where it stopped before."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    final, partial = blobs / file.blob, blobs / f"{file.blob}.incomplete"
    blobs.mkdir(parents=True, exist_ok=True)
    with locked(blobs / f".{file.blob}.lock", progress.cancel):
        if final.exists():
            return
        with partial.open("ab") as out:
            have = out.tell()
            if have > file.size:
                out.truncate(0)
                have = 0
            progress.add(have)
            http_get(
                hf_hub_url(source.repo, file.name, revision=commit),
                out,
                resume_size=have,
                headers=build_hf_headers(),
                expected_size=file.size,
                displayed_filename=file.name,
                tqdm_class=progress.bar_class(),
            )
        with partial.open("rb") as whole:
            digest = hashlib.file_digest(whole, "sha256").hexdigest()
        if digest != file.blob:
            partial.unlink()
            raise DownloadError(
                f"{file.name} of {source.repo} arrived damaged and was discarded", "try again"
            )
        os.replace(partial, final)
    (blobs / f".{file.blob}.lock").unlink(missing_ok=True)


class _Progress:
    """Bytes of the whole snapshot, counted from huggingface_hub's own progress bars."""

    def __init__(self, total: int, report: Report, cancel: threading.Event | None) -> None:
        self.done, self.total, self.name = 0, total, ""
        self.report, self.cancel = report, cancel

    def start(self, file: _File) -> None:
        self.name = file.name
        self.add(0)

    def add(self, n: float | None) -> None:
        check_cancel(self.cancel)
        self.done += int(n or 0)
        self.report(Loading("download", min(self.done, self.total), self.total, self.name))

    def bar_class(self) -> type:
        """What huggingface_hub takes for a progress bar; draws nothing, reports here."""
        from tqdm import tqdm

        progress = self

        class Bar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs.pop("name", None)
                super().__init__(*args, **{**kwargs, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                progress.add(n)
                return None

        return Bar


def _offline(source: HubSource, role: Role, cache_dir: Path | None) -> DownloadError:
    found = snapshot(source, cache_dir)
    fault = folders.missing(found, role) if found else "nothing of it is here"
    return DownloadError(
        f"{source.repo} is not whole on this machine ({fault}) and the Hub is switched off",
        "unset HF_HUB_OFFLINE to fetch it",
    )


@contextmanager
def _one_line_errors(source: HubSource, role: Role, cache_dir: Path | None) -> Iterator[None]:
    """Turn what huggingface_hub and its HTTP client raise into one DownloadError."""
    from huggingface_hub import errors as hub

    repo = source.repo
    url = f"https://huggingface.co/{repo}"
    try:
        yield
    except (Cancelled, DownloadError):
        raise
    except hub.HFValidationError as error:
        why = str(error).splitlines()[0]
        raise DownloadError(f"{repo} is no name on the Hub: {why}", "check the spelling") from None
    except hub.GatedRepoError:
        raise DownloadError(
            f"{repo} is gated: its owner asks for consent first",
            f"accept its terms at {url}, then run: hf auth login",
        ) from None
    except hub.RepositoryNotFoundError:
        raise DownloadError(
            f"the Hub has no model {repo}, or it is private",
            "check the spelling; for a private one run: hf auth login",
        ) from None
    except hub.RevisionNotFoundError:
        raise DownloadError(
            f"{repo} has no revision {source.revision}", f"see {url}/commits/main"
        ) from None
    except hub.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise DownloadError(f"the Hub refuses access to {repo}", "run: hf auth login") from None
        raise DownloadError(f"the Hub answered {status} for {repo}", "try again later") from None
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, hub.HTTPError):
        raise DownloadError(
            f"the Hub cannot be reached to fetch {repo}",
            "check the network and try again; what has arrived is kept",
        ) from None
    except OSError as error:
        if error.errno is None:  # huggingface_hub's own, about a transfer that fell short
            raise DownloadError(
                f"the transfer of {repo} broke off", "try again; what has arrived is kept"
            ) from None
        raise disk_error(error, _cache(cache_dir)) from None
