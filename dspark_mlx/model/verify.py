"""Verification: which drafted tokens stand, and the target's own token after them.

Maps (draft, target logits) to a verdict; knows no model and no cache. Nothing
is evaluated here: the caller reads the verdict back once a round.

Two rules, each exact:

* *match*: the target makes its own choice y at every position, as it would
  without a draft, and the draft stands while it agrees. Used for greedy
  decoding, for greedy and coupled drafts, and for samplers that are opaque to
  us. The text is the very text of plain decoding with the same seed.
* *rejection* (for independently sampled drafts): accept x with probability
  min(1, p(x)/q(x)); at the first rejection draw from the residual
  max(p - q, 0). The law of the text is p's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..request import SamplingParams
from .sampling import Purpose, choose, gumbel, probabilities, uniform


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What verification must know of one row.

    ``position``: where the row's next token will stand. ``length``: how many
    of its drafted tokens are verified. ``q (w, V)``: the distributions an
    independently sampled draft was drawn from, None for all other drafts.
    ``processors``: callables (tokens, logits ``(1, V)``) -> logits;
    ``history``: ids already in the text, which they see with the drafted ones
    appended. ``sampler``: mlx-lm's, logprobs ``(1, V)`` -> ids ``(1,)``.
    """

    params: SamplingParams
    position: int
    length: int
    q: mx.array | None = None
    processors: tuple[Callable[..., Any], ...] = ()
    history: Sequence[int] = ()
    sampler: Callable[..., Any] | None = None

    @property
    def plain(self) -> bool:
        """Whether the row's choice is just the largest logit."""
        return self.params.greedy and not self.processors and self.sampler is None


@dataclass(frozen=True, slots=True)
class Verdict:
    """``accepted (B,)``: how many drafted tokens stand. ``token (B,)``: the target's next one.

    ``logits`` are those the choices were made from, ``(B, W, V)``, after the
    logits processors.
    """

    accepted: mx.array
    token: mx.array
    logits: mx.array


def verify(draft: mx.array | None, logits: mx.array, rows: Sequence[RowSpec]) -> Verdict:
    """Judge ``draft (B, >= W-1)`` by ``logits (B, W, V)``, W = the longest row's length + 1.

    ``logits[r, k]`` follow the row's anchor and its first k drafted tokens;
    ``draft`` is None when no row has any.
    """
    width = logits.shape[1] - 1
    drafted = None if draft is None else draft[:, :width]
    if any(row.processors for row in rows):
        logits = mx.stack(
            [
                _process(logits[r], row, None if drafted is None else drafted[r])
                for r, row in enumerate(rows)
            ]
        )
    if all(row.plain for row in rows):
        choices = mx.argmax(logits, axis=-1).astype(mx.int32)
        return _match(drafted, choices, [row.length for row in rows], logits)
    verdicts = []
    for r, row in enumerate(rows):
        part = None if drafted is None else drafted[r : r + 1]
        if row.q is not None and row.length > 0 and part is not None and not row.params.greedy:
            verdicts.append(_reject(part[0], logits[r], row.q, row))
        else:
            one = logits[r : r + 1]
            verdicts.append(_match(part, _choices(logits[r], row)[None], [row.length], one))
    return Verdict(
        mx.concatenate([v.accepted for v in verdicts]),
        mx.concatenate([v.token for v in verdicts]),
        logits,
    )


def _match(
    draft: mx.array | None, choices: mx.array, lengths: Sequence[int], logits: mx.array
) -> Verdict:
    """Accept while the draft is what the target chose: choices ``(B, W)``."""
    if draft is None or draft.shape[1] == 0:
        return Verdict(mx.zeros((choices.shape[0],), dtype=mx.int32), choices[:, 0], logits)
    agree = draft == choices[:, :-1]
    if min(lengths) < draft.shape[1]:
        agree = agree & (mx.arange(draft.shape[1]) < mx.array(list(lengths))[:, None])
    accepted = mx.cumprod(agree.astype(mx.int32), axis=1).sum(axis=1)
    token = mx.take_along_axis(choices, accepted[:, None], axis=1)[:, 0]
    return Verdict(accepted, token, logits)


def _reject(draft: mx.array, logits: mx.array, q: mx.array, row: RowSpec) -> Verdict:
    """Rejection sampling of one row: draft ``(l,)``, logits ``(l + 1, V)``, q ``(l, V)``+."""
    length, seed = row.length, row.params.seed or 0
    tokens = draft[:length, None]
    p = probabilities(logits[: length + 1], row.params)
    q = q[:length]
    u = mx.stack([uniform(seed, row.position + k, Purpose.ACCEPT) for k in range(length)])
    p_x = mx.take_along_axis(p[:length], tokens, axis=1)[:, 0]
    q_x = mx.take_along_axis(q, tokens, axis=1)[:, 0]
    # u < p/q without the division: q_x > 0, since x was drawn from q.
    stands = (u * q_x < p_x).astype(mx.int32)
    accepted = mx.cumprod(stands).sum()
    # A drafter with damaged weights proposes nothing either: no number is below p_x above.
    q = mx.where(mx.isfinite(q).all(axis=-1, keepdims=True), q, 0.0)
    # Past the last drafted token nothing was proposed: the residual is p itself.
    q = mx.concatenate([q, mx.zeros_like(q[:1])])
    residual = mx.maximum(mx.take(p, accepted, axis=0) - mx.take(q, accepted, axis=0), 0.0)
    # One set of noise per position, so that the draw is named by where it lands.
    noise = mx.stack(
        [gumbel(p.shape[-1], seed, row.position + k, Purpose.RESIDUAL) for k in range(length + 1)]
    )
    token = mx.argmax(mx.log(residual) + mx.take(noise, accepted, axis=0))
    return Verdict(accepted[None], token[None].astype(mx.int32), logits)


def _choices(logits: mx.array, row: RowSpec) -> mx.array:
    """The target's own token at each position of one row, ``(W,)``."""
    if row.sampler is not None:
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        picks = [row.sampler(logprobs[k : k + 1]) for k in range(logits.shape[0])]
        return mx.concatenate([pick.reshape(1) for pick in picks]).astype(mx.int32)
    positions = range(row.position, row.position + logits.shape[0])
    return choose(logits, row.params, positions).astype(mx.int32)


def _process(logits: mx.array, row: RowSpec, draft: mx.array | None) -> mx.array:
    """One row's logits ``(W, V)`` after its processors, each position on its own history."""
    if not row.processors:
        return logits
    history = mx.array(list(row.history), dtype=mx.int32)
    processed = []
    for k in range(logits.shape[0]):
        seen = history if k == 0 or draft is None else mx.concatenate([history, draft[:k]])
        one = logits[k : k + 1]
        for processor in row.processors:
            one = processor(seen, one)
        processed.append(one)
    return mx.concatenate(processed)
