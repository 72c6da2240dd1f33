"""Logits to probabilities, once for both models, and samples from them.

p is the target's distribution and q the drafter's; both come from
``log_weights`` with the same parameters, in float32. Every random draw is named
by (seed, position, purpose), not by a running state: what the target draws for
a position does not depend on how many drafts were made on the way, so a reply
with a given seed can be repeated with or without speculation, alone or in a
batch. Independent drafts are the exception that proves exactness: a position
drafted again in a later round gets fresh noise, because a policy may have seen
what followed from the first draft.
"""

from __future__ import annotations

import enum

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from ..request import SamplingParams


class Purpose(enum.IntEnum):
    """What a random draw is for; different purposes never share noise."""

    TOKEN = 0  # the target's own choice at a position (and a coupled draft's)
    ACCEPT = 1  # whether a drafted token is accepted, in rejection sampling
    RESIDUAL = 2  # the replacement for a rejected token
    DRAFT = 3  # an independent draft, named by its block's start and its slot


def log_weights(logits: mx.array, params: SamplingParams) -> mx.array:
    """Unnormalised log-probabilities ``(..., V)`` in float32; -inf where filtered out.

    Follows mlx-lm's ``make_sampler``: top-p, min-p and top-k look at the
    distribution at temperature 1, the temperature is applied after them.
    Requires ``params.temperature`` > 0.
    """
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if 0.0 < params.top_p < 1.0:
        logprobs = apply_top_p(logprobs, params.top_p)
    if params.min_p > 0.0:
        logprobs = apply_min_p(logprobs, params.min_p)
    if 0 < params.top_k < logits.shape[-1]:
        logprobs = apply_top_k(logprobs, params.top_k)
    # The largest is 0, so that no temperature, however small, overflows all of them.
    logprobs = logprobs - mx.max(logprobs, axis=-1, keepdims=True)
    return logprobs * min(1.0 / max(params.temperature, 1e-30), 1e30)


def probabilities(logits: mx.array, params: SamplingParams) -> mx.array:
    """The distribution ``(..., V)`` a token is drawn from, float32, summing to 1."""
    return mx.softmax(log_weights(logits, params), axis=-1, precise=True)


def key(seed: int, position: int, purpose: Purpose, slot: int = 0) -> mx.array:
    """The random key of one draw: for one seed, a distinct Threefry key for each other argument.

    ``slot`` is for the purpose ``DRAFT`` only, the last of them.
    """
    low = (seed + 0x9E3779B9 * (purpose + slot)) & 0xFFFFFFFF
    high = ((seed >> 32) ^ position) & 0xFFFFFFFF
    return mx.array([low, high], dtype=mx.uint32)


def gumbel(vocab: int, seed: int, position: int, purpose: Purpose, slot: int = 0) -> mx.array:
    """Gumbel noise ``(V,)``: the argmax of log-weights plus it is a sample."""
    return mx.random.gumbel((vocab,), key=key(seed, position, purpose, slot))


def uniform(seed: int, position: int, purpose: Purpose) -> mx.array:
    """One number in [0, 1)."""
    return mx.random.uniform(key=key(seed, position, purpose))


def choose(logits: mx.array, params: SamplingParams, positions: range) -> mx.array:
    """The target's own token at each position: logits ``(L, V)`` to ids ``(L,)``.

    ``positions[i]`` is where the token chosen from ``logits[i]`` will stand.
    """
    if params.greedy:
        return mx.argmax(logits, axis=-1)
    seed = params.seed or 0
    vocab = logits.shape[-1]
    noise = mx.stack([gumbel(vocab, seed, p, Purpose.TOKEN) for p in positions])
    return mx.argmax(log_weights(logits, params) + noise, axis=-1)
