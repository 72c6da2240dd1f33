"""Times single steps of a model and its proposers, with nothing but their cost in them.

A ``StepTimer`` holds R rows of a given context length and runs the parts of a round on them: a
draft, and a target step of W tokens with all that belongs to it (choice, features, rollback).
The time does not depend on what the tokens say, so caches are filled with zeros instead of
prefilled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx

from ..draft import DraftRow, Proposer
from ..model.cache import GROWTH, SLACK, RowsKV
from ..model.rows import Rows
from ..model.target import Target
from ..model.verify import RowSpec, verify
from ..request import SamplingParams
from .profile_store import on_cpu

DRAFT_CONTEXT = 64  # positions in a proposer's own context, as after a short prompt
_GREEDY = SamplingParams(seed=0)


class StepTimer:
    """``rows`` rows of ``context`` cached positions. Each method runs one part of a round and
    returns its seconds."""

    def __init__(
        self, target: Target, proposers: Sequence[Proposer], rows: int, context: int
    ) -> None:
        self.rows, self.context = rows, context
        self._target = target
        self._proposers = list(proposers)
        self._taps = tuple(dict.fromkeys(t for p in proposers for t in p.spec.taps))
        self._cache = blank_rows(target, rows, context)
        self._drafted_from = DRAFT_CONTEXT
        self._fill_proposers()

    def close(self) -> None:
        """Take the rows away from the proposers."""
        for proposer in self._proposers:
            proposer.filter([])

    def draft(self, proposer: Proposer, width: int) -> float:
        """``proposer`` drafts ``width`` tokens for every row."""
        watch = _Stopwatch()
        draft = proposer.propose(self._draft_rows(width))
        mx.eval(draft.tokens, draft.confidence)
        return watch.seconds()

    def step(self, width: int) -> float:
        """One target step on ``width`` tokens a row, the anchor among them."""
        tokens = mx.full((self.rows, width), 1, dtype=mx.int32)
        mx.eval(tokens)
        watch = _Stopwatch()
        self._step(tokens)
        return watch.seconds()

    def _fill_proposers(self) -> None:
        # A text that repeats, so that a proposer that looks for repetitions has some.
        text = [1 + k % 4 for k in range(DRAFT_CONTEXT)]
        features: mx.array | None = None
        if self._taps:
            size = len(self._taps) * self._target.hidden_size
            features = mx.zeros((1, len(text), size), dtype=self._target.dtype)
        for proposer in self._proposers:
            proposer.filter([])
            for _ in range(self.rows):
                row = proposer.new_row()
                mx.eval(proposer.prefill(row, text, self._share(proposer, features)))
                proposer.extend(row)

    def _draft_rows(self, width: int) -> list[DraftRow]:
        return [DraftRow(1, self._drafted_from + 1, _GREEDY, width)] * self.rows

    def _step(self, tokens: mx.array) -> None:
        """As the engine verifies: forward, choice, features to the proposers, rollback."""
        width = tokens.shape[1]
        logits, features = self._target.forward(
            tokens, self._cache, self._taps, eager=mx.async_eval
        )
        specs = [RowSpec(_GREEDY, self.context, width - 1)] * self.rows
        verdict = verify(tokens[:, 1:] if width > 1 else None, logits, specs)
        waiting = [verdict.accepted, verdict.token, *self._cache.arrays]
        for proposer in self._proposers:
            waiting += proposer.append_features(self._share(proposer, features))
        mx.eval(waiting)
        verdict.accepted.tolist()
        self._cache.trim_to([self.context] * self.rows)
        self._drafted_from += 1
        for proposer in self._proposers:
            proposer.commit([[1]] * self.rows, [width - 1] * self.rows, [0] * self.rows)

    def _share(self, proposer: Proposer, features: mx.array | None) -> mx.array | None:
        if features is None or not proposer.spec.taps:
            return None
        size = self._target.hidden_size
        return features[..., : len(proposer.spec.taps) * size]


class _Stopwatch:
    """Seconds since it was made. On the CPU backend the smaller of wall and processor time:
    waiting for a core that another program holds is no part of the price."""

    def __init__(self) -> None:
        self._cpu = on_cpu()
        self._wall, self._process = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        wall, process = time.perf_counter() - self._wall, time.process_time() - self._process
        return min(wall, process) if self._cpu and process > 0.0 else wall


def blank_rows(target: Target, rows: int, context: int) -> Rows:
    """A KV state of ``rows`` rows that hold ``context`` positions of zeros."""
    state = target.make_rows()
    target.forward(mx.array([[1]], dtype=mx.int32), state)
    mx.eval(state.arrays)
    for layer in state.layers:
        _fill(layer, rows, context)
    state.lengths = [context] * rows
    mx.eval(state.arrays)
    return state


def _fill(layer: RowsKV, rows: int, context: int) -> None:
    held = context if layer.window is None else min(context, layer.window - 1 + SLACK)
    layer.parts = [
        mx.zeros((rows, part.shape[1], held + GROWTH, part.shape[3]), dtype=part.dtype)
        for part in layer.parts
    ]
    layer.lengths = [context] * rows
    layer.start = [context - held] * rows
