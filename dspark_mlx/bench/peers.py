"""``--against``: installed peers, each in its own process, answering the same prompts.

A peer that is not installed, does not start or fails is named with the reason
and left out; it never ends the benchmark.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

from ..errors import DsparkError, UsageError
from .load import import_environment
from .peer import PACKAGES, Setup
from .result import Run

STOP_SECONDS = 5.0


def check_names(names: Sequence[str]) -> None:
    """Raises UsageError for a peer that there is no adapter for."""
    for name in names:
        if name not in PACKAGES:
            raise UsageError(f"no peer named {name!r}", f"choose from {', '.join(PACKAGES)}")


class PeerError(DsparkError):
    """A peer that is not there, or did not answer."""


class Peer:
    """One peer's process. ``modes`` are what it can do, once started."""

    def __init__(self, name: str, setup: Setup) -> None:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise PeerError(f"{name} is not installed here", f"pip install {name}")
        self.name = name
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dspark_mlx.bench.peer", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=import_environment(),
        )
        try:
            hello = self.ask(asdict(setup))
        except BaseException:
            self.close()
            raise
        self.version = str(hello["version"])
        self.modes = [str(mode) for mode in hello["modes"]]

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Its answer. Raises PeerError with its own words."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise PeerError(f"{self.name} ended without an answer: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=STOP_SECONDS)
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else "nothing said why"


class PeerSide:
    """One mode of a peer, as a side of the comparison."""

    def __init__(self, peer: Peer, mode: str) -> None:
        self.name = f"{peer.name} {peer.version} {mode}"
        self._peer, self._mode = peer, mode

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float,
        seed: int,
        at_once: int = 0,
    ) -> Run:
        answers = [
            self._peer.ask(
                {
                    "mode": self._mode,
                    "ids": list(prompt),
                    "max_tokens": max_tokens,
                    "temperature": temperature,
                }
            )
            for prompt in prompts
        ]
        return Run(
            tokens=tuple(tuple(a["tokens"]) for a in answers),
            seconds=sum(a["seconds"] for a in answers),
            first_token_seconds=tuple(a["first_token_seconds"] for a in answers),
            row_rounds=sum(a["rounds"] for a in answers),
        )


class Peers:
    """The peers that could be started, and a line for each that could not."""

    def __init__(
        self, names: Sequence[str], setup: Setup, say: Callable[[str], None] = lambda text: None
    ) -> None:
        check_names(names)
        self.peers: list[Peer] = []
        self.absent: list[str] = []
        for name in names:
            say(f"starting {name}")
            try:
                self.peers.append(Peer(name, setup))
            except PeerError as error:
                self.absent.append(f"not compared: {error}")
            except BaseException:
                self.close()
                raise

    def sides(self) -> list[PeerSide]:
        return [PeerSide(peer, mode) for peer in self.peers for mode in peer.modes]

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
