"""Hub repositories, in huggingface_hub's own cache, which mlx-lm shares.

That library transfers the files and decides on authentication, offline mode, the cache's layout
and ``HF_ENDPOINT``. Added here: a snapshot counts only when it is whole; what was damaged is
fetched again; files with a sha256 are checked against it; each failure is one line that says what
to do. Files are fetched one after the other on the calling thread: in ``snapshot_download`` other
threads do it, which neither Ctrl+C nor ``cancel`` can stop.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
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
from .store import Report, check_cancel, check_space, disk_error

# What a model needs; never code (*.py), pickles or other frameworks' weights.
PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    sha256: str | None  # of the large files, which the Hub keeps in Git LFS or Xet


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
    from huggingface_hub import HfApi, constants, hf_hub_download

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of each try
    if constants.HF_HUB_OFFLINE:
        raise _offline(source, role, cache_dir)
    repo, cache = source.repo, _cache(cache_dir)
    with _one_line_errors(source, cache):
        info = HfApi().model_info(repo, revision=source.revision, files_metadata=True)
        commit = str(info.sha)
        files = [
            _File(s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else None)
            for s in info.siblings or []
            if any(fnmatch.fnmatch(s.rfilename, p) for p in PATTERNS) and "/" not in s.rfilename
        ]
        if not any(file.name.endswith(".safetensors") for file in files):
            raise DownloadError(
                f"{repo} has no safetensors weights",
                "choose an MLX or safetensors repository of the model",
            )
        here = _repo_folder(source, cache_dir) / "snapshots" / commit
        absent = [file for file in files if not _sound(here / file.name, file)]
        check_space(here, sum(file.size for file in absent))
        if "HF_HUB_DISABLE_XET" not in os.environ:
            # A Xet transfer cannot be cancelled: it swallows what its progress callback raises
            # (huggingface_hub issue 4632). Only files that HTTP does not serve are fetched by it.
            limit = constants.MAX_HTTP_DOWNLOAD_SIZE
            constants.HF_HUB_DISABLE_XET = all(file.size <= limit for file in absent)
        progress = _Progress(files, absent, report, cancel)
        for file in absent:
            path = hf_hub_download(
                repo,
                file.name,
                revision=commit,
                cache_dir=cache,
                tqdm_class=progress.bar_class(file.name),
            )
            _check_sha256(Path(path), file, source)
        check_cancel(cancel)
        if not source.pinned and (here / "config.json").exists():
            # Last, so that the branch never points at a snapshot that is not whole.
            hf_hub_download(repo, "config.json", revision=source.revision, cache_dir=cache)
    return here


def _check_sha256(path: Path, file: _File, source: HubSource) -> None:
    """Discard a file that is not what the Hub says it is. huggingface_hub compares sizes only."""
    if file.sha256 is None:
        return
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != file.sha256:
        _remove(path)
        raise DownloadError(
            f"{file.name} of {source.repo} arrived damaged and was discarded", "try again"
        )


def _sound(path: Path, file: _File) -> bool:
    """Whether the file is here and whole; what is here but not whole is removed."""
    if not path.exists():
        return False
    if file.size in (0, path.stat().st_size) and (
        path.suffix != ".safetensors" or folders.whole(path)
    ):
        return True
    _remove(path)
    return False


def _remove(path: Path) -> None:
    """Remove a snapshot's file and the content it links to, which would be linked again."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)


class _Progress:
    """Bytes of the whole snapshot, counted from huggingface_hub's own progress bars."""

    def __init__(
        self,
        files: list[_File],
        absent: list[_File],
        report: Report,
        cancel: threading.Event | None,
    ) -> None:
        self.total = sum(file.size for file in files)
        self.done = self.total - sum(file.size for file in absent)
        self.report, self.cancel = report, cancel

    def bar_class(self, name: str) -> Any:
        """A class of progress bars that draw nothing and report the bytes of the file ``name``."""
        progress = self

        class Bar:
            n = total = 0

            def __init__(self, *_: Any, **__: Any) -> None:
                self.update(0)

            def update(self, n: float | None = 1) -> None:
                check_cancel(progress.cancel)
                progress.done += int(n or 0)
                done = min(progress.done, progress.total)
                progress.report(Loading("download", done, progress.total, name))

            def nothing(self, *_: Any, **__: Any) -> None:
                pass

            __enter__ = lambda self: self  # noqa: E731
            __exit__ = close = refresh = nothing
            update_transfer = set_postfix_str = set_transfer_postfix_str = nothing  # of Xet

        return Bar


def _offline(source: HubSource, role: Role, cache_dir: Path | None) -> DownloadError:
    found = snapshot(source, cache_dir)
    fault = folders.missing(found, role) if found else "nothing of it is here"
    return DownloadError(
        f"{source.repo} is not whole on this machine ({fault}) and the Hub is switched off",
        "unset HF_HUB_OFFLINE to fetch it",
    )


@contextmanager
def _one_line_errors(source: HubSource, cache: Path) -> Iterator[None]:
    """Turn what huggingface_hub and its HTTP client raise into one DownloadError."""
    from huggingface_hub import errors as hub

    repo, url = source.repo, f"https://huggingface.co/{source.repo}"
    try:
        yield
    except (hub.HFValidationError, hub.HTTPError, OSError) as error:
        status = error.response.status_code if isinstance(error, hub.HfHubHTTPError) else None
        match error:
            case hub.HFValidationError():
                why = str(error).splitlines()[0]
                what, hint = f"{repo} is no name on the Hub: {why}", "check the spelling"
            case hub.GatedRepoError():
                what = f"{repo} is gated: its owner asks for consent first"
                hint = f"accept its terms at {url}, then run: hf auth login"
            case hub.RepositoryNotFoundError():
                what = f"the Hub has no model {repo}, or it is private"
                hint = "check the spelling; for a private one run: hf auth login"
            case hub.RevisionNotFoundError():
                what, hint = f"{repo} has no revision {source.revision}", f"see {url}/commits/main"
            case hub.HfHubHTTPError() if status in (401, 403):
                what, hint = f"the Hub refuses access to {repo}", "run: hf auth login"
            case hub.HfHubHTTPError():
                what, hint = f"the Hub answered {status} for {repo}", "try again later"
            case hub.LocalEntryNotFoundError() | hub.OfflineModeIsEnabled() | hub.HTTPError():
                what = f"the Hub cannot be reached to fetch {repo}"
                hint = "check the network and try again; files that have arrived whole are kept"
            case OSError(errno=None):  # huggingface_hub's own, about a transfer that fell short
                what = f"the transfer of {repo} broke off"
                hint = "try again; files that have arrived whole are kept"
            case _:
                raise disk_error(error, cache) from None
        raise DownloadError(what, hint) from None
