"""``--against``: other programs on the same prompts, each in a process of its own.

The benchmark starts ``python -m dspark_mlx.bench.peers NAME`` and writes jobs to its standard
input, one a line as JSON; the process answers each with a line of JSON. The first job says what
to load. Every adapter uses the peer's public functions as its users would, with the peer's own
defaults; the weights are cast as ours were, so that both work on the same numbers. Seconds are
of the peer's decoding alone, without prefill. A peer that is not installed, does not start or
fails is named with the reason and left out; it never ends the benchmark.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO

from ..errors import DsparkError, UsageError
from .competing_load import import_environment
from .results import Run

PACKAGES = {"mlx-lm": "mlx_lm", "mlx-dspark": "mlx_dspark"}
PLAIN, SPECULATIVE = "plain", "speculative"
STOP_SECONDS = 5.0  # a killed process is gone long before; more would hide a fault

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """What a peer loads.

    ``folder`` of the target, ``drafter`` of a DSpark drafter, ``draft_model`` of a small
    language model ("": none). ``dtype`` is what the target is cast to ("": left as it is).
    """

    folder: str
    drafter: str = ""
    draft_model: str = ""
    dtype: str = ""


class PeerError(DsparkError):
    """A peer that is not installed, or did not answer."""


def check_peer_names(names: Sequence[str]) -> None:
    """Raises UsageError for a peer without an adapter."""
    for name in names:
        if name not in PACKAGES:
            raise UsageError(f"no peer named {name!r}", f"choose from {', '.join(PACKAGES)}")


# -- in the benchmark's process -------------------------------------------------------------


class Peer:
    """The process of one peer. ``modes`` are those of its adapter."""

    def __init__(self, name: str, setup: PeerSetup) -> None:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise PeerError(f"{name} is not installed here", f"pip install {name}")
        self.name = name
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dspark_mlx.bench.peers", name],
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

    def ask(self, job: dict[str, Any]) -> Answer:
        """Its answer. Raises PeerError with the peer's own words."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self._errors.seek(0)
            *_, reason = ["nothing said why", *self._errors.read().strip().splitlines()]
            raise PeerError(f"{self.name} ended without an answer: {reason}")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=STOP_SECONDS)
        self._errors.close()


class PeerSystem:
    """One mode of a peer, as a system of the comparison. Serves one request at a time."""

    def __init__(self, peer: Peer, mode: str) -> None:
        self.name = f"{peer.name} {peer.version} {mode}"
        self._peer, self._mode = peer, mode

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        temperature: float,
        seed: int,
        concurrency: int = 0,
    ) -> Run:
        job = {"mode": self._mode, "max_tokens": max_tokens, "temperature": temperature}
        answers = [self._peer.ask({**job, "ids": list(prompt)}) for prompt in prompts]
        return Run(
            tokens=tuple(tuple(a["tokens"]) for a in answers),
            seconds=sum(a["seconds"] for a in answers),
            first_token_seconds=tuple(a["first_token_seconds"] for a in answers),
            row_rounds=sum(a["rounds"] for a in answers),
        )


@contextlib.contextmanager
def start_peers(
    names: Sequence[str], setup: PeerSetup, report: Callable[[str], None] = lambda text: None
) -> Iterator[tuple[list[Peer], list[str]]]:
    """The peers that could be started, and a line for each that could not. Ends them all."""
    check_peer_names(names)
    absent: list[str] = []
    with contextlib.ExitStack() as stack:
        peers = []
        for name in names:
            report(f"starting {name}")
            try:
                peers.append(stack.enter_context(contextlib.closing(Peer(name, setup))))
            except PeerError as error:
                absent.append(f"not compared: {error}")
        yield peers, absent


# -- in the peer's process ------------------------------------------------------------------


class Adapter(Protocol):
    """One peer's public functions. ``modes``: what it can do with the setup it was given."""

    modes: list[str]

    def generate(self, mode: str, ids: list[int], max_tokens: int, temperature: float) -> Answer:
        """``tokens``, ``seconds``, ``first_token_seconds`` and ``rounds`` (0: not known)."""


class MlxLm:
    """mlx-lm: ``stream_generate``, and its own speculation when a draft model is given."""

    def __init__(self, setup: PeerSetup) -> None:
        self._lm = importlib.import_module("mlx_lm")
        self._model, self._tokenizer = self._lm.load(setup.folder)
        _cast(self._model, setup.dtype)
        self._draft = None
        self.modes = [PLAIN]
        if setup.draft_model:
            self._draft, _ = self._lm.load(setup.draft_model)
            _cast(self._draft, setup.dtype)
            self.modes.append(SPECULATIVE)

    def generate(self, mode: str, ids: list[int], max_tokens: int, temperature: float) -> Answer:
        options: dict[str, Any] = {}
        if temperature > 0:
            sample_utils = importlib.import_module("mlx_lm.sample_utils")
            options["sampler"] = sample_utils.make_sampler(temp=temperature)
        began = prefilled = time.perf_counter()
        first = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal prefilled
            if done == total - 1:
                prefilled = time.perf_counter()

        if mode == SPECULATIVE:
            options["draft_model"] = self._draft
        else:
            options["prompt_progress_callback"] = progress
        tokens: list[int] = []
        for response in self._lm.stream_generate(
            self._model, self._tokenizer, ids, max_tokens=max_tokens, **options
        ):
            first = first or time.perf_counter()
            if len(tokens) < response.generation_tokens:
                tokens.append(int(response.token))
        ended = time.perf_counter()
        seconds = ended - prefilled
        if mode == SPECULATIVE and len(tokens) > 1:
            # It does not say where prefill ends: the step of the first token counts as prefill,
            # and as the mean of the other steps.
            seconds = (ended - first) * len(tokens) / (len(tokens) - 1)
        return _answer(tokens, seconds, first - began)


class MlxDspark:
    """mlx-dspark: ``greedy_generate`` for plain decoding; its DSpark loop with the same drafter,
    or its prompt lookup without one."""

    def __init__(self, setup: PeerSetup) -> None:
        self._lib = importlib.import_module("mlx_dspark")
        self._target, self._tokenizer = self._lib.load_target(
            setup.folder, require_tap=bool(setup.drafter)
        )
        _cast(self._target.model, setup.dtype)
        self._drafter = None
        if setup.drafter:
            # Its default is 4 bits; where our own drafter runs in floats, so does its.
            self._drafter, _ = self._lib.load_drafter(setup.drafter, quantize=not setup.dtype)
        self.modes = [PLAIN, SPECULATIVE]

    def generate(self, mode: str, ids: list[int], max_tokens: int, temperature: float) -> Answer:
        lib, target, tokenizer = self._lib, self._target, self._tokenizer
        options = {"prompt_ids": ids, "max_new_tokens": max_tokens, "temperature": temperature}
        if mode == PLAIN:
            result = lib.greedy_generate(target, tokenizer, **options)
        elif self._drafter is not None:
            result = lib.speculative_generate(target, tokenizer, self._drafter, **options)
        else:
            result = lib.lookup_generate(target, tokenizer, **options)
        prefill = float(result.prefill_seconds)
        return _answer(
            [int(t) for t in result.token_ids],
            float(result.seconds) - prefill,
            float(result.ttft_seconds) or prefill,
            0 if mode == PLAIN else int(result.num_rounds),
        )


ADAPTERS: dict[str, Callable[[PeerSetup], Adapter]] = {"mlx-lm": MlxLm, "mlx-dspark": MlxDspark}


def _answer(tokens: list[int], seconds: float, first: float, rounds: int = 0) -> Answer:
    return {"tokens": tokens, "seconds": seconds, "first_token_seconds": first, "rounds": rounds}


def _cast(model: Any, dtype: str) -> None:
    if not dtype:
        return
    import mlx.core as mx

    from ..model.target import to_float

    to_float(model, getattr(mx, dtype))
    mx.eval(model.parameters())


def serve(name: str, jobs: TextIO, answers: TextIO) -> None:
    """Load what the first job says, then answer the others until there are no more."""
    adapter: Adapter | None = None
    for line in jobs:
        try:
            job = json.loads(line)
            if adapter is None:
                adapter = ADAPTERS[name](PeerSetup(**job))
                answer = {"version": _version(name), "modes": adapter.modes}
            else:
                answer = adapter.generate(**job)
        except Exception as error:
            words = str(error).strip() or "no message"
            answer = {"error": f"{type(error).__name__}: {words.splitlines()[0]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if adapter is None:  # it could not be loaded
            return


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return str(getattr(importlib.import_module(PACKAGES[name]), "__version__", "unknown"))


def main(name: str) -> None:
    # What a peer prints must not end up among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(name, sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1])
