"""What a drafter would have proposed at every position of a reply, known in advance.

A ``ReplyTrace`` answers for each text position which confidences a draft made there
carries and how many of its tokens the target would accept, so that policies
which advance differently meet the same text. Made from a recorded trace, or
synthetic: difficulty wanders along the text, acceptance falls with the distance
from the anchor, and confidences are noisy and too sure of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...draft.dspark.calibration_fit import Floats, sigmoid
from ...errors import UsageError
from ...events import Event, RowStep, StepDone


@dataclass(frozen=True, slots=True)
class ReplyTrace:
    """``confidence (T, K)`` and ``accepts (T,)``: of a full draft at each of T positions."""

    domain: str
    confidence: Floats
    accepts: tuple[int, ...]

    @property
    def block(self) -> int:
        return int(self.confidence.shape[1])


@dataclass(frozen=True, slots=True)
class Domain:
    """``ease`` and ``spread``: mean and deviation, over the text, of the logit of the first
    token's acceptance; ``decay``: how much it falls per position; ``run``: tokens over which
    difficulty persists."""

    ease: float
    spread: float
    decay: float
    run: float


# Chosen so that of 7 drafted tokens about 46 % (chat), 68 % (code) and 77 % (math) are
# accepted, the rates of fixed-length verification in the paper (§4.3.3); "weak" is a drafter
# that does not suit its text.
DOMAINS = {
    "chat": Domain(2.55, 1.8, 0.10, 6.0),
    "code": Domain(4.05, 2.0, 0.10, 12.0),
    "math": Domain(4.15, 1.7, 0.10, 8.0),
    "weak": Domain(-0.60, 0.9, 0.12, 6.0),
}
MIXED = ("chat", "code", "math")
LONGEST = 1_000_000  # tokens of a recorded reply
OVERCONFIDENT = 1.25  # how much too steep the raw confidences are
NOISE = 0.5  # deviation of a confidence's logit from the truth's


def synthetic(domain: str, tokens: int, block: int, seed: int) -> ReplyTrace:
    """A reply of ``tokens`` tokens. ``mixed`` changes domain every 60 tokens or so."""
    if domain != "mixed" and domain not in DOMAINS:
        raise UsageError(f"no domain {domain!r}", f"choose one of {', '.join(DOMAINS)} or mixed")
    rng = np.random.default_rng(seed)
    length = tokens + block + 1
    ease, spread, decay, run = (np.zeros(length) for _ in range(4))
    start = 0
    while start < length:
        stop = length
        name = domain
        if domain == "mixed":
            name = MIXED[int(rng.integers(len(MIXED)))]
            stop = min(length, start + int(rng.integers(40, 81)))
        d = DOMAINS[name]
        ease[start:stop], spread[start:stop] = d.ease, d.spread
        decay[start:stop], run[start:stop] = d.decay, d.run
        start = stop
    keep = np.exp(-1.0 / run)
    shock = rng.normal(size=length)
    wander = np.zeros(length)
    wander[0] = shock[0]
    for t in range(1, length):
        wander[t] = keep[t] * wander[t - 1] + np.sqrt(1.0 - keep[t] ** 2) * shock[t]
    ahead = np.arange(tokens)[:, None] + np.arange(1, block + 1)[None, :]
    truth = (ease + spread * wander)[ahead] - decay[ahead] * np.arange(block)
    accepted = rng.random((tokens, block)) < sigmoid(truth)
    raw = OVERCONFIDENT * (truth + NOISE * rng.normal(size=truth.shape)) + 0.2
    accepts = np.cumprod(accepted, axis=1).sum(axis=1)
    return ReplyTrace(domain, sigmoid(raw), tuple(int(a) for a in accepts))


def from_trace(events: Iterable[Event], seed: int = 0) -> list[ReplyTrace]:
    """One trace per recorded reply that drafted, from the ``StepDone`` events of a trace.

    A position between two recorded rounds is answered by the round before it; those
    that copied in a drafter's place say nothing of it and are left out.
    Tokens that were never verified are decided by their survival: exact
    outcomes need a trace made with ``--schedule fixed`` and the whole block.
    Raises UsageError when nothing in the trace was drafted with confidences, or a round of it
    cannot have been.
    """
    rng = np.random.default_rng(seed)
    rounds: dict[str, list[tuple[int, tuple[float, ...], int]]] = {}
    copies: dict[str, list[tuple[int, tuple[float, ...], int]]] = {}
    for event in events:
        if not isinstance(event, StepDone):
            continue
        for row in event.rows:
            if not row.drafted or len(row.confidence) < len(row.drafted):
                continue
            _check(row)
            accepted = row.accepted
            if accepted == row.scheduled:  # what came after it was never seen
                for c in row.confidence[accepted:]:
                    if rng.random() >= c:
                        break
                    accepted += 1
            known = copies if row.copied else rounds
            known.setdefault(row.request_id, []).append((row.position, row.confidence, accepted))
    rounds = copies | rounds
    if not rounds:
        raise UsageError(
            "the trace has no round with drafted tokens and confidences",
            "record one with --schedule fixed",
        )
    return [_script(name, sorted(done)) for name, done in rounds.items()]


def _check(row: RowStep) -> None:
    if not all(0.0 <= c <= 1.0 for c in row.confidence):
        raise UsageError(f"the trace has a confidence of {row.request_id!r} that is no chance")
    if not 0 <= row.position < LONGEST:
        raise UsageError(f"the trace has a token at position {row.position}, beyond {LONGEST:,}")


def _script(name: str, rounds: list[tuple[int, tuple[float, ...], int]]) -> ReplyTrace:
    block = max(len(c) for _, c, _ in rounds)
    first, last = rounds[0][0], rounds[-1][0] + rounds[-1][2] + 1
    confidence = np.zeros((last - first, block))
    accepts = [0] * (last - first)
    for i, (position, c, accepted) in enumerate(rounds):
        until = rounds[i + 1][0] if i + 1 < len(rounds) else last
        for t in range(position - first, until - first):
            confidence[t, : len(c)] = c
            accepts[t] = accepted
    return ReplyTrace(name, confidence, tuple(accepts))
