"""The other program's side of ``--against``: adapters, run in a process of their own.

``python -m dspark_mlx.bench.peer NAME`` reads a job a line as JSON from
standard input and answers each with a line of JSON. The first job says what to
load. Every adapter uses the peer's public functions as its users would, with
the peer's own defaults; the weights are cast as ours were, so that both work
on the same numbers. Speed is the peer's decoding alone, prefill apart.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

Answer = dict[str, Any]

PACKAGES = {"mlx-lm": "mlx_lm", "mlx-dspark": "mlx_dspark"}
PLAIN, SPECULATIVE = "plain", "speculative"


@dataclass(frozen=True, slots=True)
class Setup:
    """``folder`` of the target, ``drafter`` of a DSpark drafter, ``draft_model`` of a small
    language model; ``dtype``: cast the target to it ("" leaves it as it is)."""

    folder: str
    drafter: str = ""
    draft_model: str = ""
    dtype: str = ""


class MlxLm:
    """mlx-lm: ``stream_generate``, and its own speculation when a draft model is given."""

    def __init__(self, setup: Setup) -> None:
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
        began = ready = time.perf_counter()
        first = 0.0

        def progress(done: int, total: int) -> None:
            nonlocal ready
            if done == total - 1:
                ready = time.perf_counter()

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
        seconds = ended - ready
        if mode == SPECULATIVE and len(tokens) > 1:
            # Where prefill ends is not told here: the first token's step counts as prefill,
            # and the mean of the others stands in for it.
            seconds = (ended - first) * len(tokens) / (len(tokens) - 1)
        return _answer(tokens, seconds, first - began)


class MlxDspark:
    """mlx-dspark: ``greedy_generate`` for plain decoding; its DSpark loop with the same drafter,
    or its prompt lookup without one."""

    def __init__(self, setup: Setup) -> None:
        self._lib = importlib.import_module("mlx_dspark")
        self._target, self._tokenizer = self._lib.load_target(
            setup.folder, require_tap=bool(setup.drafter)
        )
        _cast(self._target.model, setup.dtype)
        self._drafter = None
        if setup.drafter:
            # Quantised to 4 bits as it does by default, but not where our own runs in floats.
            self._drafter, _ = self._lib.load_drafter(setup.drafter, quantize=not setup.dtype)
        self.modes = [PLAIN, SPECULATIVE]

    def generate(self, mode: str, ids: list[int], max_tokens: int, temperature: float) -> Answer:
        options: dict[str, Any] = {
            "prompt_ids": ids,
            "max_new_tokens": max_tokens,
            "temperature": temperature,
        }
        if mode == PLAIN:
            result = self._lib.greedy_generate(self._target, self._tokenizer, **options)
        elif self._drafter is not None:
            result = self._lib.speculative_generate(
                self._target, self._tokenizer, self._drafter, **options
            )
        else:
            result = self._lib.lookup_generate(self._target, self._tokenizer, **options)
        prefill = float(result.prefill_seconds)
        rounds = 0 if mode == PLAIN else int(result.num_rounds)
        return _answer(
            [int(t) for t in result.token_ids],
            float(result.seconds) - prefill,
            float(result.ttft_seconds) or prefill,
            rounds,
        )


ADAPTERS: dict[str, Callable[[Setup], Any]] = {"mlx-lm": MlxLm, "mlx-dspark": MlxDspark}


def _answer(tokens: list[int], seconds: float, first: float, rounds: int = 0) -> Answer:
    return {
        "tokens": tokens,
        "seconds": seconds,
        "first_token_seconds": first,
        "rounds": rounds,
    }


def _cast(model: Any, dtype: str) -> None:
    if not dtype:
        return
    import mlx.core as mx

    from ..model.target import to_float

    to_float(model, getattr(mx, dtype))
    mx.eval(model.parameters())


def serve(name: str, jobs: TextIO, answers: TextIO) -> None:
    """Load what the first job says, then answer one job after another until there are no more."""

    def say(answer: Answer) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        adapter = ADAPTERS[name](Setup(**json.loads(jobs.readline())))
        say({"version": _version(name), "modes": adapter.modes})
    except Exception as error:
        say({"error": _first_line(error)})
        return
    for line in jobs:
        try:
            say(adapter.generate(**json.loads(line)))
        except Exception as error:
            say({"error": _first_line(error)})


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return str(getattr(importlib.import_module(PACKAGES[name]), "__version__", "unknown"))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def main(name: str) -> None:
    # What a peer prints must not end up among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(name, sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1])
